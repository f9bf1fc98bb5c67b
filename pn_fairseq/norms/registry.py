"""The one list of norms.

Command-line choices, architectures, tests, benchmarks, reports and docs derive from it.
"""

import html
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from zlib import crc32

from pn_fairseq.common.errors import did_you_mean, run_file
from pn_fairseq.norms.batch import MaskedBatchNorm, MaskedBatchNormRelease
from pn_fairseq.norms.batch_reg import RegularizedBatchNorm, RegularizedBatchNormRelease
from pn_fairseq.norms.batch_renorm import BatchRenorm
from pn_fairseq.norms.core.base import COUNT, ChannelNorm, RunningNorm
from pn_fairseq.norms.core.checks import advice_on_momentum
from pn_fairseq.norms.dyt import DynamicErf, DynamicTanh
from pn_fairseq.norms.group import GroupNorm
from pn_fairseq.norms.layer import LayerNorm
from pn_fairseq.norms.mabn import MovingAverageBatchNorm
from pn_fairseq.norms.power import PowerNorm
from pn_fairseq.norms.power_release import PowerNormRelease
from pn_fairseq.norms.power_v import PowerNormV
from pn_fairseq.norms.prep_batch import ProgressiveBatchNorm
from pn_fairseq.norms.rms import RMSNorm, RMSNormRelease, ScaleNorm
from pn_fairseq.norms.simple import AdaNorm, AdaNormRelease, DetachNorm, LayerNormSimple, NoNorm
from pn_fairseq.norms.unified import UnifiedNorm, UnifiedNormRelease

#: Constructor arguments that belong to all norms, or to all with running statistics -> the flags
#: that set them.
SHARED = {
    "eps": "--norm-eps",
    "alpha_fwd": "--norm-alpha-fwd",
    "alpha_bwd": "--norm-alpha-bwd",
    "layer_scale_groups": "--layer-scale-groups",
    "psi_warmup_updates": "--psi-warmup-updates",
    "sync": "--norm-sync",
}
#: Constructor arguments that a transformer leaves at their defaults.
FIXED = ("affine", "batch_first", "process_group")


@dataclass(frozen=True)
class Circumstances:
    """What a default can depend on. None: unknown.

    Attributes:
        heads: attention heads of the layers around the norm.
        warmup: updates in which the learning rate warms up.
        updates: updates of the training run.
    """

    heads: int | None = None
    warmup: int | None = None
    updates: int | None = None


@dataclass(frozen=True)
class FromRun:
    """A default that depends on the transformer or on its training run.

    Attributes:
        words: the name of the default in ``pn norms``.
        source: the attribute of :class:`Circumstances` that the default depends on.
        part: the factor of the source.
    """

    words: str
    source: str
    part: float = 1.0

    def value(self, circumstances: Circumstances) -> int | None:
        """The default; None (use the constructor's) if its source is unknown."""
        number = getattr(circumstances, self.source)
        if number is None:
            return None
        return round(self.part * number)


#: The number of attention heads.
HEADS = FromRun("attention heads", "heads")
#: The warm-up of the learning rate.
WARMUP = FromRun("learning-rate warm-up", "warmup")


def part_of_run(part: float) -> FromRun:
    """A part of ``--max-update``."""
    return FromRun(f"{part} of --max-update", "updates", part)


#: Argument -> its default in a transformer, unless the entry of a norm has another one.
TRANSFORMER_DEFAULTS = {"groups": HEADS, "psi_warmup_updates": WARMUP, "sync": True}


@dataclass(frozen=True)
class NormEntry:
    """A norm that can be selected by name.

    Attributes:
        cls: the module class.
        short: the abbreviation in architecture names, as in ``transformer_pn_iwslt``.
        title: one line for help texts.
        variants: variant -> the class that replaces ``cls`` in it, with the same constructor
            arguments.
        defaults: argument -> its default in a transformer, if that is neither the default in
            :data:`TRANSFORMER_DEFAULTS` nor the constructor's. A value can be a :class:`FromRun`.
        variant_defaults: variant -> the defaults that replace these in it.
        variant_last: variant -> argument -> its value in the norm after the last encoder layer,
            whatever the other norms get.
        converted_defaults: argument -> its default in a model that :func:`.convert_norms` changes,
            if that is not the constructor's.
        label: the name in tables and legends; if none is given, the abbreviation in capitals.
    """

    cls: type[ChannelNorm]
    short: str
    title: str
    variants: dict[str, type[ChannelNorm]] = field(default_factory=dict)
    defaults: dict[str, object] = field(default_factory=dict)
    variant_defaults: dict[str, dict[str, object]] = field(default_factory=dict)
    variant_last: dict[str, dict[str, object]] = field(default_factory=dict)
    converted_defaults: dict[str, object] = field(default_factory=dict)
    label: str = ""

    def __post_init__(self):
        if not self.label:
            object.__setattr__(self, "label", self.short.upper())

    def variant(self, name: str) -> type[ChannelNorm]:
        """The class of this norm in one of :data:`VARIANTS`: ``cls`` unless the variant has its
        own.
        """
        return self.variants.get(name, self.cls)

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """Options of :func:`build_norm` that this norm uses: its constructor's arguments, own and
        inherited.
        """
        return _arguments(self.cls)

    @property
    def own_options(self) -> dict[str, inspect.Parameter]:
        """The arguments that ``--norm-options`` sets: those that do not belong to all norms."""
        own = dict(self.options)
        for name in (*SHARED, *FIXED):
            own.pop(name, None)
        return own

    def default(self, option: str, variant: str = "paper") -> object:
        """The default of an argument in a transformer: a value, a :class:`FromRun`, or
        ``inspect.Parameter.empty``.
        """
        of_variant = self.variant_defaults.get(variant, {})
        for defaults in (of_variant, self.defaults, TRANSFORMER_DEFAULTS):
            if option in defaults:
                return defaults[option]
        return default_of(self.variant(variant), option)

    def default_in(
        self, circumstances: Circumstances, option: str, variant: str = "paper"
    ) -> object:
        """The default of an argument in a transformer under these circumstances; None: that of the
        constructor.
        """
        default = self.default(option, variant)
        if isinstance(default, FromRun):
            return default.value(circumstances)
        return default

    def defaults_of_run(self, run: Circumstances, variant: str = "paper") -> dict[str, object]:
        """The defaults in a transformer that depend on the run, by argument, as far as ``run`` is
        known.
        """
        found = {}
        for option in self.options:
            default = self.default(option, variant)
            value = default.value(run) if isinstance(default, FromRun) else None
            if value is not None:
                found[option] = value
        return found


@cache  # a model calls this some 900 times
def _arguments(cls: type[ChannelNorm]) -> dict[str, inspect.Parameter]:
    """The arguments of the constructor of ``cls`` and of the constructors above it."""
    arguments = dict(inspect.signature(cls).parameters)
    del arguments["num_features"]
    return arguments


def default_of(cls: type[ChannelNorm], option: str):
    """The value that ``cls`` uses if an option of :func:`build_norm` is not given."""
    return _arguments(cls)[option].default


def description_of(cls: type[ChannelNorm], option: str) -> str:
    """What an option of ``cls`` means: the first sentence about it under ``Args:`` in the
    docstrings of its classes.
    """
    for base in inspect.getmro(cls):
        docstring = inspect.cleandoc(vars(base).get("__doc__") or "")
        section = re.search(r"^Args:\n((?: .*\n|\n)*)", f"{docstring}\n", re.M)
        if not section:
            continue
        arguments = re.findall(r"^ {4}(\w[^:\n]*): (.*(?:\n {8}.*)*)", section[1], re.M)
        for names, text in arguments:
            if option in names.split(", ") and not text.startswith("see "):
                return _first_sentence(text)
    return ""


def _first_sentence(text: str) -> str:
    """The first sentence of a part of a docstring, without markup and with Greek letters."""
    one_line = " ".join(text.split())
    sentence = re.split(r"\.(?=\s|$)", one_line)[0]
    plain = re.sub(r":\w+:`~?([^`]*)`", r"\1", sentence).replace("`", "")
    return re.sub(r"\\([a-z]+)", lambda letter: html.unescape(f"&{letter[1]};"), plain)


#: Name -> norm. Sources: the classes' docstrings.
NORMS: dict[str, NormEntry] = {
    "layer": NormEntry(LayerNorm, "ln", "layer normalization"),
    "batch": NormEntry(
        MaskedBatchNorm,
        "bn",
        "batch normalization over real tokens",
        variants={"release": MaskedBatchNormRelease},
        variant_defaults={"release": {"layer_scale_groups": 1, "sync": False}},
    ),
    "power-v": NormEntry(
        PowerNormV,
        "pnv",
        "power normalization with batch statistics",
        defaults={"layer_scale_groups": HEADS},
        label="PN-V",
    ),
    "power": NormEntry(
        PowerNorm,
        "pn",
        "power normalization with running statistics",
        variants={"release": PowerNormRelease},
        defaults={
            "layer_scale_groups": HEADS,
            "sync": False,  # as in the paper, appendix A.1
        },
        variant_last={"release": {"psi_warmup_updates": 1000}},
        converted_defaults={"psi_warmup_updates": 1000},
    ),
    "batch-renorm": NormEntry(
        BatchRenorm,
        "brn",
        "batch renormalization",
        defaults={"renorm_updates": part_of_run(0.3)},
    ),
    "mabn": NormEntry(MovingAverageBatchNorm, "mabn", "moving average batch normalization"),
    "unified": NormEntry(
        UnifiedNorm, "un", "unified normalization", variants={"release": UnifiedNormRelease}
    ),
    "batch-reg": NormEntry(
        RegularizedBatchNorm,
        "rbn",
        "regularized batch normalization",
        variants={"release": RegularizedBatchNormRelease},
    ),
    "prep-batch": NormEntry(
        ProgressiveBatchNorm,
        "prepbn",
        "layer normalization that fades into re-parameterized BN",
        defaults={"fade_updates": part_of_run(0.8)},
        label="PRepBN",
    ),
    "none": NormEntry(NoNorm, "none", "no normalization", label="none"),
    "layer-simple": NormEntry(
        LayerNormSimple, "lns", "layer normalization without gain and bias", label="LN-simple"
    ),
    "detach": NormEntry(
        DetachNorm, "dn", "LN-simple without the gradient of mean or deviation", label="DetachNorm"
    ),
    "ada": NormEntry(
        AdaNorm,
        "ada",
        "adaptive normalization",
        variants={"release": AdaNormRelease},
        label="AdaNorm",
    ),
    "rms": NormEntry(
        RMSNorm,
        "rms",
        "root mean square normalization",
        variants={"release": RMSNormRelease},
        label="RMSNorm",
    ),
    "scale": NormEntry(ScaleNorm, "sn", "a learned length for every token", label="ScaleNorm"),
    "group": NormEntry(GroupNorm, "gn", "layer normalization of groups of channels"),
    "dyt": NormEntry(DynamicTanh, "dyt", "dynamic tanh in the place of a norm", label="DyT"),
    "derf": NormEntry(DynamicErf, "derf", "dynamic erf in the place of a norm", label="Derf"),
}

#: As in the papers, or as in the code that their authors released where that computes something
#: else.
VARIANTS = ("paper", "release")


def register_norm(
    name: str, short: str, title: str, **attributes
) -> Callable[[type[ChannelNorm]], type[ChannelNorm]]:
    """Class decorator that adds a norm to :data:`NORMS`; arguments as in :class:`NormEntry`.

    Raises:
        ValueError: another class has that name or abbreviation.
    """

    def register(cls: type[ChannelNorm]) -> type[ChannelNorm]:
        for known, entry in NORMS.items():
            same_class = (entry.cls.__module__, entry.cls.__qualname__) == (
                cls.__module__,
                cls.__qualname__,
            )
            if (known == name or entry.short == short) and not (known == name and same_class):
                raise ValueError(
                    f"{cls.__name__}: name {name!r} or short {short!r} is taken by "
                    f"{entry.cls.__name__}"
                )
        NORMS[name] = NormEntry(cls, short, title, **attributes)
        return cls

    return register


def load_norms(path: str) -> None:
    """Run the Python file ``path``, which registers its norms by :func:`register_norm`; once per
    process.

    Raises:
        ValueError: the file does not exist, or cannot be imported.
    """
    file = Path(path).resolve()
    # The same name in every process, so that what one process pickles another can load.
    checksum = crc32(str(file).encode())
    module_name = f"pn_fairseq_norm_module_{file.stem}_{checksum:08x}"
    if module_name in sys.modules:
        return
    if not file.is_file():
        raise ValueError(
            f"norm module {path!r} is not a file; name the file of the norms (--norm-module FILE)"
        )
    if file.suffix != ".py":
        raise ValueError(f"norm module {path!r} is no Python file, whose name ends in .py")
    try:
        run_file(file, module_name)
    except ValueError as error:
        raise ValueError(f"norm module {path!r} cannot be imported: {error}") from error


def find_norm(name: str) -> NormEntry:
    """The entry of ``name``.

    Raises:
        ValueError: no norm has that name; the message contains the most similar one.
    """
    if name not in NORMS:
        plain = re.sub("[-_]?norm$", "", str(name).lower())  # LayerNorm, batch_norm
        of_short_names = {entry.short: full for full, entry in NORMS.items()}
        meant = of_short_names.get(plain, plain)
        if meant in NORMS:
            hint = f", did you mean {meant!r}?"
        else:
            hint = did_you_mean(str(name), NORMS)
        raise ValueError(f"unknown norm {name!r}{hint or ';'} known: {', '.join(NORMS)}")
    return NORMS[name]


def check_option(option: str, known: Mapping[str, object], introduction: str):
    """The entry of ``option`` in ``known``: the one check behind ``--norm-options``,
    ``--convert-norms``, :func:`.convert_norms` and :func:`build_norm`.

    Raises:
        ValueError: there is none. ``introduction`` comes before the known names.
    """
    if option not in known:
        names = ", ".join(sorted(known)) or "none"
        advice = advice_on_momentum([option], known) or did_you_mean(option, known)
        raise ValueError(
            f"unknown norm option {option!r}{advice} ({introduction} {names}; see pn norms NAME)"
        )
    return known[option]


def build_norm(name: str, num_features: int, variant: str = VARIANTS[0], **options) -> ChannelNorm:
    """Build the norm registered as ``name``.

    Args:
        name: a key of :data:`NORMS`.
        num_features: number of channels C.
        variant: one of :data:`VARIANTS`. A norm with only one variant ignores it.
        options: ``eps``, ``affine``, ``alpha_fwd``, ``alpha_bwd``, ``layer_scale_groups``,
            ``psi_warmup_updates``, ``batch_first``, ... Options that this norm does not accept are
            ignored, so that one set of options can be passed to every norm.

    Raises:
        ValueError: no norm has that name, variant or option, an option's value does not fit, or the
            class names state that it does not have.
    """
    entry = find_norm(name)
    if variant not in VARIANTS:
        raise ValueError(f"unknown norm variant {variant!r}; known: {', '.join(VARIANTS)}")
    known = {}
    for registered in NORMS.values():
        known |= registered.options
    for option in options:
        check_option(option, known, "norms have")
    accepted = {key: value for key, value in options.items() if key in entry.options}
    norm = entry.variant(variant)(num_features, **accepted)
    if isinstance(norm, RunningNorm):
        for attribute in ("moment_name", "mean_name"):
            state = getattr(norm, attribute, None)
            if state is not None and state not in norm._buffers:
                made = ", ".join(norm._buffers.keys() - {COUNT})
                raise ValueError(
                    f"norm {name!r}: {attribute} names {state!r}, which add_state does not make "
                    f"(it makes {made})"
                )
    return norm
