"""Which tokens are padding: the forms of masks, and how a mask reaches norms that are called
without one.

A norm gets its mask as an argument or, if it is called as ``norm(x)``, from a *scope*: a ``with
padding(...)`` block, or the running forward of a module with the mask among its arguments.
:mod:`.search` chooses between them. Scopes live in a ``ContextVar``, so a thread does not see the
scopes of another.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor


def _of_batch_layout(layout) -> Tensor:
    return layout.position_indices < 0


#: Name of an argument -> what its value means: one of :data:`FORMS`, or a function that returns the
#: mask. ``PACKAGE.NAME`` is for modules of that package, because other packages mean something else
#: by the name.
ARGUMENT_FORMS: dict[str, str | Callable] = {
    "attention_mask": "valid",
    "decoder_attention_mask": "valid",
    "padding_mask": "mask",
    "key_padding_mask": "mask",
    "src_key_padding_mask": "mask",
    "tgt_key_padding_mask": "mask",
    "encoder_padding_mask": "mask",
    "self_attn_padding_mask": "mask",
    "pad_mask": "mask",
    "tgt_pad_mask": "mask",
    "seqs_layout": _of_batch_layout,
    "joeynmt.mask": "valid",
    "joeynmt.trg_mask": "valid",
    "x_transformers.mask": "valid",
    "lengths": "lengths",
    "input_lengths": "lengths",
    "src_lengths": "lengths",
}

FORMS = ("mask", "valid", "lengths", "additive")

#: Upper bound of an additive mask at padding: models write -inf, the least number of a type, or
#: -10000.
_ADDITIVE_PADDING = -1e4


def without_dimensions_of_1(mask: Tensor) -> Tensor:
    """(B, T) for (B, 1, 1, T), the shape that attention expects."""
    while mask.dim() > 2 and mask.size(1) == 1:
        mask = mask.squeeze(1)
    return mask


def _problem(form: str, value) -> str:
    """Why ``value`` is not a mask of this form; "": it may be one."""
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        if hasattr(value, "dtype"):  # from NumPy, for example
            kind = f"{kind} of {value.dtype} (torch.as_tensor makes one)"
        return (
            f"expected a tensor, got {kind}; the numbers of tokens of the sequences are "
            "lengths=torch.tensor([...])"
        )
    dtype = value.dtype
    is_floating = value.is_floating_point()
    if form == "lengths":
        if value.dim() == 1 and not is_floating and dtype != torch.bool:
            return ""
        return f"lengths are (B,) whole numbers, got {tuple(value.shape)} {dtype}"
    if value.dim() == 0:
        return "a mask has a value for each token (B, T), got one value"
    if form == "mask" and dtype != torch.bool:
        lengths = ", or lengths= if it counts the tokens of each sequence"
        return (
            f"a mask of {dtype} does not say whether 1 is padding or a token; give bool with "
            "True = padding, or valid= if other than 0 means a token, as in a tokenizer's "
            f"attention_mask{lengths if value.dim() == 1 else ''}"
        )
    if form == "valid" and is_floating:
        return (
            f"a mask of {dtype} may be additive; give bool or int, or additive=; if the model "
            "makes it itself, run the model in `with padding(...)`, whose mask takes its place"
        )
    if form == "additive" and not is_floating:
        return f"an additive mask (0 for tokens, -inf for padding) is not {dtype}"
    return ""


class PaddingMask:
    """A mask in one of :data:`FORMS`. :meth:`of` converts it to bool, True = padding, once.

    Raises:
        ValueError: the tensor cannot be such a mask.
    """

    def __init__(self, form: str, value: Tensor, source: str):
        if form == "mask" and isinstance(value, Tensor) and value.is_floating_point():
            form = "additive"  # as torch.nn.TransformerEncoder passes it on
        problem = _problem(form, value)
        if problem:
            raise ValueError(f"{source}: {problem}")
        self.form = form
        self.source = source
        #: (B,), or (B, T), or (N,) for tokens (N, C), or (B, H, W) for images.
        self.value = without_dimensions_of_1(value)
        self._padding: Tensor | None = None
        self._time: int | None = None

    @property
    def batch(self) -> int:
        """Number of sequences B."""
        return self.value.size(0)

    def time(self, tokens: int) -> int:
        """The number of positions T that this mask fits; ``tokens`` is T of the activations that a
        norm received.

        Lengths fit the T of their first use. Before that, T is ``tokens`` or the greatest length,
        whichever is larger.
        """
        if self.form != "lengths":
            return self.value.size(-1)
        if self._time is not None:
            return self._time
        return max(self._longest, tokens)

    @cached_property
    def _longest(self) -> int:
        if not self.value.numel():
            return 0
        shortest, longest = torch.stack(self.value.aminmax()).tolist()
        if shortest < 0:
            raise ValueError(f"{self.source}: a sentence cannot have {shortest} tokens")
        return longest

    def of(self, tokens: int) -> Tensor:
        """Bool, True = padding, in the shape of the mask; for lengths (B, ``tokens``)."""
        if self._padding is None:
            self._time = tokens
            self._padding = self._converted(tokens)
        return self._padding

    def _converted(self, tokens: int) -> Tensor:
        value = self.value
        if self.form == "mask":
            return value
        if self.form == "valid":
            return value == 0
        if self.form == "lengths":
            return torch.arange(tokens, device=value.device) >= value[:, None]
        padding = value <= _ADDITIVE_PADDING
        fits = (padding | (value == 0)).all()
        torch._assert_async(
            fits,
            f"{self.source}: an additive mask holds 0 at tokens and at most -10000 at padding; "
            "give a mask of 0 and 1 as bool: mask=(mask == 1) if 1 means padding, "
            "valid=(mask == 1) if 1 means a token",
        )
        return padding

    def _own(self) -> Tensor:
        """:meth:`of` for the mask's own T, if its form is not lengths."""
        return self.of(self.value.size(-1))

    @cached_property
    def real_tokens(self) -> int:
        """The number of tokens that are not padding. Reading it waits for the device."""
        if self.form == "lengths":
            return int(self.value.sum())
        return int((~self._own()).sum())

    @cached_property
    def empty_sentences(self) -> int:
        """The number of sentences without a token; 0 for masks that are not (B, T).

        Reading it waits for the device.
        """
        if self.form == "lengths":
            return int((self.value == 0).sum())
        if self.value.dim() != 2:
            return 0
        return int(self._own().all(1).sum())

    @property
    def waits_for_device(self) -> bool:
        """Whether :attr:`has_padding` and :attr:`empty_sentences` make the program wait."""
        return self.value.device.type != "cpu"

    @property
    def has_padding(self) -> bool:
        if self.form == "lengths":
            return self.real_tokens < self.batch * self.time(0)
        return self.real_tokens < self.value.numel()

    def __str__(self) -> str:
        return f"{self.source} is {tuple(self.value.shape)}"


def patterns_of(given: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """The patterns of ``only=`` and ``skip=``; None: the argument is not given."""
    if given is None:
        return None
    if isinstance(given, str):
        return (given,)
    return tuple(given)


def matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Whether one of ``names`` fits one of ``patterns``."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


class Scope(AbstractContextManager):
    """What is in effect while a ``with`` block or the forward of a module runs."""

    def __init__(self):
        self.outer: Scope | None = None
        #: The backward pass in which the scope began; -1: none.
        self.graph_task = -1

    def __enter__(self) -> Scope:
        self.outer = _current.get()
        self.graph_task = current_backward()
        _current.set(self)
        return self

    def __exit__(self, *error) -> None:
        _current.set(self.outer)

    def around(self) -> Iterator[Scope]:
        """This scope and those around it that began in the same backward pass, innermost first."""
        scope: Scope | None = self
        while scope is not None and scope.graph_task == self.graph_task:
            yield scope
            scope = scope.outer


class Block(Scope):
    """A ``with padding(...)`` block.

    Args:
        mask: the mask of the tokens; None: they have no padding.
        only: patterns of the names of the norms that the block is for; None: all.
    """

    def __init__(self, mask: PaddingMask | None, only: tuple[str, ...] | None):
        super().__init__()
        self.mask = mask
        self.only = only
        #: Norms that looked for a mask in the block -> whether the block is for them.
        self.asked: dict[str, bool] = {}

    def is_for(self, name: str) -> bool:
        """Whether the norm ``name``, which looks for its mask, finds it here."""
        self.asked[name] = self.only is None or matches([name], self.only)
        return self.asked[name]


class AllIsKnown(Scope):
    """The outermost scope of a recomputation that runs in the scopes of its forward."""


_current: ContextVar[Scope | None] = ContextVar("pn_fairseq_padding", default=None)


def current_scope() -> Scope | None:
    """The innermost scope."""
    return _current.get()


def current_backward() -> int:
    """The backward pass that calls this function, for example to recompute a forward; -1: none."""
    return torch._C._current_graph_task_id()


def current_scopes() -> Iterator[Scope]:
    """The scopes, innermost first. In a recomputation these are only the scopes that began in the
    same backward pass: a block around the call of ``backward`` may belong to another forward.
    """
    scope = current_scope()
    if scope is None or scope.graph_task != current_backward():
        return iter(())
    return scope.around()


class padding(AbstractContextManager):
    """The padding of the batch that a model runs on, for the norms that :func:`convert_norms` put
    into it::

        with padding(mask):
            loss = model(x).sum()

    The backward pass may run after the block. Inside the block its mask replaces masks that are
    arguments of modules. Give one mask, or None if there is no padding:

    Args:
        mask: bool, True = padding, (B, T), or (N,) for tokens (N, C), or (B, H, W) for images; a
            floating-point mask is additive. With None a norm with batch statistics does not warn
            about a missing mask.
        valid: bool or whole numbers, nonzero = token, like a tokenizer's ``attention_mask``.
        lengths: (B,) whole numbers, the tokens of each sequence; what follows them is padding.
            Lengths fit activations of any greater length: if the model puts a token in front, like
            BERT's [CLS], count it. The greatest length is read from the device once.
        additive: 0 at tokens and -inf (or at most -10000) at padding.
        only: pattern or patterns of the names of the norms that the block is for, as in
            :func:`convert_norms` ("encoder.*"). The other norms look for their mask as if there
            were no block. By default all norms.

    Raises:
        ValueError: an argument is not such a mask, or more than one is given.
    """

    def __init__(
        self,
        mask: Tensor | None = ...,
        *,
        valid: Tensor | None = ...,
        lengths: Tensor | None = ...,
        additive: Tensor | None = ...,
        only: str | Iterable[str] | None = None,
    ):
        values = {"mask": mask, "valid": valid, "lengths": lengths, "additive": additive}
        given = [form for form, value in values.items() if value is not ...]
        if not given:
            raise ValueError(
                "padding() without a mask: give one, or None, which says that there is no padding"
            )
        masks = [form for form in given if values[form] is not None]
        if len(masks) > 1:
            raise ValueError(f"padding({'=, '.join(masks)}=): give one of them")
        self._mask = None
        if masks:
            (form,) = masks
            self._mask = PaddingMask(form, values[form], f"padding({form}=...)")
        self._only = patterns_of(only)
        self._blocks: list[Block] = []

    def __enter__(self) -> padding:
        # a copy: a mask converts its tensor once, and the tensor may be refilled before the next
        # block
        mask = copy.copy(self._mask)
        block = Block(mask, self._only)
        self._blocks.append(block)
        block.__enter__()
        return self

    def __exit__(self, *error) -> None:
        block = self._blocks.pop()
        block.__exit__(*error)
        if any(error) or not block.asked or any(block.asked.values()):
            return
        patterns = ", ".join(map(repr, block.only))
        asked = list(block.asked)
        more = ", ..." if len(asked) > 3 else ""
        warnings.warn(
            f"`with padding(..., only={patterns})` was for none of the norms that looked for a "
            f"mask in it: {', '.join(asked[:3])}{more}",
            stacklevel=2,
        )

    @staticmethod
    def context_fn() -> tuple[AbstractContextManager, AbstractContextManager]:
        """For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False,
        context_fn=padding.context_fn)``: the recomputation runs with the padding of the first
        computation.

        It is needed if that padding is not an argument of the checkpointed function, but comes from
        a ``with padding(...)`` block or from an argument of a module around the function.
        """
        return nullcontext(), Again([*current_scopes(), AllIsKnown()])


class Again(AbstractContextManager):
    """Enters ``scopes``, innermost first, once more, also in another backward pass."""

    def __init__(self, scopes: Iterable[Scope]):
        self.scopes = [copy.copy(scope) for scope in scopes]

    def __enter__(self) -> None:
        self._before = _current.get()
        for scope in reversed(self.scopes):
            copy.copy(scope).__enter__()

    def __exit__(self, *error) -> None:
        _current.set(self._before)
