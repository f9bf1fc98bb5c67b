"""Where the tokens are in the input of a converted norm, and which of them a padding mask calls
padding.
"""

from torch import Tensor

from pn_fairseq.norms.masks.padding import PaddingMask

#: Orders of the dimensions of activations.
LAYOUTS = ("BTC", "TBC", "BCT", "BCHW")

#: Layouts whose channels follow the batch dimension -> the numbers of dimensions that an input may
#: have. "BC" is the layout of SyncBatchNorm.
CHANNELS_FIRST = {"BCT": (3,), "BCHW": (4,), "BC": (3, 4)}

#: Layouts of tokens -> the dimensions of the batch and of time.
_SEQUENCES = {"BTC": (0, 1), "TBC": (1, 0)}
_WITH_HEADS = {"BTHC": (0, 1), "TBHC": (1, 0), "BHTC": (0, 2)}


def _fits(mask: PaddingMask, shape: tuple[int, ...], batch: int, time: int) -> bool:
    """Whether ``mask`` is for tokens of this ``shape``; ``batch`` and ``time`` are dimensions."""
    return mask.batch == shape[batch] and mask.time(shape[time]) == shape[time]


def _spread(mask: PaddingMask, x: Tensor, batch: int, time: int) -> Tensor:
    """``mask`` in the shape of the tokens of ``x``."""
    shape = x.shape[:-1]
    padding = mask.of(shape[time]).to(x.device)
    if time < batch:
        padding = padding.t()
    places = [1] * len(shape)
    places[batch] = shape[batch]
    places[time] = shape[time]
    return padding.reshape(places).expand(shape)


class Layout:
    """The layout of the input of one norm.

    Args:
        own: the layout of the module that was replaced, one of :data:`CHANNELS_FIRST`; None: its
            channels come last.
        given: "BTC" or "TBC", of tokens whose channels come last and of rows (N, C); None: read
            from the first mask.
        norm: the name of the norm.
    """

    def __init__(self, own: str | None, given: str | None, norm: str):
        self.own = own
        self.given = given
        self.norm = norm
        self._seen: str | None = None
        #: Of inputs with heads: "BTHC", "TBHC" or "BHTC".
        self._seen_with_heads: str | None = None

    @property
    def name(self) -> str | None:
        """None: read from the mask."""
        return self.own or self.given

    def channels_last(self, x: Tensor) -> Tensor:
        """``x`` as (..., C)."""
        if self.own is None or x.dim() == 2:
            return x
        if x.dim() not in CHANNELS_FIRST[self.own]:
            raise ValueError(
                f"expected an input of layout {self.own} or (N, C), got {tuple(x.shape)}"
            )
        return x.movedim(1, -1)

    def padding(self, x: Tensor, mask: PaddingMask, generates: bool = False) -> Tensor | None:
        """Bool, True = padding, in the shape of the tokens of ``x`` (..., C); None: no row of x is
        padding.

        ``generates``: the model is in training mode, but gradients are disabled.

        Raises:
            ValueError: the mask is for other tokens, or the layout of x is not known.
        """
        shape = tuple(x.shape[:-1])
        is_of_tokens = mask.form != "lengths" and tuple(mask.value.shape) == shape
        if is_of_tokens and (x.dim() != 3 or self.own):
            return mask.of(shape[-1]).to(x.device)
        if self.own and x.dim() == 4:
            raise ValueError(f"images {shape} = (B, H, W) need a mask of this shape; {mask}")
        if x.dim() == 2:
            return self._of_rows(x, mask)
        if x.dim() == 4 and not self.own:
            return self._of_heads(x, mask, generates)
        return self._of_sequences(x, mask, generates)

    def _of_heads(self, x: Tensor, mask: PaddingMask, generates: bool) -> Tensor:
        """The mask of tokens (B, T, H, C), (T, B, H, C) or (B, H, T, C)."""
        shape = tuple(x.shape[:-1])
        possible = list(_WITH_HEADS)
        if self._seen_with_heads is not None:
            possible = [self._seen_with_heads]
        elif self.given is not None:
            possible = [name for name in _WITH_HEADS if name[0] == self.given[0]]
        fitting = [name for name in possible if _fits(mask, shape, *_WITH_HEADS[name])]
        if not fitting:
            batch, time = _WITH_HEADS[possible[0]]
            raise ValueError(self._of_another_length(shape[batch], shape[time], mask, generates))
        if len(fitting) > 1:
            orders = " or ".join(f"({', '.join(name)})" for name in fitting)
            meanings = orders.replace("H", "heads")
            raise ValueError(
                f"{tuple(x.shape)} may be {meanings}: run a batch of another length first, or "
                f"leave this norm as it is (skip={self.norm!r})"
            )
        self._seen_with_heads = fitting[0]
        return _spread(mask, x, *_WITH_HEADS[fitting[0]])

    def _of_sequences(self, x: Tensor, mask: PaddingMask, generates: bool) -> Tensor | None:
        """The mask of tokens (B, T, ...) or (T, B, ...), or of the real tokens of all, (1, N,
        ...).
        """
        shape = tuple(x.shape[:-1])
        fitting = [name for name, places in _SEQUENCES.items() if _fits(mask, shape, *places)]
        known = "BTC" if self.own else self.given or self._seen
        if known is None and len(fitting) == 2:
            raise ValueError(
                f"tokens {tuple(x.shape)} may be (B, T, C) or (T, B, C), because B and T of "
                f"{mask.source} are equal; give convert_norms layout='BTC' or layout='TBC'"
            )
        if not fitting and 1 in shape[:2] and shape[0] * shape[1] == mask.real_tokens:
            return None
        if not fitting or (known is not None and known not in fitting):
            raise ValueError(self._does_not_fit(shape, mask, known, fitting, generates))
        self._seen = known or fitting[0]
        return _spread(mask, x, *_SEQUENCES[self._seen])

    def _of_rows(self, x: Tensor, mask: PaddingMask) -> Tensor | None:
        """The mask of rows (N, C): all positions of all sequences, their real tokens, or one
        vector per sequence.
        """
        rows = x.size(0)
        batch = mask.batch
        length = rows
        if batch and rows % batch == 0:
            length = rows // batch
        time = mask.time(length)
        if rows == batch * time and time > 1 and self.given is not None:
            padding = mask.of(time).to(x.device)
            in_order = padding if self.given == "BTC" else padding.t()
            return in_order.reshape(-1)
        if rows == batch or rows == mask.real_tokens:
            return None
        if rows == batch * time:
            raise ValueError(
                f"the order of its {rows} rows, the tokens of {batch} sequences, is not known; "
                "give convert_norms layout='BTC' or layout='TBC'"
            )
        raise ValueError(
            f"it has {rows} rows, neither all positions of {batch} sequences nor their "
            f"{mask.real_tokens} real tokens, and {mask}; if no row is padding, run the model in "
            f"`with padding(None, only={self.norm!r})`"
        )

    def _does_not_fit(
        self, shape: tuple, mask: PaddingMask, known: str | None, fitting: list, generates: bool
    ) -> str:
        if fitting:
            return (
                f"tokens {shape} do not have the layout {known} but {fitting[0]}: {mask}; give "
                f"convert_norms layout='{fitting[0]}' for this norm"
            )
        if known:
            batch_first = known == "BTC"
        else:
            batch_first = shape[0] == mask.batch or shape[1] != mask.batch
        batch, time = shape[:2] if batch_first else (shape[1], shape[0])
        return self._of_another_length(batch, time, mask, generates)

    def _of_another_length(self, batch: int, time: int, mask: PaddingMask, generates: bool) -> str:
        first = "call model.eval() before generating or evaluating; else " if generates else ""
        length = mask.time(time)
        return (
            f"its tokens are {batch} sequences of length {time}, and {mask.source} is for "
            f"{mask.batch} of length {length}; {first}give it a mask of its own length (`with "
            f"padding(..., only={self.norm!r})` around the call), or leave it as it is "
            f"(skip={self.norm!r})"
        )
