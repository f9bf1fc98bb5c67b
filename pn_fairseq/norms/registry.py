"""The one list of norms. Command-line choices, architectures, tests, benchmarks and docs are derived from it."""

import inspect
from dataclasses import dataclass, field
from types import MappingProxyType

from pn_fairseq.norms.base import ChannelNorm
from pn_fairseq.norms.batch import MaskedBatchNorm
from pn_fairseq.norms.layer import LayerNorm
from pn_fairseq.norms.power import PowerNorm
from pn_fairseq.norms.power_v import PowerNormV


@dataclass(frozen=True)
class NormEntry:
    """A norm that can be asked for by name.

    Attributes:
        cls: the module class.
        short: the abbreviation in architecture names, as in ``transformer_pn_iwslt``.
        title: one line for help texts and tables.
        renames: options of :func:`build_norm` that this class knows under another name.
    """

    cls: type[ChannelNorm]
    short: str
    title: str
    renames: dict[str, str] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, str]:
        """Option of :func:`build_norm` -> constructor argument, for those that this norm has a use for."""
        own = set(inspect.signature(self.cls).parameters) - {"num_features", *self.renames.values()}
        return {**{name: name for name in own}, **self.renames}


_AVERAGE = {"alpha_fwd": "alpha"}

NORMS: MappingProxyType[str, NormEntry] = MappingProxyType(
    {
        "layer": NormEntry(LayerNorm, "ln", "layer normalization (LN)"),
        "batch": NormEntry(MaskedBatchNorm, "bn", "batch normalization over real tokens (BN)", _AVERAGE),
        "power-v": NormEntry(PowerNormV, "pnv", "power normalization with batch statistics (PN-V)", _AVERAGE),
        "power": NormEntry(PowerNorm, "pn", "power normalization with running statistics (PN)"),
    }
)


def build_norm(name: str, num_features: int, **options) -> ChannelNorm:
    """Build the norm registered as ``name``.

    Args:
        name: a key of :data:`NORMS`.
        num_features: number of channels C.
        options: ``eps``, ``affine``, ``alpha_fwd``, ``alpha_bwd``, ``layer_scale_groups``, ``psi_warmup_updates``. One
            set of options serves all norms: those that this norm has no use for are ignored. ``alpha_fwd`` is the
            ``alpha`` of the norms that have only one.

    Raises:
        ValueError: no norm has that name, no norm has that option, or an option's value does not fit.
    """
    if name not in NORMS:
        raise ValueError(f"unknown norm {name!r}; known: {', '.join(NORMS)}")
    known = {option for entry in NORMS.values() for option in entry.options}
    if unknown := sorted(set(options) - known):
        raise ValueError(f"unknown norm option {', '.join(map(repr, unknown))}; known: {', '.join(sorted(known))}")
    accepted = NORMS[name].options
    return NORMS[name].cls(num_features, **{accepted[key]: value for key, value in options.items() if key in accepted})
