"""Masks that are arguments of the modules around the norms of a converted model."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame

from pn_fairseq.norms.base import RunningNorm
from pn_fairseq.norms.compiled import find, handle_of, open_scopes, operator, ticket, ticket_of
from pn_fairseq.norms.converted import Conversion, ConvertedNorm
from pn_fairseq.norms.padding import ARGUMENT_FORMS, FORMS, Again, PaddingMask, Scope, current_scope

#: Arguments that hold what a module, such as a layer of a decoder, attends to.
_ATTENDED = (
    *("memory", "context", "encoder_hidden_states"),
    *("encoder_out", "encoder_output", "encoder_outputs", "enc_out", "enc_output", "enc_outputs"),
)

#: How the names of arguments begin that say something of the source or the target of an encoder-decoder model.
_OF_SOURCE = ("src", "source", "encoder", "enc_", "memory", "context")
_OF_TARGET = ("tgt", "trg", "target", "decoder", "dec_", "prev_output")


def mask_forms(mask_from: str | Sequence[str] | Mapping[str, str | Callable] | None) -> dict[str, str | Callable]:
    """Name of an argument -> its form, as in :data:`ARGUMENT_FORMS`, which is the result for None.

    Raises:
        ValueError: the form of an argument is not known.
    """
    if mask_from is None:
        return ARGUMENT_FORMS
    if isinstance(mask_from, Mapping):
        if wrong := [form for form in mask_from.values() if not (callable(form) or form in FORMS)]:
            raise ValueError(f"mask_from: {wrong[0]!r} must be a function or one of {', '.join(FORMS)}")
        return dict(mask_from)
    names = [mask_from] if isinstance(mask_from, str) else list(mask_from)
    if unknown := [name for name in names if name not in ARGUMENT_FORMS]:
        raise ValueError(
            f"mask_from={unknown[0]!r}: what its values mean is not known; give a dict such as "
            f"{{{unknown[0]!r}: 'mask'}} (True = padding), 'valid' (other than 0 = token), 'lengths' or 'additive'; "
            f"known names: {', '.join(ARGUMENT_FORMS)}"
        )
    return {name: ARGUMENT_FORMS[name] for name in names}


class ArgumentHook:
    """Makes a scope of every forward of one module, with the mask that is among its arguments.

    Args:
        module: name of the module in the model.
        parameters: of its forward, without ``self``.
        argument: the parameter that has the mask; None: the forward has no mask of its own tokens.
        form: of the mask, see :func:`mask_forms`.
        norms: those that it serves, of one :class:`Conversion`.
        declared: None means that there is no padding.
    """

    def __init__(self, module: str, parameters: list, argument: str | None, form, norms: list, declared: bool):
        self.argument, self.form, self.declared = argument, form, declared
        self.conversion = norms[0].conversion.id
        self.writes_zeros = any(norm.zero_padding for norm in norms)
        self.handle = handle_of(self)
        self.source = f"argument {argument} of {module or 'the model'}"
        self.of_source, self.of_target = (str(argument).startswith(names) for names in (_OF_SOURCE, _OF_TARGET))
        #: Argument -> its position; None: it is passed by name only.
        self._positions = {
            parameter.name: None if parameter.kind == parameter.KEYWORD_ONLY else index
            for index, parameter in enumerate(parameters)
            if parameter.name in (argument, *_ATTENDED)
        }
        self._attended = [name for name in _ATTENDED if name in self._positions]
        #: Whether every call attends to something.
        self.always_attends = any(p.name in _ATTENDED and p.default is p.empty for p in parameters)

    def before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        value = NotImplemented if self.argument is None else self._value(self.argument, args, kwargs)
        shape = None
        for name in self._attended:
            attended = self._value(name, args, kwargs)
            if isinstance(attended, Tensor) and attended.dim() > 2:  # not a vector, such as a speaker's
                shape = tuple(attended.shape[:2])
            elif not isinstance(attended, Tensor) and attended is not None:
                shape = ()
        if not torch.compiler.is_compiling():
            self.scope(value, self.form, shape).__enter__()
        elif self._is_in_graph(module):
            form = self.form
            if callable(form) and value is not NotImplemented:
                value, form = form(value), "mask"
            known = value is None or isinstance(value, Tensor)
            outer = open_scopes[-1] if open_scopes else None
            open_scopes.append(enter_scope(value if known else None, known, form or "", shape, self.handle, outer))

    def scope(self, value: Any, form: str | Callable | None, attended: tuple[int, ...] | None) -> Scope:
        scope = Scope(lambda: self._mask(value, form), self.declared, self)
        scope.attended = attended
        return scope

    def _is_in_graph(self, module: nn.Module) -> bool:
        """Whether a compiled graph knows of the scope: in evaluation only zero_padding uses a mask.

        A norm refuses to be exported in training, and torch.export calls no :meth:`after` after an error.
        """
        return self.writes_zeros or (module.training and not torch.compiler.is_exporting())

    def _value(self, argument: str, args: tuple, kwargs: dict):
        position = self._positions[argument]
        value = kwargs.get(argument)
        return args[position] if value is None and position is not None and position < len(args) else value

    def after(self, module: nn.Module, args: tuple, output) -> None:
        if not torch.compiler.is_compiling():
            scope = current_scope()
            if scope is not None and scope.hook is self:
                scope.__exit__()
        elif self._is_in_graph(module):
            inner = open_scopes.pop()
            if open_scopes:
                open_scopes.append(leave_scope(inner, open_scopes.pop()))

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.handle = handle_of(self)

    def _mask(self, value: Any, form: str | Callable | None):
        """PaddingMask, None or NotImplemented from the value of the argument."""
        if callable(form) and value is not NotImplemented:
            value = form(value)
            form = "mask"
        if value is None or value is NotImplemented:
            return value
        if not isinstance(value, Tensor):
            return NotImplemented
        inner = value
        while inner.dim() > 2 and inner.size(1) == 1:
            inner = inner.squeeze(1)
        if form != "lengths" and inner.dim() != 2:
            return NotImplemented  # which query sees which key, (B, H, Q, K)
        if form == "valid" and value.dim() > 2 and value.is_floating_point():
            form = "additive"  # what attention_mask has become inside Hugging Face's models
        return PaddingMask(form, value, self.source)


# torch.compile does not compile a hook by itself, as it would for a module whose forward is compiled by itself.
for _hook in (ArgumentHook.before, ArgumentHook.after):
    eval_frame.set_code_exec_strategy(
        _hook.__code__, eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    )


@operator(
    "enter_scope(Tensor? value, bool known, str form, SymInt[]? attended, Tensor hook, Tensor? outer) -> Tensor",
    lambda *_: ticket(),
)
def enter_scope(value, known, form, attended, hook, outer):
    """The scope of ``hook`` in ``outer``. ``known``: whether ``value`` is the mask, None included."""
    # A clone, because the compiler may use the memory for other tensors.
    value = NotImplemented if not known else value if value is None else value.clone()
    shape = None if attended is None else tuple(attended)
    with nullcontext() if outer is None else find(outer), find(hook).scope(value, form or None, shape) as scope:
        return ticket_of(Again(scope.around()))


@operator("leave_scope(Tensor inner, Tensor outer) -> Tensor", lambda *_: ticket())
def leave_scope(inner, outer):
    """``outer`` after ``inner`` has ended in it."""
    left = Again(find(outer).scopes)
    left.scopes[0].last = find(inner).scopes[0]
    return ticket_of(left)


def add_argument_hooks(model: nn.Module, norms: list, forms: dict, declared: bool) -> None:
    """Give every module around ``norms`` whose forward has an argument of ``forms`` a hook.

    Raises:
        ValueError: ``forms`` are what the caller named, and there is no such module.
    """
    served = {norm for norm in norms if norm.zero_padding or isinstance(norm, RunningNorm)}
    hooked = 0
    for name, module in model.named_modules():
        if isinstance(module, ConvertedNorm) or served.isdisjoint(module.modules()):
            continue
        try:
            parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        except (TypeError, ValueError):
            continue
        accepted = {parameter.name for parameter in parameters}
        attends = not accepted.isdisjoint(_ATTENDED)
        package = type(module).__module__.partition(".")[0]
        known = {name.removeprefix(f"{package}."): form for name, form in forms.items()}
        own = [name for name in known if name in accepted and not (attends and name.startswith(_OF_SOURCE))]
        if not own and not attends:
            continue
        argument = own[0] if own else None
        hook = ArgumentHook(name, parameters, argument, known.get(argument), norms, declared)
        module.register_forward_pre_hook(hook.before, with_kwargs=True)
        module.register_forward_hook(hook.after, prepend=True, always_call=True)  # the last to begin ends first
        hooked += bool(own)
    if served and not hooked and forms is not ARGUMENT_FORMS:
        raise ValueError(
            f"mask_from={', '.join(forms)}: no module that contains a replaced norm has a forward argument of this name"
        )


def arguments_with_mask(model: nn.Module, name: str, conversion: Conversion) -> list[str]:
    """The arguments that may hold the mask of the norm ``name`` of ``model``, the innermost first."""
    modules = [("", model)]
    for key in name.split(".")[:-1]:
        path, module = modules[-1]
        modules.append((f"{path}.{key}".lstrip("."), getattr(module, key)))
    sources, attending = [], False
    for path, module in reversed(modules):
        hooks = [getattr(method, "__self__", None) for method in module._forward_pre_hooks.values()]
        for hook in hooks:
            if isinstance(hook, ArgumentHook) and hook.conversion == conversion.id:
                if hook.argument is not None and not (attending and hook.of_source):
                    sources.append(f"argument {hook.argument} of {path or 'the model'}")
                attending = attending or hook.always_attends
    return sources
