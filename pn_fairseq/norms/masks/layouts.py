"""Where the tokens are in the input of a converted norm, and which of them a padding mask marks."""

from torch import Tensor

from pn_fairseq.norms.masks.padding import PaddingMask

#: Orders of the dimensions of activations.
LAYOUTS = ("BTC", "TBC", "BCT", "BCHW")

#: Layouts whose channels follow the batch dimension -> the numbers of dimensions that an input may
#: have. "BC" is the layout of SyncBatchNorm.
CHANNELS_FIRST = {"BCT": (3,), "BCHW": (4,), "BC": (3, 4)}

#: Without and with heads: layout of tokens -> the dimensions of the batch and of time.
_ORDERS = ({"BTC": (0, 1), "TBC": (1, 0)}, {"BTHC": (0, 1), "TBHC": (1, 0), "BHTC": (0, 2)})


def _fits(mask: PaddingMask, shape: tuple[int, ...], batch: int, time: int) -> bool:
    """Whether ``mask`` fits tokens of this ``shape``; ``batch`` and ``time`` are dimensions."""
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
        own: the layout of the replaced module, one of :data:`CHANNELS_FIRST`; None: its channels
            come last.
        given: "BTC" or "TBC", for tokens whose channels come last and for rows (N, C); None:
            inferred from the first mask.
        norm: the name of the norm.
    """

    def __init__(self, own: str | None, given: str | None, norm: str):
        self.own = own
        self.given = given
        self.norm = norm
        #: Whether inputs have heads -> the layout that their first mask shows.
        self._seen: dict[bool, str] = {}

    @property
    def name(self) -> str | None:
        """The layout; None: inferred from the mask."""
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
            ValueError: the mask is for other tokens, or the layout of x is unknown.
        """
        shape = tuple(x.shape[:-1])
        is_image = self.own and x.dim() == 4
        of_mask = shape
        if is_image and shape[1] == 1:
            of_mask = (shape[0], shape[2])  # without its dimension of 1, as all masks
        is_of_tokens = mask.form != "lengths" and tuple(mask.value.shape) == of_mask
        if is_of_tokens and (x.dim() != 3 or self.own):
            return mask.of(shape[-1]).to(x.device).view(shape)
        if is_image:
            raise ValueError(f"images {shape} = (B, H, W) need a mask of this shape; {mask}")
        if x.dim() == 2:
            return self._of_rows(x, mask)
        return self._of_sequences(x, mask, generates)

    def _of_sequences(self, x: Tensor, mask: PaddingMask, generates: bool) -> Tensor | None:
        """The mask of tokens (B, T, ...), (T, B, ...) or, with heads, (B, H, T, C), or of the real
        tokens of all sequences, (1, N, ...).
        """
        shape = tuple(x.shape[:-1])
        has_heads = x.dim() == 4 and not self.own
        orders = _ORDERS[has_heads]
        first = "B" if self.own else (self.given or "")[:1]
        known = self._seen.get(has_heads, first)
        fitting = [name for name, places in orders.items() if _fits(mask, shape, *places)]
        possible = [name for name in orders if name.startswith(known)]
        chosen = [name for name in fitting if name in possible]
        if len(chosen) > 1:
            meanings = " or ".join(f"({', '.join(name)})" for name in chosen).replace("H", "heads")
            start = "tokens "
            reason = (
                f"because B and T of {mask.source} are equal; give convert_norms layout='BTC' or "
                "layout='TBC'"
            )
            if has_heads:
                start = ""
                reason = (
                    "run a batch of another length first, or leave this norm as it is "
                    f"(skip={self.norm!r})"
                )
            raise ValueError(f"{start}{tuple(x.shape)} may be {meanings}: {reason}")
        if chosen:
            self._seen[has_heads] = chosen[0]
            return _spread(mask, x, *orders[chosen[0]])
        if fitting:
            raise ValueError(
                f"tokens {shape} do not have the layout {possible[0]} but {fitting[0]}: {mask}; "
                f"give convert_norms layout='{fitting[0]}' for this norm"
            )
        if not has_heads and 1 in shape[:2] and shape[0] * shape[1] == mask.real_tokens:
            return None
        batch, time = orders[possible[0]]
        if not known and shape[0] != mask.batch == shape[1]:
            batch, time = time, batch
        raise ValueError(self._of_another_length(shape[batch], shape[time], mask, generates))

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

    def _of_another_length(self, batch: int, time: int, mask: PaddingMask, generates: bool) -> str:
        first = "call model.eval() before generating or evaluating; else " if generates else ""
        length = mask.time(time)
        return (
            f"its tokens are {batch} sequences of length {time}, and {mask.source} is for "
            f"{mask.batch} of length {length}; {first}give it a mask of its own length (`with "
            f"padding(..., only={self.norm!r})` around the call), or leave it as it is "
            f"(skip={self.norm!r})"
        )
