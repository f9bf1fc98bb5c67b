"""Where the tokens are in the input of a converted norm, and which of them a padding mask calls padding."""

from torch import Tensor

from pn_fairseq.norms.padding import PaddingMask

#: Orders of the dimensions of activations.
LAYOUTS = ("BTC", "TBC", "BCT", "BCHW")

#: Layouts whose channels follow the batch dimension -> the numbers of dimensions that an input may have. "BC" is the
#: layout of SyncBatchNorm.
CHANNELS_FIRST = {"BCT": (3,), "BCHW": (4,), "BC": (3, 4)}


class Layout:
    """The layout of the input of one norm.

    Args:
        own: the layout of the module that was replaced, one of :data:`CHANNELS_FIRST`; None: its channels come last.
        given: "BTC" or "TBC", of tokens whose channels come last and of rows (N, C); None: read from the first mask.
    """

    def __init__(self, own: str | None, given: str | None):
        self.own, self.given = own, given
        self._seen: str | None = None

    @property
    def name(self) -> str | None:
        """None: read from the mask."""
        return self.own or self.given

    def channels_last(self, x: Tensor) -> Tensor:
        """``x`` as (..., C)."""
        if self.own is None or x.dim() == 2:
            return x
        if x.dim() not in CHANNELS_FIRST[self.own]:
            raise ValueError(f"expected an input of layout {self.own} or (N, C), got {tuple(x.shape)}")
        return x.movedim(1, -1)

    def padding(self, x: Tensor, mask: PaddingMask) -> Tensor | None:
        """Bool, True = padding, in the shape of the tokens of ``x`` (..., C); None: no row of x is padding.

        Raises:
            ValueError: the mask is for other tokens, or the layout of x is not known.
        """
        shape = tuple(x.shape[:-1])
        if mask.form != "lengths" and tuple(mask.value.shape) == shape and (x.dim() != 3 or self.own):
            return mask.of(shape[-1]).to(x.device)
        if self.own and x.dim() == 4:
            raise ValueError(f"images {shape} = (B, H, W) need a mask of this shape; {mask}")
        return self._of_rows(x, mask) if x.dim() == 2 else self._of_sequences(x, mask)

    def _of_sequences(self, x: Tensor, mask: PaddingMask) -> Tensor | None:
        """The mask of tokens (B, T, ...) or (T, B, ...), or of the real tokens of all, (1, N, ...)."""
        shape = tuple(x.shape[:-1])
        sizes = {"BTC": shape[:2], "TBC": shape[1::-1]}  # (B, T)
        fitting = [name for name, (batch, time) in sizes.items() if mask.batch == batch and mask.time(time) == time]
        known = "BTC" if self.own else self.given or self._seen
        if known is None and len(fitting) == 2:
            raise ValueError(
                f"tokens {tuple(x.shape)} may be (B, T, C) or (T, B, C), because B and T of {mask.source} are equal; "
                "give convert_norms layout='BTC' or layout='TBC'"
            )
        if not fitting and 1 in shape[:2] and shape[0] * shape[1] == mask.real_tokens:
            return None
        if not fitting or (known is not None and known not in fitting):
            raise ValueError(_does_not_fit(x, mask, known, fitting))
        layout = self._seen = known or fitting[0]
        padding = mask.of(sizes[layout][1]).to(x.device)
        padding = padding if layout == "BTC" else padding.t()
        return padding.reshape(shape[:2] + (1,) * (len(shape) - 2)).expand(shape)

    def _of_rows(self, x: Tensor, mask: PaddingMask) -> Tensor | None:
        """The mask of rows (N, C): all positions of all sequences, their real tokens, or one vector per sequence."""
        rows, batch = x.size(0), mask.batch
        time = mask.time(rows // batch if batch and rows % batch == 0 else rows)
        if rows == batch * time and time > 1 and self.given is not None:
            padding = mask.of(time).to(x.device)
            return (padding if self.given == "BTC" else padding.t()).reshape(-1)
        if rows == batch or rows == mask.real_tokens:
            return None
        if rows == batch * time:
            raise ValueError(
                f"the order of its {rows} rows, the tokens of {batch} sequences, is not known; give convert_norms "
                "layout='BTC' or layout='TBC'"
            )
        raise ValueError(
            f"it has {rows} rows, neither all positions of {batch} sequences nor their {mask.real_tokens} real tokens, "
            f"and {mask}; if no row is padding, run this part of the model in `with padding(None)`"
        )


def _does_not_fit(x: Tensor, mask: PaddingMask, known: str | None, fitting: list[str]) -> str:
    shape = tuple(x.shape[:-1])
    if fitting:
        return (
            f"tokens {shape} do not have the layout {known} but {fitting[0]}: {mask}; give "
            f"convert_norms layout='{fitting[0]}' for this norm"
        )
    batch_first = known == "BTC" if known else shape[0] == mask.batch or shape[1] != mask.batch
    batch, time = shape[:2] if batch_first else (shape[1], shape[0])
    return (
        f"its tokens are {batch} sequences of length {time}, and {mask.source} is for {mask.batch} of length "
        f"{mask.time(time)}; run the part of the model that has another length in `with padding(...)` with a "
        "mask of that length, take the mask from an argument that has it (mask_from=...), or leave this norm as it "
        "is (skip=...)"
    )
