"""Which norms a transformer gets: the command-line flags, their defaults, and the building of each norm."""

import argparse
from contextlib import ExitStack
from dataclasses import dataclass, replace

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
    """An argparse type: ``kind(text)``, refused in one line unless it satisfies ``accept``."""

    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not accept(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


_alpha = _bounded(float, lambda value: 0 < value < 1, "a number strictly between 0 and 1")
_least_1 = _bounded(float, lambda value: 1 <= value < float("inf"), "a number of at least 1")
_positive = _bounded(float, lambda value: 0 < value < float("inf"), "a number greater than 0")
_not_negative = _bounded(float, lambda value: 0 <= value < float("inf"), "a number of at least 0")
_count = _bounded(int, lambda value: value >= 0, "a whole number of at least 0")
_from_1 = _bounded(int, lambda value: value >= 1, "a whole number of at least 1")


def _modules(text: str) -> str:
    """Load the files of ``--norm-module``, so that the flags after it know their norms."""
    try:
        for path in text.split(","):
            load_norms(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _detached(text: str) -> str:
    try:
        check_parts(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not mean, std or mean,std") from None
    return text


def _norm(text: str) -> str:
    try:
        find_norm(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} (--norm-module has to come before it)") from None
    return text


@dataclass(frozen=True)
class NormOptions:
    """The norms of one transformer.

    Attributes:
        encoder_norm, decoder_norm: names in :data:`pn_fairseq.norms.NORMS`.
        norm_module: Python files, separated by commas, that register more norms (docs/adding_a_norm.md).
        norm_variant: one of :data:`pn_fairseq.norms.VARIANTS`, for the norms of which there are several.
        norm_eps: epsilon of every norm.
        norm_alpha_fwd: decay of the running statistics forward; None: the norm's own.
        norm_alpha_bwd: decay of the running statistics backward.
        layer_scale_groups: groups of layer-scale in front of the encoder's norms, and of those decoder norms that
            have it by default; None: as many as attention heads for norms that have it by default, else 0.
        psi_warmup_updates: psi warm-up in optimizer updates; None: that of the learning rate. A variant whose norm
            after the last encoder layer has a warm-up of its own keeps that one there.
        norm_window: steps that ``mabn`` and ``unified`` average; None: the norm's own.
        outlier_filtration: of ``unified``.
        renorm_updates, renorm_r_max, renorm_d_max: schedule of ``batch-renorm``; None: its own, with updates in
            proportion to the run.
        reg_lambda_mean, reg_lambda_var: factors of the penalty of ``batch-reg``; None: its own.
        fade_updates: length of the fade of ``prep-batch``; None: in proportion to the run.
        norm_groups: groups of channels of GN; None: as many as attention heads.
        norm_detach: what no gradient goes through in DetachNorm: ``mean``, ``std`` or ``mean,std``.
        ada_k, ada_scale: k and C of AdaNorm.
        alpha_init: initial alpha of DyT and Derf.
        norm_sync: ``on``, ``off`` or ``auto``: whether statistics are taken over all workers; auto: as in the paper.
        no_norm_agreement: leave statistics that are not synchronised as each worker has them when it validates or
            saves.
        norm_stats_interval: updates between two reports of the norms in the log; 0: none.
        norm_probe: where :class:`~pn_fairseq.models.norm_probe.NormProbe` writes; None: nowhere.
        norm_probe_interval: updates between two that it records.
        norm_probe_layers: patterns of the names of the norms that it records, separated by commas; None: those
            of the encoder, or all in a model without one.
        norms_folded: the norms with running statistics are part of the projections that follow them, and only their
            layer-scale is left (see :mod:`pn_fairseq.models.fold_checkpoint`). There is no flag for it: ``pn-fold``
            writes it into the settings of a checkpoint.
    """

    encoder_norm: str = "power"
    decoder_norm: str = "layer"
    norm_variant: str = VARIANTS[0]
    norm_eps: float = 1e-5
    norm_alpha_fwd: float | None = None
    norm_alpha_bwd: float = 0.9
    layer_scale_groups: int | None = None
    psi_warmup_updates: int | None = None
    norm_window: int | None = None
    outlier_filtration: bool = False
    renorm_updates: int | None = None
    renorm_r_max: float | None = None
    renorm_d_max: float | None = None
    reg_lambda_mean: float | None = None
    reg_lambda_var: float | None = None
    fade_updates: int | None = None
    norm_groups: int | None = None
    norm_detach: str = "mean,std"
    ada_k: float = 0.1
    ada_scale: float = 1.0
    alpha_init: float = 0.5
    norm_sync: str = "auto"
    no_norm_agreement: bool = False
    norm_stats_interval: int = 0
    norm_probe: str | None = None
    norm_probe_interval: int = 50
    norm_probe_layers: str | None = None
    norms_folded: bool = False
    norm_module: str | None = None

    @staticmethod
    def add_args(parser: argparse.ArgumentParser, encoder: bool = True) -> None:
        """Add the flags. They have no defaults of their own, so that an architecture can set them.

        Without ``encoder`` those of a model that is a decoder alone.
        """
        names = "; ".join(f"{name}: {entry.title}" for name, entry in NORMS.items())
        default = NormOptions()
        parser.add_argument(
            "--norm-module",
            type=_modules,
            metavar="FILE[,FILE]",
            help=f"Python files that register norms of your own, for {'--encoder-norm and ' * encoder}--decoder-norm",
        )
        of_decoder = f"default: {default.decoder_norm}" if encoder else f"{names}; default: the architecture's"
        if encoder:
            parser.add_argument(
                "--encoder-norm",
                type=_norm,
                metavar="NAME",
                help=f"norm of the encoder, in its layers and after the last ({names}; default: the architecture's)",
            )
        parser.add_argument(
            "--decoder-norm",
            type=_norm,
            metavar="NAME",
            help=f"norm of the decoder, in its layers and after the last ({of_decoder})",
        )
        several = ", ".join(name for name, entry in NORMS.items() if entry.variants)
        parser.add_argument(
            "--norm-variant",
            choices=VARIANTS,
            help=f"compute {several} as the paper says, or as the code does that its authors released with it "
            f"(docs/release.md has the differences; default: {default.norm_variant})",
        )
        parser.add_argument(
            "--norm-eps", type=_positive, metavar="E", help=f"epsilon of every norm (default: {default.norm_eps})"
        )
        parser.add_argument(
            "--norm-alpha-fwd",
            type=_alpha,
            metavar="A",
            help="decay of the running statistics of the forward pass, such as PN's psi^2 and BN's averages for "
            f"evaluation (default: the norm's own, {_own_defaults('alpha_fwd')})",
        )
        parser.add_argument(
            "--norm-alpha-bwd",
            type=_alpha,
            metavar="A",
            help="decay of the running correction nu of the backward pass of PN and UN (default: "
            f"{default.norm_alpha_bwd})",
        )
        per_head = ", ".join(name for name, entry in NORMS.items() if entry.layer_scale_per_head)
        parser.add_argument(
            "--layer-scale-groups",
            type=_count,
            metavar="G",
            help="groups of channels that layer-scale divides by their root mean square before "
            f"{f'an encoder norm, and before a decoder norm that is one of {per_head}' if encoder else 'each norm'}; "
            f"0: off (default: as many as attention heads for {per_head}, else 0)",
        )
        parser.add_argument(
            "--psi-warmup-updates",
            type=_count,
            metavar="N",
            help="updates during which PN normalizes with the batch's own psi, and UN and MABN with the statistics of "
            f"the batch alone (default: the warm-up of the learning rate){_own_warmups()}",
        )
        parser.add_argument(
            "--norm-window",
            type=_from_1,
            metavar="M",
            help="training forwards whose statistics UN and MABN average (default: the norm's own, "
            f"{_own_defaults('window')})",
        )
        parser.add_argument(
            "--outlier-filtration",
            action="store_true",
            help="UN keeps batches out of its averages that are far from them (its authors: for images, not for text)",
        )
        parser.add_argument(
            "--renorm-updates",
            type=_count,
            metavar="N",
            help="length of BRN's schedule: until N/8 it is BN, then d_max grows until 5N/8 and r_max until N "
            f"(default: {_PARTS_OF_RUN['renorm_updates']} of --max-update; without that "
            f"{_own_defaults('renorm_updates')})",
        )
        parser.add_argument(
            "--renorm-r-max",
            type=_least_1,
            metavar="R",
            help=f"BRN's r_max at the end of its schedule (default: {_own_defaults('renorm_r_max')})",
        )
        parser.add_argument(
            "--renorm-d-max",
            type=_not_negative,
            metavar="D",
            help=f"BRN's d_max at the end of its schedule (default: {_own_defaults('renorm_d_max')})",
        )
        parser.add_argument(
            "--reg-lambda-mean",
            type=_not_negative,
            metavar="L",
            help="factor of RBN's penalty on the distance of the mean of a batch from the running mean. The penalty is "
            "added once per batch to the loss, which is a sum over tokens (default: "
            f"{_own_defaults('lambda_mean')})",
        )
        parser.add_argument(
            "--reg-lambda-var",
            type=_not_negative,
            metavar="L",
            help="the same for the standard deviation, with --norm-variant release for the variance (default: "
            f"{_own_defaults('lambda_var')})",
        )
        parser.add_argument(
            "--fade-updates",
            type=_count,
            metavar="N",
            help="updates during which PRepBN fades from layer normalization into batch normalization (default: "
            f"{_PARTS_OF_RUN['fade_updates']} of --max-update; without that {_own_defaults('fade_updates')})",
        )
        parser.add_argument(
            "--norm-groups",
            type=_from_1,
            metavar="G",
            help="groups of channels that the norm group normalizes each alone (default: as many as attention heads)",
        )
        parser.add_argument(
            "--norm-detach",
            type=_detached,
            metavar="PARTS",
            help="what no gradient goes through in the norm detach: mean, std or mean,std "
            f"(default: {default.norm_detach})",
        )
        parser.add_argument(
            "--ada-k", type=_not_negative, metavar="K", help=f"k of the norm ada (default: {default.ada_k})"
        )
        parser.add_argument(
            "--ada-scale",
            type=_positive,
            metavar="C",
            help="factor C of the norm ada; in its paper 1 for English-Vietnamese, 2 for German-English and "
            f"English-German (default: {default.ada_scale})",
        )
        parser.add_argument(
            "--alpha-init",
            type=_positive,
            metavar="A",
            help=f"initial alpha of the norms dyt and derf (default: {default.alpha_init})",
        )
        synced = ", ".join(name for name, entry in NORMS.items() if entry.sync and issubclass(entry.cls, RunningNorm))
        parser.add_argument(
            "--norm-sync",
            choices=SYNC,
            help="take statistics over the tokens of all data-parallel workers (auto, the default: on for "
            f"{synced}, off for the others, as in the paper)",
        )
        parser.add_argument(
            "--no-norm-agreement",
            action="store_true",
            help="statistics that are not synchronised are averaged over the workers before they validate or save, so "
            "that the model that is validated and saved is one and the same; this leaves them apart, and those of "
            "worker 0 are saved",
        )
        parser.add_argument(
            "--norm-stats-interval",
            type=_count,
            metavar="N",
            help="log a summary of the norms' statistics every N updates (default: 0, never)",
        )
        parser.add_argument(
            "--norm-probe",
            metavar="FILE",
            help="record the statistics of batches and of gradients of every norm in FILE, a folder of Parquet files "
            "(docs/figures.md)",
        )
        parser.add_argument(
            "--norm-probe-interval",
            type=_from_1,
            metavar="N",
            help=f"updates from one that --norm-probe records to the next (default: {default.norm_probe_interval})",
        )
        parser.add_argument(
            "--norm-probe-layers",
            metavar="NAME[,NAME]",
            help="names of the norms that --norm-probe records, or patterns such as 'encoder.layers.0.*' (default: "
            "those of the encoder, or all in a model without one)",
        )

    @classmethod
    def from_args(cls, args) -> "NormOptions":
        """Read the options from fairseq's model settings: a flat Namespace, or hydra's ``model`` node.

        Warm-ups, schedules and the paths of norm modules are resolved here and written back, so that a checkpoint says
        what was used.
        """
        values = {name: safe_getattr(args, name, None) for name in cls.__dataclass_fields__}
        if values["psi_warmup_updates"] is None:
            values["psi_warmup_updates"] = _learning_rate_warmup(args)
            _write_back(args, psi_warmup_updates=values["psi_warmup_updates"])
        options = cls(**{name: value for name, value in values.items() if value is not None})
        if options.norm_probe:
            options = replace(options, norm_probe=to_absolute_path(options.norm_probe))
            _write_back(args, norm_probe=options.norm_probe)
        if options.norm_module:
            # Absolute in the checkpoint, which is loaded from other folders too; hydra works in a folder of the run.
            paths = ",".join(to_absolute_path(path) for path in options.norm_module.split(",") if path)
            options = replace(options, norm_module=paths)
            _write_back(args, norm_module=paths)
            for path in paths.split(","):
                load_norms(path)
        used = find_norm(options.encoder_norm).options | find_norm(options.decoder_norm).options
        for name, part in _PARTS_OF_RUN.items():
            if (
                name in used
                and getattr(options, name) is None
                and (run := _setting(args, "optimization", "max_update"))
            ):
                options = replace(options, **{name: round(part * run)})
                _write_back(args, **{name: getattr(options, name)})
        if options.norm_sync not in SYNC:
            raise ValueError(f"norm_sync={options.norm_sync!r} must be one of {', '.join(SYNC)}")
        return options

    def build_encoder_norm(self, num_features: int, heads: int, last: bool = False) -> ChannelNorm | LayerScale:
        """A norm of the encoder over ``num_features`` channels, beside attention with ``heads`` heads.

        ``last`` says that it is the one after the last layer.
        """
        return self._build(self.encoder_norm, num_features, heads, self.layer_scale_groups, last)

    def build_decoder_norm(self, num_features: int, heads: int, folds: bool = True) -> ChannelNorm | LayerScale:
        """A norm of the decoder over ``num_features`` channels, beside attention with ``heads`` heads.

        ``folds`` says whether what follows it can take it in.
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
        own_warmup = getattr(cls, "last_norm_warmup_updates", None) if last else None
        options = {
            "alpha_fwd": self.norm_alpha_fwd,
            "alpha_bwd": self.norm_alpha_bwd,
            "window": self.norm_window,
            "outlier_filtration": self.outlier_filtration,
            "renorm_updates": self.renorm_updates,
            "renorm_r_max": self.renorm_r_max,
            "renorm_d_max": self.renorm_d_max,
            "lambda_mean": self.reg_lambda_mean,
            "lambda_var": self.reg_lambda_var,
            "fade_updates": self.fade_updates,
        }
        norm = build_norm(
            name,
            num_features,
            variant=self.norm_variant,
            eps=self.norm_eps,
            layer_scale_groups=self._default_groups(name, heads) if groups is None else groups,
            psi_warmup_updates=(self.psi_warmup_updates or 0) if own_warmup is None else own_warmup,
            groups=heads if self.norm_groups is None else self.norm_groups,
            detach=self.norm_detach,
            ada_k=self.ada_k,
            ada_scale=self.ada_scale,
            alpha_init=self.alpha_init,
            sync=cls.transformer_defaults.get("sync", entry.sync)
            if self.norm_sync == "auto"
            else self.norm_sync == "on",
            **{option: value for option, value in options.items() if value is not None},
        )
        return norm.layer_scale if self.norms_folded and folds and isinstance(norm, RunningNorm) else norm


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
    (usual, _), *others = sorted(norms.items(), key=lambda item: -len(item[1]))
    return ", ".join([str(usual), *(f"{value} for {' and '.join(names)}" for value, names in others)])


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


def _write_back(args, **values) -> None:
    with open_dict(args) if OmegaConf.is_config(args) else ExitStack():
        for name, value in values.items():
            setattr(args, name, value)
