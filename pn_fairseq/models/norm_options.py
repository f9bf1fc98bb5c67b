"""Which norms a transformer gets: the command-line flags, their defaults, and the building of each norm."""

import argparse
import re
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace

from fairseq.utils import safe_getattr
from hydra.utils import to_absolute_path
from omegaconf import OmegaConf, open_dict

from pn_fairseq.norms import NORMS, VARIANTS, ChannelNorm, LayerScale, RunningNorm, build_norm, load_norms
from pn_fairseq.norms.registry import default_of, find_norm
from pn_fairseq.norms.simple import check_parts

#: What fairseq's learning-rate schedules call the length of their warm-up.
_WARMUP_KEYS = ("warmup_updates", "warmup_steps")

SYNC = ("auto", "on", "off")

#: Schedules of norms that are as long as a part of the run unless they are given.
_PARTS_OF_RUN = {"renorm_updates": 0.3, "fade_updates": 0.8}


def _bounded(kind, accept, wanted: str):
    """A kind of flag: ``kind(text)``, refused in one line unless it satisfies ``accept``.

    Called with what the help calls the value; returns what argparse takes.
    """

    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not accept(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return lambda metavar: {"type": parse, "metavar": metavar}


_alpha = _bounded(float, lambda value: 0 < value < 1, "a number strictly between 0 and 1")
_least_1 = _bounded(float, lambda value: 1 <= value < float("inf"), "a number of at least 1")
_positive = _bounded(float, lambda value: 0 < value < float("inf"), "a number greater than 0")
_not_negative = _bounded(float, lambda value: 0 <= value < float("inf"), "a number of at least 0")
_count = _bounded(int, lambda value: value >= 0, "a whole number of at least 0")
_from_1 = _bounded(int, lambda value: value >= 1, "a whole number of at least 1")
_detached = _bounded(lambda text: check_parts(text) and text, bool, "mean, std or mean,std")


def _checked(check, note: str = ""):
    """A kind of flag: the text, unless ``check`` raises ValueError, whose message is shown with ``note``."""

    def parse(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}{note}") from None
        return text

    return lambda metavar: {"type": parse, "metavar": metavar}


#: Loads the files of ``--norm-module``, so that the flags after it know their norms.
_modules = _checked(lambda text: [load_norms(path) for path in text.split(",")])
_norm = _checked(find_norm, " (--norm-module has to come before it)")


def _flag(help: str, argument: dict, default=None):
    """A field with a flag of its name; ``argument`` is for argparse.

    ``help`` has places for what :meth:`NormOptions.add_args` knows, the norms' ``own`` defaults and others.
    """
    return field(default=default, metadata={"help": help, **argument})


def _own(help: str, argument: dict):
    """The same for an argument of the norms whose default is their own."""
    return _flag(f"{help} (default: {{own}})", argument)


@dataclass(frozen=True)
class NormOptions:
    """The norms of one transformer: what the flags of these names say, and ``norms_folded``.

    None: the norm's own default, or what the help of the flag says.

    ``norms_folded``: the norms with running statistics are part of the projections that follow them, and only their
    layer-scale is left (see :mod:`pn_fairseq.models.fold_checkpoint`). There is no flag for it: ``pn fold`` writes it
    into the settings of a checkpoint.
    """

    norm_module: str | None = _flag(
        "Python files that register norms of your own, for {norm_flags}", _modules("FILE[,FILE]")
    )
    encoder_norm: str = _flag(
        "norm of the encoder, in its layers and after the last ({norms}; default: the architecture's)",
        _norm("NAME"),
        "power",
    )
    decoder_norm: str = _flag(
        "norm of the decoder, in its layers and after the last ({of_decoder})", _norm("NAME"), "layer"
    )
    norm_variant: str = _flag(
        "compute {several} as their papers define them, or as their authors' released code does "
        "(docs/release.md has the differences; default: {default})",
        {"choices": VARIANTS},
        VARIANTS[0],
    )
    norm_eps: float | None = _own("epsilon of every norm", _positive("E"))
    norm_alpha_fwd: float | None = _flag(
        "decay of the running statistics of the forward pass, such as PN's psi^2 and BN's averages for evaluation "
        "(default: the norm's own, {own})",
        _alpha("A"),
    )
    norm_alpha_bwd: float | None = _own(
        "decay of the running correction nu of the backward pass of PN and UN", _alpha("A")
    )
    layer_scale_groups: int | None = _flag(
        "groups of channels that layer-scale divides by their root mean square before {scaled}; 0: off (default: as "
        "many as attention heads for {per_head}, else 0)",
        _count("G"),
    )
    psi_warmup_updates: int | None = _flag(
        "updates during which PN normalizes with the batch's own psi, and UN and MABN with the statistics of the batch "
        "alone (default: the warm-up of the learning rate){own_warmups}",
        _count("N"),
    )
    norm_window: int | None = _flag(
        "training forwards whose statistics UN and MABN average (default: the norm's own, {own})", _from_1("M")
    )
    outlier_filtration: bool = _flag(
        "UN leaves outlier batches out of its averages (its authors recommend it for images, not for text)",
        {"action": "store_true"},
        False,
    )
    renorm_updates: int | None = _flag(
        "length of BRN's schedule: until N/8 it is BN, then d_max grows until 5N/8 and r_max until N (default: {part} "
        "of --max-update; without that {own})",
        _count("N"),
    )
    renorm_r_max: float | None = _own("BRN's r_max at the end of its schedule", _least_1("R"))
    renorm_d_max: float | None = _own("BRN's d_max at the end of its schedule", _not_negative("D"))
    reg_lambda_mean: float | None = _own(
        "factor of RBN's penalty on the distance of the mean of a batch from the running mean. The penalty is added "
        "once per batch to the loss, which is a sum over tokens",
        _not_negative("L"),
    )
    reg_lambda_var: float | None = _own(
        "the same for the standard deviation, with --norm-variant release for the variance", _not_negative("L")
    )
    fade_updates: int | None = _flag(
        "updates during which PRepBN fades from layer normalization into batch normalization (default: {part} of "
        "--max-update; without that {own})",
        _count("N"),
    )
    norm_groups: int | None = _flag(
        "number of channel groups of the norm group, each normalized on its own (default: as many as attention heads)",
        _from_1("G"),
    )
    norm_detach: str | None = _own(
        "which statistics are constants to the gradient in the norm detach: mean, std or mean,std", _detached("PARTS")
    )
    ada_k: float | None = _own("k of the norm ada", _not_negative("K"))
    ada_scale: float | None = _own(
        "factor C of the norm ada; in its paper 1 for English-Vietnamese, 2 for German-English and English-German",
        _positive("C"),
    )
    alpha_init: float | None = _own("initial alpha of the norms dyt and derf", _positive("A"))
    norm_sync: str = _flag(
        "take statistics over the tokens of all ranks (auto, the default: on for {synced}, off for the "
        "others, as in the paper)",
        {"choices": SYNC},
        SYNC[0],
    )
    no_norm_agreement: bool = _flag(
        "do not average unsynchronised statistics over the ranks before validation and saving; each rank then "
        "validates with its own statistics, and those of rank 0 are saved",
        {"action": "store_true"},
        False,
    )
    norm_stats_interval: int = _flag(
        "log a summary of the norms' statistics every N updates (default: 0, never)", _count("N"), 0
    )
    norm_probe: str | None = _flag(
        "record the statistics of batches and of gradients of every norm in FILE, a folder of Parquet files "
        "(docs/figures.md)",
        {"metavar": "FILE"},
    )
    norm_probe_interval: int = _flag("--norm-probe records every N-th update (default: {default})", _from_1("N"), 50)
    norm_probe_layers: str | None = _flag(
        "names of the norms that --norm-probe records, or patterns such as 'encoder.layers.0.*' (default: those of the "
        "encoder, or all in a model without one)",
        {"metavar": "NAME[,NAME]"},
    )
    norms_folded: bool = False

    @staticmethod
    def add_args(parser: argparse.ArgumentParser, encoder: bool = True) -> None:
        """Add the flags. They have no defaults of their own, so that an architecture can set them.

        Without ``encoder`` those of a model that is a decoder alone.
        """
        norms = "; ".join(f"{name}: {entry.title}" for name, entry in NORMS.items())
        per_head = ", ".join(name for name, entry in NORMS.items() if entry.layer_scale_per_head)
        words = {
            "norms": norms,
            "per_head": per_head,
            "several": ", ".join(name for name, entry in NORMS.items() if entry.variants),
            "synced": ", ".join(
                name for name, entry in NORMS.items() if entry.sync and issubclass(entry.cls, RunningNorm)
            ),
            "own_warmups": _own_warmups(),
            "norm_flags": "--encoder-norm and --decoder-norm" if encoder else "--decoder-norm",
            "of_decoder": "default: layer" if encoder else f"{norms}; default: the architecture's",
            "scaled": f"an encoder norm, and before a decoder norm that is one of {per_head}"
            if encoder
            else "each norm",
        }
        for one in fields(NormOptions):
            if not one.metadata or (one.name == "encoder_norm" and not encoder):
                continue
            own = {
                "default": one.default,
                "own": _own_defaults(_argument(one.name)),
                "part": _PARTS_OF_RUN.get(one.name),
            }
            argument = dict(one.metadata)
            text = argument.pop("help").format(**words, **own)
            parser.add_argument(f"--{one.name.replace('_', '-')}", help=text, **argument)

    @classmethod
    def from_args(cls, args) -> "NormOptions":
        """Read the options from fairseq's model settings: a flat Namespace, or hydra's ``model`` node.

        Warm-ups, schedules and the paths of norm modules are resolved here and written back, so that a checkpoint says
        what was used.
        """
        given = {one.name: safe_getattr(args, one.name, None) for one in fields(cls)}
        options, resolved = cls(**{name: value for name, value in given.items() if value is not None}), {}
        if options.norm_sync not in SYNC:
            raise ValueError(f"norm_sync={options.norm_sync!r} must be one of {', '.join(SYNC)}")
        if options.psi_warmup_updates is None:
            resolved["psi_warmup_updates"] = _learning_rate_warmup(args)
        if options.norm_probe_layers and not options.norm_probe:
            raise ValueError("--norm-probe-layers needs --norm-probe FILE")
        if options.norm_probe:
            resolved["norm_probe"] = to_absolute_path(options.norm_probe)
        if options.norm_module:
            # Absolute in the checkpoint, which is loaded from other folders too; hydra works in a folder of the run.
            paths = [to_absolute_path(path) for path in options.norm_module.split(",") if path]
            resolved["norm_module"] = ",".join(paths)
            for path in paths:
                load_norms(path)
        used = find_norm(options.encoder_norm).options | find_norm(options.decoder_norm).options
        run = _setting(args, "optimization", "max_update")
        for name, part in _PARTS_OF_RUN.items():
            if run and name in used and given[name] is None:
                resolved[name] = round(part * run)
        with open_dict(args) if OmegaConf.is_config(args) else ExitStack():
            for name, value in resolved.items():
                setattr(args, name, value)
        return replace(options, **resolved)

    def build_encoder_norm(self, num_features: int, heads: int, last: bool = False) -> ChannelNorm | LayerScale:
        """A norm of the encoder over ``num_features`` channels, beside attention with ``heads`` heads.

        ``last`` says that it is the one after the last layer.
        """
        return self._build(self.encoder_norm, num_features, heads, self.layer_scale_groups, last)

    def build_decoder_norm(self, num_features: int, heads: int, folds: bool = True) -> ChannelNorm | LayerScale:
        """A norm of the decoder over ``num_features`` channels, beside attention with ``heads`` heads.

        ``folds`` says whether it can be fused with the layers after it.
        """
        groups = self.layer_scale_groups if self._default_groups(self.decoder_norm, heads) else 0
        return self._build(self.decoder_norm, num_features, heads, groups, folds=folds)

    def _default_groups(self, name: str, heads: int) -> int:
        entry = find_norm(name)
        defaults = entry.variant(self.norm_variant).transformer_defaults
        return defaults.get("layer_scale_groups", heads if entry.layer_scale_per_head else 0)

    def _build(
        self, name: str, num_features: int, heads: int, groups: int | None, last: bool = False, folds: bool = True
    ) -> ChannelNorm | LayerScale:
        entry = find_norm(name)
        cls = entry.variant(self.norm_variant)
        given = {_argument(flag): value for flag, value in vars(self).items() if value is not None}
        options = {"groups": heads} | {option: given[option] for option in given if option in entry.options}
        options["layer_scale_groups"] = self._default_groups(name, heads) if groups is None else groups
        by_default = cls.transformer_defaults.get("sync", entry.sync)
        options["sync"] = by_default if self.norm_sync == "auto" else self.norm_sync == "on"
        if last and hasattr(cls, "last_norm_warmup_updates"):
            options["psi_warmup_updates"] = cls.last_norm_warmup_updates
        norm = build_norm(name, num_features, variant=self.norm_variant, **options)
        return norm.layer_scale if self.norms_folded and folds and isinstance(norm, RunningNorm) else norm


def _argument(flag: str) -> str:
    """The argument of the norms' constructors that a flag sets, if it sets one."""
    return re.sub(r"^(norm|reg)_", "", flag)


def _own_warmups() -> str:
    """For the help: the variants whose norm after the last encoder layer has a warm-up of its own."""
    return "".join(
        f"; with --norm-variant {variant} N counts training forwards, and the norm after the last encoder layer always "
        f"has {cls.last_norm_warmup_updates}"
        for entry in NORMS.values()
        for variant, cls in entry.variants.items()
        if hasattr(cls, "last_norm_warmup_updates")
    )


def _own_defaults(option: str) -> str:
    """For the help: the norms' own defaults of an argument of their constructors, the most frequent first."""
    norms: dict[object, list[str]] = {}
    for name, entry in NORMS.items():
        for variant, cls in {"": entry.cls, **entry.variants}.items():
            if option in entry.options:
                norms.setdefault(default_of(cls, option), []).append(f"{name} {variant}".strip())
    several = sorted(norms.items(), key=lambda item: -len(item[1]))
    return ", ".join(
        f"{value} for {' and '.join(names)}" if n else str(value) for n, (value, names) in enumerate(several)
    )


def _learning_rate_warmup(args) -> int:
    """The learning-rate warm-up in updates; 0 where the schedule has none."""
    return next((value for key in _WARMUP_KEYS if (value := _setting(args, "lr_scheduler", key))), 0)


def _setting(args, node: str, key: str) -> int:
    """A setting beside the model's; 0 where there is none.

    The command line gives one flat Namespace. Under hydra it is in a ``node`` beside the model's.
    """
    if OmegaConf.is_config(args):
        parent = args._get_parent()
        args = parent.get(node) if parent is not None else None
    return int(safe_getattr(args, key, None) or 0)
