"""The norms of a transformer: the command-line flags, their defaults, and the construction of
each norm.
"""

import argparse
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from fairseq.utils import safe_getattr
from hydra.utils import to_absolute_path
from omegaconf import OmegaConf

from pn_fairseq.common.command import checked, split_paths
from pn_fairseq.fairseq_patches.diagnostics_log import dashboard_interval
from pn_fairseq.fairseq_patches.run_settings import circumstances_of, writable
from pn_fairseq.models.placements import PLACEMENTS, find_placement
from pn_fairseq.norms import (
    NORMS,
    VARIANTS,
    ChannelNorm,
    LayerScale,
    RunningNorm,
    build_norm,
    load_norms,
)
from pn_fairseq.norms.options import options_of, parse_options, read_pairs
from pn_fairseq.norms.registry import (
    FIXED,
    SHARED,
    WARMUP,
    Circumstances,
    NormEntry,
    find_norm,
)

SYNC = ("auto", "on", "off")


def flag(help: str, argument: dict, default=None):
    """A field whose flag has the same name; ``argument`` is for argparse."""
    return field(default=default, metadata={"help": help, **argument})


_AFTER_MODULE = " (--norm-module has to come before it)"
#: Loads the files of ``--norm-module``, so that the flags after this one know their norms.
_modules = checked(lambda text: [load_norms(path) for path in split_paths(text)], "FILE[,FILE]")
_norm = checked(find_norm, "NAME", _AFTER_MODULE)
_placement = checked(find_placement, "NAME", _AFTER_MODULE)
_whole = {"type": int, "metavar": "N"}


@dataclass(frozen=True)
class NormOptions:
    """The norms of one transformer: the values of the flags with these names, ``norms_folded``, and
    ``run``.

    None: the norm's own default, or the default in the help of the flag. ``encoder_norm`` is None
    in a model that has only a decoder, in which ``layer_scale_groups`` applies to all norms.

    ``run``: the training run, on which defaults depend.

    ``norms_folded``: the norms with running statistics are part of the projections that follow
    them, and only their layer-scale is left (see :mod:`pn_fairseq.models.fold_checkpoint`). This
    setting has no flag: ``pn fold`` writes it into the settings of a checkpoint.
    """

    norm_module: str | None = flag(
        "Python files that register your own norms; it must precede the flags that name them",
        _modules,
    )
    encoder_norm: str | None = flag(
        "norm of every encoder layer: {norms} (default: the architecture's)", _norm, "power"
    )
    decoder_norm: str = flag(
        "norm of every decoder layer: {norms} (default: {of_decoder})", _norm, "layer"
    )
    encoder_norm_last: str | None = flag(
        "norm after the last encoder layer (default: that of --encoder-norm)", _norm
    )
    decoder_norm_last: str | None = flag(
        "norm after the last decoder layer (default: that of --decoder-norm)", _norm
    )
    encoder_norm_placement: str = flag(
        "where the norms of encoder layers go: {placements} (default: {default}; "
        "docs/placements.md)",
        _placement,
        "pre",
    )
    decoder_norm_placement: str = flag(
        "where the norms of decoder layers go: {placements} (default: {default})", _placement, "pre"
    )
    qk_norm: str | None = flag(
        "norm of the queries and keys of each attention head (default: none)", _norm
    )
    norm_options: Mapping[str, object] | None = flag(
        "options of single norms, which 'pn norms NAME' lists; NAME.KEY=VALUE is for the norm NAME "
        "only, KEY=VALUE for every norm of the model that has the option",
        checked(read_pairs, "KEY=VALUE[,KEY=VALUE]"),
    )
    norm_variant: str = flag(
        "compute norms as their papers define them, or as their authors' released code does "
        "(docs/release.md lists the differences; default: {default})",
        {"choices": VARIANTS},
        VARIANTS[0],
    )
    norm_eps: float | None = flag(
        "epsilon of every norm (default: 1e-5)", {"type": float, "metavar": "E"}
    )
    norm_alpha_fwd: float | None = flag(
        "decay of the running statistics of the forward pass, such as PN's psi^2 and BN's averages "
        "for evaluation (default: the norm's own)",
        {"type": float, "metavar": "A"},
    )
    norm_alpha_bwd: float | None = flag(
        "decay of running statistics of the backward pass, such as PN's correction nu (default: "
        "the norm's own)",
        {"type": float, "metavar": "A"},
    )
    layer_scale_groups: int | None = flag(
        "number of groups of channels, each of which layer-scale divides by its root mean square "
        "before {scaled}; 0: off (default: the norm's own)",
        {"type": int, "metavar": "G"},
    )
    psi_warmup_updates: int | None = flag(
        "updates (with --norm-variant release, training forwards) during which PN normalizes with "
        "the batch's own psi, and UN and MABN with the statistics of the batch only (default: the "
        "warm-up of the learning rate)",
        _whole,
    )
    norm_sync: str = flag(
        "compute statistics over the tokens of all ranks (default: auto, the norm's own)",
        {"choices": SYNC},
        SYNC[0],
    )
    no_average_norm_stats: bool = flag(
        "do not average unsynchronized statistics over the ranks before validation and saving; "
        "each rank then validates with its own statistics, and the statistics of rank 0 are saved",
        {"action": "store_true"},
        False,
    )
    norm_stats_interval: int | None = flag(
        "log a summary of the norms' statistics every N updates; 0: never (default: --log-interval "
        "with --tensorboard-logdir or --wandb-project, else never)",
        _whole,
    )
    norm_probe: str | None = flag(
        "record statistics of batches and gradients for the norms in FILE, a folder of Parquet "
        "files (docs/figures.md)",
        {"metavar": "FILE"},
    )
    norm_probe_interval: int = flag(
        "updates from record to record (default: {default})", _whole, 50
    )
    norm_probe_layers: str | None = flag(
        "names of the norms that --norm-probe records, or patterns such as 'encoder.layers.0.*' "
        "(default: the norms of the encoder, or all in a model without one)",
        {"metavar": "NAME[,NAME]"},
    )
    compile_layers: bool = flag(
        "train with the layers of encoder and decoder compiled by torch.compile, three graphs for "
        "all layers and batches; checkpoints and decoding stay as they are",
        {"action": "store_true"},
        False,
    )
    norms_folded: bool = False
    run: Circumstances = Circumstances()

    @staticmethod
    def add_args(parser: argparse.ArgumentParser, encoder: bool = True) -> None:
        """Add the flags, without defaults, so that an architecture can set them.

        ``encoder=False``: the flags of a model that has only a decoder.
        """
        scaled = "an encoder norm, and a decoder norm whose own default is not 0"
        names = {
            "norms": f"{', '.join(NORMS)}; 'pn norms' describes them",
            "placements": ", ".join(PLACEMENTS),
            "of_decoder": "layer" if encoder else "the architecture's",
            "scaled": scaled if encoder else "each norm",
        }
        for option in fields(NormOptions):
            is_flag = bool(option.metadata)
            if not is_flag or (option.name.startswith("encoder") and not encoder):
                continue
            argument = dict(option.metadata)
            text = argument.pop("help").format(**names, default=option.default)
            parser.add_argument(f"--{option.name.replace('_', '-')}", help=text, **argument)

    def names(self) -> dict[str, NormEntry]:
        """The norms of the model: their names and entries in the registry."""
        norms = (
            self.encoder_norm,
            self.encoder_norm_last,
            self.decoder_norm,
            self.decoder_norm_last,
            self.qk_norm,
        )
        return {name: find_norm(name) for name in norms if name is not None}

    @classmethod
    def from_args(cls, args, encoder: bool = True) -> "NormOptions":
        """Read the options from fairseq's model settings: a flat Namespace, or hydra's ``model``
        node.

        ``encoder=False``: those of a model that has only a decoder.

        Warm-ups, schedules, options and the paths of norm modules are resolved here and written
        back, so that a checkpoint contains what was used.

        Raises:
            ValueError: a norm or an option of a norm is unknown, or a value does not fit.
        """
        run = circumstances_of(args)
        given = {}
        for option in fields(cls):
            value = safe_getattr(args, option.name)
            if value is not None:
                given[option.name] = value
        given["run"] = run
        if not encoder:
            given |= {"encoder_norm": None, "encoder_norm_last": None}
        options = cls(**given)
        options._check_probe()
        if options.norm_sync not in SYNC:
            raise ValueError(f"norm_sync={options.norm_sync!r} must be one of {', '.join(SYNC)}")
        resolved = {}
        # Absolute in the checkpoint, which is also loaded from other folders; hydra runs in the
        # folder of the run.
        if options.norm_probe:
            resolved["norm_probe"] = to_absolute_path(options.norm_probe)
        if options.norm_module:
            paths = [to_absolute_path(path) for path in split_paths(options.norm_module)]
            resolved["norm_module"] = ",".join(paths)
            for path in paths:
                load_norms(path)
        for side in ("encoder", "decoder"):
            options._check_placement(side, getattr(args, f"{side}_layers_to_keep", None))
        if options.psi_warmup_updates is None:
            resolved["psi_warmup_updates"] = options._default_warmup()
        resolved["norm_options"] = options.resolved_options()
        with writable(args):
            for name, value in resolved.items():
                setattr(args, name, value)
        if options.norm_stats_interval is None:
            resolved["norm_stats_interval"] = dashboard_interval(args)  # not in the checkpoint
        return replace(options, **resolved)

    def _check_probe(self) -> None:
        if int(self.norm_probe_interval) < 1:
            raise ValueError(f"--norm-probe-interval {self.norm_probe_interval} must be at least 1")
        if self.norm_probe_layers and not self.norm_probe:
            raise ValueError("--norm-probe-layers needs --norm-probe FILE")

    def _check_placement(self, side: str, layers_to_keep) -> None:
        name = getattr(self, f"{side}_norm_placement")
        placement = find_placement(name)
        if getattr(self, f"{side}_norm_last") and not placement.last_norm:
            raise ValueError(
                f"--{side}-norm-last: {name} has no norm after the last layer; leave the flag out"
            )
        if layers_to_keep and not placement.prunes:
            raise ValueError(
                f"--{side}-layers-to-keep: layers of {name} compute something else in a smaller "
                "model"
            )

    def _default_warmup(self) -> int | None:
        """The psi warm-up of the norms; None: their defaults differ."""
        defaults = set()
        for entry in self.names().values():
            if "psi_warmup_updates" in entry.options:
                defaults.add(self._default(entry, "psi_warmup_updates"))
        if not defaults:
            return WARMUP.value(self.run)
        return defaults.pop() if len(defaults) == 1 else None

    def resolved_options(self) -> dict[str, object]:
        """The options of the norms, including default schedules that depend on the run.

        Raises:
            ValueError: no norm of the model accepts an option, a value has another type, or a
                required option is missing.
        """
        given, norms = self.norm_options or {}, self.names()
        if OmegaConf.is_config(given):
            given = OmegaConf.to_container(given, resolve=True)
        options = parse_options(given, norms)
        for name, entry in norms.items():
            of_run = entry.defaults_of_run(self.run, self.norm_variant)
            for option in entry.own_options.keys() - options_of(name, options).keys():
                default = entry.default(option, self.norm_variant)
                if default is inspect.Parameter.empty:
                    raise ValueError(f"the norm {name} needs the norm option {option}")
                if option in of_run:
                    options[option] = of_run[option]
        return options

    def build(
        self, side: str, num_features: int, heads: int, last: bool = False, folds: bool = True
    ) -> ChannelNorm | LayerScale:
        """A norm of the "encoder" or "decoder" over ``num_features`` channels, next to attention
        with ``heads`` heads.

        ``last``: this is the norm after the last layer. ``folds``: the norm can be fused with the
        layers after it.
        """
        name = getattr(self, f"{side}_norm")
        if last:
            name = getattr(self, f"{side}_norm_last") or name
        groups = self.layer_scale_groups
        if side == "decoder" and self.encoder_norm is not None:
            own = self._default(find_norm(name), "layer_scale_groups", heads)
            groups = groups if own else 0
        return self._build(name, num_features, heads, groups, last and side == "encoder", folds)

    def build_qk_norm(self, head_dim: int) -> ChannelNorm:
        """A norm over the channels of one attention head, without layer-scale."""
        return self._build(self.qk_norm, head_dim, 1, 0, folds=False)

    def _default(self, entry: NormEntry, option: str, heads: int | None = None) -> object:
        """The default of an option next to attention with ``heads`` heads; None: the
        constructor's.
        """
        circumstances = replace(self.run, heads=heads)
        return entry.default_in(circumstances, option, self.norm_variant)

    def _build(
        self,
        name: str,
        num_features: int,
        heads: int,
        groups: int | None,
        last_of_encoder: bool = False,
        folds: bool = True,
    ) -> ChannelNorm | LayerScale:
        entry = find_norm(name)
        given = {}
        for option, name_of_flag in SHARED.items():
            given[option] = getattr(self, name_of_flag[2:].replace("-", "_"))
        given["layer_scale_groups"] = groups
        given["sync"] = None if self.norm_sync == "auto" else self.norm_sync == "on"
        given |= options_of(name, self.norm_options or {})
        if last_of_encoder:
            given |= entry.variant_last.get(self.norm_variant, {})
        options = {}
        for option in entry.options:
            value = given.get(option)
            if value is None and option not in FIXED:
                value = self._default(entry, option, heads)
            if value is not None:
                options[option] = value
        norm = build_norm(name, num_features, variant=self.norm_variant, **options)
        if folds and self.norms_folded and isinstance(norm, RunningNorm) and norm.folds:
            return norm.layer_scale
        return norm
