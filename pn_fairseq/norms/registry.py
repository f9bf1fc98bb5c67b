"""The one list of norms. Command-line choices, architectures, tests, benchmarks and docs are derived from it."""

import inspect
from dataclasses import dataclass, field
from types import MappingProxyType

from pn_fairseq.norms.base import ChannelNorm
from pn_fairseq.norms.batch import MaskedBatchNorm
from pn_fairseq.norms.layer import LayerNorm
from pn_fairseq.norms.power import PowerNorm
from pn_fairseq.norms.power_release import PowerNormRelease
from pn_fairseq.norms.power_v import PowerNormV


@dataclass(frozen=True)
class NormEntry:
    """A norm that can be asked for by name.

    Attributes:
        cls: the module class.
        short: the abbreviation in architecture names, as in ``transformer_pn_iwslt``.
        title: one line for help texts and tables.
        renames: options of :func:`build_norm` that this class knows under another name.
        variants: variant -> the class that takes the place of ``cls`` in it. Its constructor has the same arguments.
    """

    cls: type[ChannelNorm]
    short: str
    title: str
    renames: dict[str, str] = field(default_factory=dict)
    variants: dict[str, type[ChannelNorm]] = field(default_factory=dict)

    def variant(self, name: str) -> type[ChannelNorm]:
        """The class of this norm in one of :data:`VARIANTS`: ``cls`` unless it has another one there."""
        return self.variants.get(name, self.cls)

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
        "power": NormEntry(
            PowerNorm,
            "pn",
            "power normalization with running statistics (PN)",
            variants={"release": PowerNormRelease},
        ),
    }
)

#: As in the papers, or as in the code that their authors released where that computes something else.
VARIANTS = ("paper", *sorted({name for entry in NORMS.values() for name in entry.variants}))


def build_norm(name: str, num_features: int, variant: str = VARIANTS[0], **options) -> ChannelNorm:
    """Build the norm registered as ``name``.

    Args:
        name: a key of :data:`NORMS`.
        num_features: number of channels C.
        variant: one of :data:`VARIANTS`. A norm of which there is only one ignores it.
        options: ``eps``, ``affine``, ``alpha_fwd``, ``alpha_bwd``, ``layer_scale_groups``, ``psi_warmup_updates``. One
            set of options serves all norms: those that this norm has no use for are ignored. ``alpha_fwd`` is the
            ``alpha`` of the norms that have only one.

    Raises:
        ValueError: no norm has that name, variant or option, or an option's value does not fit.
    """
    if name not in NORMS:
        raise ValueError(f"unknown norm {name!r}; known: {', '.join(NORMS)}")
    if variant not in VARIANTS:
        raise ValueError(f"unknown norm variant {variant!r}; known: {', '.join(VARIANTS)}")
    known = {option for entry in NORMS.values() for option in entry.options}
    if unknown := sorted(set(options) - known):
        raise ValueError(f"unknown norm option {', '.join(map(repr, unknown))}; known: {', '.join(sorted(known))}")
    accepted = NORMS[name].options
    cls = NORMS[name].variant(variant)
    return cls(num_features, **{accepted[key]: value for key, value in options.items() if key in accepted})
