"""Masks in the arguments of the modules around the norms of a converted model."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame

from pn_fairseq.kernels.ops import exporting
from pn_fairseq.norms.conversion.converted_norm import Conversion, ConvertedNorm
from pn_fairseq.norms.core.base import RunningNorm
from pn_fairseq.norms.core.compiled import find, handle_of, open_scopes, operator, ticket, ticket_of
from pn_fairseq.norms.masks.padding import (
    ARGUMENT_FORMS,
    FORMS,
    Again,
    PaddingMask,
    current_scope,
    without_dimensions_of_1,
)
from pn_fairseq.norms.masks.search import ATTENDED_NAMES, TARGET_NAMES, Arguments

#: Matches the names of arguments that hold what a module, such as a layer of a decoder, attends to.
#: A plain "encoder" may be a module.
_is_attended = re.compile(
    "(memory|mem|encoded|enc|encoder)_"
    "(out|outputs?|states?|hidden|feats|features|memory|mem)"
    "|(src|source)_(memory|mem|encoded|enc)|(memory|mem|encoded|enc)(_src|_source)?"
    "|context|encoder_hidden_states|key_value_states|encodings"
).fullmatch

#: Parts of the names of arguments that may hold tensors (B, T, C), but not another sequence.
_NO_SEQUENCE = ("mask", "pad", "pos", "bias", "emb", "residual", "rotary", "len")


def mask_forms(
    mask_from: str | Sequence[str] | Mapping[str, str | Callable] | None,
) -> dict[str, str | Callable]:
    """Name of an argument -> its form, as in :data:`ARGUMENT_FORMS`, which is the result for None.

    Raises:
        ValueError: the form of an argument is unknown.
    """
    if mask_from is None:
        return ARGUMENT_FORMS
    if isinstance(mask_from, Mapping):
        for form in mask_from.values():
            if not callable(form) and form not in FORMS:
                raise ValueError(
                    f"mask_from: {form!r} must be a function or one of {', '.join(FORMS)}"
                )
        return dict(mask_from)
    forms = {}
    for name in [mask_from] if isinstance(mask_from, str) else mask_from:
        if name not in ARGUMENT_FORMS:
            raise ValueError(
                f"mask_from={name!r}: what its values mean is not known; give a dict such as "
                f"{{{name!r}: 'mask'}} (True = padding), 'valid' (other than 0 = token), "
                f"'lengths' or 'additive'; known names: {', '.join(ARGUMENT_FORMS)}"
            )
        forms[name] = ARGUMENT_FORMS[name]
    return forms


class ArgumentHook:
    """Makes every forward of one module a scope with the masks among its arguments.

    Args:
        module: name of the module in the model.
        parameters: parameters of its forward, without ``self``.
        forms: argument that may hold a mask -> its form, see :func:`mask_forms`.
        norms: the norms that the hook serves, of one :class:`Conversion`.
        named: whether the caller named ``forms``. If all of them are masks of a source, they count
            whatever else the module receives. A list or array in such an argument is an error.
    """

    def __init__(
        self, module: str, parameters: list, forms: dict, norms: list, named: bool = False
    ):
        self.module = module or "the model"
        self.forms = forms
        self.named = named
        self.conversion_id = norms[0].conversion.id
        self.writes_zeros = any(norm.zero_padding for norm in norms)
        self.handle = handle_of(self)
        positional = [each for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD]
        self.positional = [parameter.name for parameter in positional]
        attended = [parameter for parameter in parameters if _is_attended(parameter.name)]
        #: Arguments that hold what the module attends to, and whether one of them is required.
        self.attended = [parameter.name for parameter in attended]
        self.always_attends = any(parameter.default is parameter.empty for parameter in attended)
        #: Arguments that, if a call gives one, show that a mask belongs to another sequence.
        self.second_sequences = _second_sequences(self.positional, forms, named)

    def before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = dict(zip(self.positional, args, strict=False)) | kwargs
        attends = any(_is_sequence(given.get(name)) for name in self.attended)
        forms = self.forms
        if self._has_second_sequence(given):
            attends = True
            forms = {name: form for name, form in forms.items() if not _is_of_source(name)}
        values = {name: given.get(name) for name in forms}
        if not torch.compiler.is_compiling():
            self.scope(values, forms, attends).__enter__()
        elif self._is_in_graph(module):
            self._enter_in_graph(values, attends)

    def _enter_in_graph(self, values: dict, attends: bool) -> None:
        given = []
        names = []
        forms = []
        for name, value in values.items():
            form = self.forms[name]
            if callable(form):
                value = None if value is None else form(value)
                form = "mask"
            if value is None or isinstance(value, Tensor):
                given.append(value)
                names.append(name)
                forms.append(form)
        outer = open_scopes[-1] if open_scopes else None
        open_scopes.append(enter_scope(given, names, forms, attends, self.handle, outer))

    def scope(self, values: dict, forms: dict, attends: bool) -> Arguments:
        def read() -> tuple[dict[str, PaddingMask | None], list[str]]:
            masks = {}
            unread = []
            for name, value in values.items():
                mask = self._mask(name, value, forms[name])
                if mask is not NotImplemented:
                    masks[name] = mask
                elif _is_array(value):
                    kind = type(value).__name__
                    unread.append(f"argument {name} of {self.module} is a {kind}, and no tensor")
                elif isinstance(value, Tensor) and value.dim() == 1:
                    unread.append(
                        f"argument {name} of {self.module} is {tuple(value.shape)}, and not (B, T)"
                    )
            return masks, unread

        return Arguments(self, read, attends)

    def _is_in_graph(self, module: nn.Module) -> bool:
        """Whether a compiled graph includes the scope: in evaluation only zero_padding uses a mask.

        In training a norm refuses to be exported, and torch.export does not call :meth:`after`
        after an error.
        """
        return self.writes_zeros or (module.training and not exporting())

    def _has_second_sequence(self, given: dict) -> bool:
        for value in map(given.get, self.second_sequences):
            if isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point():
                if value is not given.get(self.positional[0]):
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
        """A PaddingMask, None, or NotImplemented if the value is not a mask of positions."""
        if callable(form) and value is not None:
            value = form(value)
            form = "mask"
        if value is None:
            return None
        source = f"argument {name} of {self.module}"
        if not isinstance(value, Tensor):
            if self.named and _is_array(value):
                return PaddingMask(form, value, source)  # raises an error about the type
            return NotImplemented
        mask = without_dimensions_of_1(value)
        if form != "lengths" and mask.dim() != 2:
            return NotImplemented  # which query sees which key, (B, H, Q, K)
        if form == "valid" and value.dim() > 2 and value.is_floating_point():
            form = "additive"  # what attention_mask has become inside Hugging Face's models
        return PaddingMask(form, value, source)


def _is_array(value) -> bool:
    """Whether ``value`` is a list or an array of numbers, but not a tensor."""
    return isinstance(value, list) or (
        hasattr(value, "__array__") and not isinstance(value, Tensor)
    )


def _is_of_source(name: str) -> bool:
    """Whether a mask with this name is for what a module attends to."""
    return name.startswith(ATTENDED_NAMES)


def _second_sequences(positional: list[str], forms: dict, named: bool) -> list[str]:
    """The arguments that may hold another sequence (B, T, C), to which a mask such as
    ``src_key_padding_mask`` among ``forms`` would belong; none if that mask may belong to the first
    argument.
    """
    of_source = [name for name in forms if _is_of_source(name)]
    if not of_source or not positional or _is_of_source(positional[0]):
        return []
    if named and len(of_source) == len(forms):
        return []
    seconds = []
    for name in positional[1:]:
        is_target = name == "y" or name.startswith(TARGET_NAMES)  # so the first is the source
        is_known = name in forms or _is_attended(name)
        if not (is_target or is_known or any(part in name for part in _NO_SEQUENCE)):
            seconds.append(name)
    return seconds


def attends(module: nn.Module) -> bool:
    """Whether the forward of ``module`` has an argument for other tokens that it attends to."""
    return any(_is_attended(parameter.name) for parameter in parameters_of(module))


def parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    """The parameters of its forward, without ``self``; none if they are unknown."""
    try:
        return list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return []


def _is_sequence(value) -> bool:
    """Whether ``value`` may be tokens of another sequence: neither None nor a vector, such as a
    speaker embedding.
    """
    if isinstance(value, Tensor):
        return value.dim() > 2
    return value is not None


# Keep torch.compile from compiling a hook by itself, as it would for a module whose forward is
# compiled by itself.
for _hook in (ArgumentHook.before, ArgumentHook.after):
    eval_frame.set_code_exec_strategy(
        _hook.__code__,
        eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP),
    )


@operator(
    "enter_scope(Tensor?[] given, str[] names, str[] forms, bool attends, Tensor hook, Tensor? "
    "outer) -> Tensor",
    lambda *_: ticket(),
)
def enter_scope(given, names, forms, attends, hook, outer):
    """The scope of ``hook`` inside ``outer``; ``given``: the values of the arguments ``names``."""
    # Clones, because the compiler may use the memory for other tensors.
    clones = [None if value is None else value.clone() for value in given]
    values = dict(zip(names, clones, strict=True))
    scope = find(hook).scope(values, dict(zip(names, forms, strict=True)), attends)
    with nullcontext() if outer is None else find(outer), scope:
        return ticket_of(Again(scope.around()))


#: The hooks that end a scope have this key in all modules, or the next lower free one.
#: torch.compile guards the keys of hooks with ``always_call``: with torch's own keys, which differ
#: between modules, layers that are compiled one by one would share no graph.
_KEY = -1


def _register(module: nn.Module, hook: ArgumentHook) -> None:
    module.register_forward_pre_hook(hook.before, with_kwargs=True)
    number = module.register_forward_hook(hook.after, always_call=True).id
    key = _KEY
    while key in module._forward_hooks:
        key -= 1
    for hooks in (module._forward_hooks, module._forward_hooks_always_called):
        hooks[key] = hooks.pop(number)
    module._forward_hooks.move_to_end(key, last=False)  # the scope that began last ends first


def add_argument_hooks(model: nn.Module, norms: list, forms: dict) -> None:
    """Add a hook to every module around ``norms`` whose forward has an argument of ``forms``, or
    one that holds what it attends to.

    Raises:
        ValueError: the caller named ``forms``, and no module has such an argument.
    """
    served = {norm for norm in norms if norm.zero_padding or isinstance(norm, RunningNorm)}
    named = forms is not ARGUMENT_FORMS
    is_found = not served or not named
    for name, module in model.named_modules():
        if isinstance(module, ConvertedNorm) or served.isdisjoint(module.modules()):
            continue
        parameters = parameters_of(module)
        own = _own_masks(module, {parameter.name for parameter in parameters}, forms)
        hook = ArgumentHook(name, parameters, own, norms, named)
        is_found = is_found or bool(own)
        if own or hook.attended:
            _register(module, hook)
    if not is_found:
        raise ValueError(
            f"mask_from={', '.join(forms)}: no module that contains a replaced norm has a forward "
            "argument of this name"
        )


def _own_masks(module: nn.Module, accepted: set[str], forms: dict) -> dict:
    """The ``forms`` that are arguments of ``module``, which accepts ``accepted``, and masks of its
    own tokens.
    """
    # an attention of Hugging Face, whose mask belongs to its keys
    if "key_value_states" in accepted:
        return {}
    attends = "key" in accepted or any(map(_is_attended, accepted))
    package = type(module).__module__.partition(".")[0]
    own = {}
    for name, form in forms.items():
        name = name.removeprefix(f"{package}.")
        if name in accepted and not (attends and _is_of_source(name)):
            own[name] = form
    return own


def arguments_with_mask(model: nn.Module, name: str, conversion: Conversion) -> list[str]:
    """The arguments that may hold the mask of the norm ``name`` of ``model``, innermost first."""
    sources = []
    attends = False
    path = name
    while path:
        path = path.rpartition(".")[0]
        for method in model.get_submodule(path)._forward_pre_hooks.values():
            hook = getattr(method, "__self__", None)
            if not isinstance(hook, ArgumentHook) or hook.conversion_id != conversion.id:
                continue
            names = list(hook.forms)
            if attends and not hook.attended:
                names = [each for each in names if each.startswith(TARGET_NAMES)]
            if names:
                sources.append(f"argument {' or '.join(names)} of {path or 'the model'}")
            attends = attends or hook.always_attends
    return sources
