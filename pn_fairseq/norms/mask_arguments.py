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
from pn_fairseq.norms.mask_search import ATTENDED_NAMES, TARGET_NAMES, Arguments
from pn_fairseq.norms.padding import ARGUMENT_FORMS, FORMS, Again, PaddingMask, current_scope

#: Arguments that hold what a module, such as a layer of a decoder, attends to.
_ATTENDED = {"context", "encoder_hidden_states", "key_value_states", "encodings"}
for _encoded in ("memory", "mem", "encoded", "enc", "encoder"):
    for _what in (
        "out",
        "output",
        "outputs",
        "state",
        "states",
        "hidden",
        "feats",
        "features",
        "memory",
        "mem",
    ):
        _ATTENDED.add(f"{_encoded}_{_what}")
    if _encoded != "encoder":  # which may be a module
        _ATTENDED |= {
            _encoded,
            f"src_{_encoded}",
            f"source_{_encoded}",
            f"{_encoded}_src",
            f"{_encoded}_source",
        }

#: What the names of arguments contain that hold tensors (B, T, C), but no other sequence.
_NO_SEQUENCE = ("mask", "pad", "pos", "bias", "emb", "residual", "rotary", "len")


def mask_forms(
    mask_from: str | Sequence[str] | Mapping[str, str | Callable] | None,
) -> dict[str, str | Callable]:
    """Name of an argument -> its form, as in :data:`ARGUMENT_FORMS`, which is the result for None.

    Raises:
        ValueError: the form of an argument is not known.
    """
    if mask_from is None:
        return ARGUMENT_FORMS
    if isinstance(mask_from, Mapping):
        if wrong := [form for form in mask_from.values() if not (callable(form) or form in FORMS)]:
            raise ValueError(
                f"mask_from: {wrong[0]!r} must be a function or one of {', '.join(FORMS)}"
            )
        return dict(mask_from)
    names = [mask_from] if isinstance(mask_from, str) else list(mask_from)
    if unknown := [name for name in names if name not in ARGUMENT_FORMS]:
        raise ValueError(
            f"mask_from={unknown[0]!r}: what its values mean is not known; give a dict such as "
            f"{{{unknown[0]!r}: 'mask'}} (True = padding), 'valid' (other than 0 = token), "
            "'lengths' or 'additive'; "
            f"known names: {', '.join(ARGUMENT_FORMS)}"
        )
    return {name: ARGUMENT_FORMS[name] for name in names}


class ArgumentHook:
    """Makes a scope of every forward of one module, with the masks that are among its arguments.

    Args:
        module: name of the module in the model.
        parameters: of its forward, without ``self``.
        forms: argument that may hold a mask -> its form, see :func:`mask_forms`.
        norms: those that it serves, of one :class:`Conversion`.
        named: whether the caller named ``forms``. If all of them are masks of a source, they count
            whatever else the module gets.
    """

    def __init__(
        self, module: str, parameters: list, forms: dict, norms: list, named: bool = False
    ):
        self.module, self.forms = module or "the model", forms
        self.conversion = norms[0].conversion.id
        self.writes_zeros = any(norm.zero_padding for norm in norms)
        self.handle = handle_of(self)
        attended = [parameter for parameter in parameters if parameter.name in _ATTENDED]
        self._attended = [parameter.name for parameter in attended]
        #: Arguments by which a call shows that a mask of another sequence is among its arguments.
        self._first, self._seconds = _second_sequences(parameters, forms)
        if named and all(name.startswith(ATTENDED_NAMES) for name in forms):
            self._seconds = []
        #: Whether a call may attend to something, and whether every call does.
        self.may_attend = bool(attended)
        self.always_attends = any(parameter.default is parameter.empty for parameter in attended)
        #: Argument -> its position; None: it is passed by name only.
        self._positions = {
            parameter.name: None if parameter.kind == parameter.KEYWORD_ONLY else index
            for index, parameter in enumerate(parameters)
            if parameter.name in (*forms, *_ATTENDED, self._first, *self._seconds)
        }

    def before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        values = {name: self._value(name, args, kwargs) for name in self.forms}
        attends = False
        for name in self._attended:
            attends = attends or _is_sequence(self._value(name, args, kwargs))
        if self._has_second_sequence(args, kwargs):
            attends = True
            values = {
                name: value for name, value in values.items() if not name.startswith(ATTENDED_NAMES)
            }
        if not torch.compiler.is_compiling():
            self.scope(values, self.forms, attends).__enter__()
        elif self._is_in_graph(module):
            self._enter_in_graph(values, attends)

    def _enter_in_graph(self, values: dict, attends: bool) -> None:
        names, forms, given, tensors = [], [], [], []
        for name, value in values.items():
            form = self.forms[name]
            if callable(form):
                value, form = value if value is None else form(value), "mask"
            if value is None or isinstance(value, Tensor):
                names.append(name)
                forms.append(form)
                given.append(value is not None)
                tensors += [] if value is None else [value]
        outer = open_scopes[-1] if open_scopes else None
        open_scopes.append(enter_scope(tensors, given, names, forms, attends, self.handle, outer))

    def scope(self, values: dict, forms: dict, attends: bool) -> Arguments:
        def read() -> dict[str, PaddingMask | None]:
            masks = {name: self._mask(name, value, forms[name]) for name, value in values.items()}
            return {name: mask for name, mask in masks.items() if mask is not NotImplemented}

        return Arguments(self, read, attends)

    def _is_in_graph(self, module: nn.Module) -> bool:
        """Whether a compiled graph knows of the scope: in evaluation only zero_padding uses a mask.

        A norm refuses to be exported in training, and torch.export calls no :meth:`after` after an
        error.
        """
        return self.writes_zeros or (module.training and not torch.compiler.is_exporting())

    def _value(self, argument: str, args: tuple, kwargs: dict):
        position = self._positions[argument]
        value = kwargs.get(argument)
        return (
            args[position]
            if value is None and position is not None and position < len(args)
            else value
        )

    def _has_second_sequence(self, args: tuple, kwargs: dict) -> bool:
        for name in self._seconds:
            value = self._value(name, args, kwargs)
            is_sequence = (
                isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()
            )
            if is_sequence and value is not self._value(self._first, args, kwargs):
                return True
        return False

    def after(self, module: nn.Module, args: tuple, output) -> None:
        if not torch.compiler.is_compiling():
            scope = current_scope()
            if isinstance(scope, Arguments) and scope.hook is self:
                scope.__exit__()
        elif self._is_in_graph(module):
            open_scopes.pop()

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.handle = handle_of(self)

    def _mask(self, name: str, value: Any, form: str | Callable):
        """PaddingMask, None, or NotImplemented where the value is no mask of positions."""
        if callable(form) and value is not None:
            value, form = form(value), "mask"
        if value is None:
            return None
        if not isinstance(value, Tensor):
            return NotImplemented
        inner = value
        while inner.dim() > 2 and inner.size(1) == 1:
            inner = inner.squeeze(1)
        if form != "lengths" and inner.dim() != 2:
            return NotImplemented  # which query sees which key, (B, H, Q, K)
        if form == "valid" and value.dim() > 2 and value.is_floating_point():
            form = "additive"  # what attention_mask has become inside Hugging Face's models
        return PaddingMask(form, value, f"argument {name} of {self.module}")


def _second_sequences(parameters: list, forms: dict) -> tuple[str, list[str]]:
    """The first of ``parameters`` and those that may hold another sequence (B, T, C), to which a
    mask such as ``src_key_padding_mask`` among ``forms`` would belong. None are returned where the
    first may have that mask.
    """
    first = parameters[0].name if parameters else ""
    if first.startswith(ATTENDED_NAMES) or not any(
        name.startswith(ATTENDED_NAMES) for name in forms
    ):
        return first, []
    seconds = []
    for parameter in parameters[1:]:
        is_positional = parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        )
        is_known = parameter.name in forms or parameter.name in _ATTENDED
        # the first is the source
        is_target = parameter.name == "y" or parameter.name.startswith(TARGET_NAMES)
        is_no_sequence = is_target or any(part in parameter.name for part in _NO_SEQUENCE)
        if is_positional and not is_known and not is_no_sequence:
            seconds.append(parameter.name)
    return first, seconds


def attends(module: nn.Module) -> bool:
    """Whether the forward of ``module`` has an argument for other tokens that it attends to."""
    return any(parameter.name in _ATTENDED for parameter in _parameters_of(module))


def _parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    """Those of its forward, without ``self``; none where they are not known."""
    try:
        return list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return []


def _is_sequence(value) -> bool:
    """Whether ``value`` may be tokens of another sequence: neither None, nor a vector such as a
    speaker's.
    """
    return value.dim() > 2 if isinstance(value, Tensor) else value is not None


# torch.compile does not compile a hook by itself, as it would for a module whose forward is
# compiled by itself.
for _hook in (ArgumentHook.before, ArgumentHook.after):
    eval_frame.set_code_exec_strategy(
        _hook.__code__,
        eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP),
    )


@operator(
    "enter_scope(Tensor[] tensors, bool[] given, str[] names, str[] forms, bool attends, Tensor "
    "hook, Tensor? outer) "
    "-> Tensor",
    lambda *_: ticket(),
)
def enter_scope(tensors, given, names, forms, attends, hook, outer):
    """The scope of ``hook`` in ``outer``.

    ``given``: which of the arguments ``names`` are not None but ``tensors``.
    """
    rest = iter(tensors)
    values = {}
    for name, is_given in zip(names, given, strict=True):
        # A clone, because the compiler may use the memory for other tensors.
        values[name] = next(rest).clone() if is_given else None
    scope = find(hook).scope(values, dict(zip(names, forms, strict=True)), attends)
    with nullcontext() if outer is None else find(outer), scope:
        return ticket_of(Again(scope.around()))


#: The hooks of all modules that end a scope have this key in their modules, or the next one down
#: where it is taken. torch.compile guards the keys of hooks with ``always_call``: with torch's own,
#: which differ from module to module, layers that are compiled one by one would share no graph.
_KEY = -1


def _register(module: nn.Module, hook: ArgumentHook) -> None:
    module.register_forward_pre_hook(hook.before, with_kwargs=True)
    handle = module.register_forward_hook(hook.after, always_call=True)
    key = _KEY
    while key in module._forward_hooks:
        key -= 1
    module._forward_hooks[key] = module._forward_hooks.pop(handle.id)
    module._forward_hooks_always_called[key] = module._forward_hooks_always_called.pop(handle.id)
    module._forward_hooks.move_to_end(key, last=False)  # the last to begin ends first


def add_argument_hooks(model: nn.Module, norms: list, forms: dict) -> None:
    """Give every module around ``norms`` whose forward has an argument of ``forms`` a hook.

    Raises:
        ValueError: ``forms`` are what the caller named, and there is no such module.
    """
    served = {norm for norm in norms if norm.zero_padding or isinstance(norm, RunningNorm)}
    hooked = 0
    for name, module in model.named_modules():
        if isinstance(module, ConvertedNorm) or served.isdisjoint(module.modules()):
            continue
        parameters = _parameters_of(module)
        own = _own_masks(module, {parameter.name for parameter in parameters}, forms)
        hook = ArgumentHook(name, parameters, own, norms, named=forms is not ARGUMENT_FORMS)
        if own or hook.may_attend:
            _register(module, hook)
        hooked += bool(own)
    if served and not hooked and forms is not ARGUMENT_FORMS:
        raise ValueError(
            f"mask_from={', '.join(forms)}: no module that contains a replaced norm has a forward "
            "argument of this name"
        )


def _own_masks(module: nn.Module, accepted: set[str], forms: dict) -> dict:
    """Those of ``forms`` that are arguments of ``module``, which accepts ``accepted``, and masks
    of its own tokens.
    """
    # an attention of Hugging Face's, whose mask is the one of its keys
    if "key_value_states" in accepted:
        return {}
    attends = "key" in accepted or not accepted.isdisjoint(_ATTENDED)
    package = type(module).__module__.partition(".")[0]
    own = {}
    for name, form in forms.items():
        name = name.removeprefix(f"{package}.")
        if name in accepted and not (attends and name.startswith(ATTENDED_NAMES)):
            own[name] = form
    return own


def arguments_with_mask(model: nn.Module, name: str, conversion: Conversion) -> list[str]:
    """The arguments that may hold the mask of the norm ``name`` of ``model``,

    the innermost first.
    """
    modules = [("", model)]
    for key in name.split(".")[:-1]:
        path, module = modules[-1]
        modules.append((f"{path}.{key}".lstrip("."), getattr(module, key)))
    sources, attends = [], False
    for path, module in reversed(modules):
        hooks = [getattr(method, "__self__", None) for method in module._forward_pre_hooks.values()]
        for hook in hooks:
            if not isinstance(hook, ArgumentHook) or hook.conversion != conversion.id:
                continue
            names = list(hook.forms)
            if attends and not hook.may_attend:
                names = [each for each in names if each.startswith(TARGET_NAMES)]
            if names:
                sources.append(f"argument {' or '.join(names)} of {path or 'the model'}")
            attends = attends or hook.always_attends
    return sources
