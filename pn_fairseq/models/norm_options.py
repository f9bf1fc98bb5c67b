"""Which norms a transformer gets: the command-line flags, their defaults, and the building of each norm."""

import argparse
from contextlib import ExitStack
from dataclasses import dataclass, replace

from fairseq.utils import safe_getattr
from hydra.utils import to_absolute_path
from omegaconf import OmegaConf, open_dict

from pn_fairseq.norms import NORMS, VARIANTS, ChannelNorm, LayerScale, RunningNorm, build_norm, load_norms
from pn_fairseq.norms.registry import find_norm
from pn_fairseq.norms.simple import check_parts

#: What fairseq's learning-rate schedules call the length of their warm-up.
_WARMUP_KEYS = ("warmup_updates", "warmup_steps")

SYNC = ("auto", "on", "off")


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
_positive = _bounded(float, lambda value: 0 < value < float("inf"), "a number greater than 0")
_not_negative = _bounded(float, lambda value: 0 <= value < float("inf"), "a number of at least 0")
_count = _bounded(int, lambda value: value >= 0, "a whole number of at least 0")
_groups = _bounded(int, lambda value: value >= 1, "a whole number of at least 1")


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
        norm_alpha_fwd, norm_alpha_bwd: decay of the running statistics forward and backward.
        layer_scale_groups: groups of layer-scale in front of the encoder's norms, and of those decoder norms that
            have it by default; None: as many as attention heads for norms that have it by default, else 0.
        psi_warmup_updates: psi warm-up in optimizer updates; None: that of the learning rate. A variant whose norm
            after the last encoder layer has a warm-up of its own keeps that one there.
        norm_groups: groups of channels of GN; None: as many as attention heads.
        norm_detach: what no gradient goes through in DetachNorm: ``mean``, ``std`` or ``mean,std``.
        ada_k, ada_scale: k and C of AdaNorm.
        alpha_init: initial alpha of DyT and Derf.
        norm_sync: ``on``, ``off`` or ``auto``: whether statistics are taken over all workers; auto: as in the paper.
        no_norm_agreement: leave statistics that are not synchronised as each worker has them when it validates or
            saves.
        norm_stats_interval: updates between two reports of the norms in the log; 0: none.
        norms_folded: the norms with running statistics are part of the projections that follow them, and only their
            layer-scale is left (see :mod:`pn_fairseq.models.fold_checkpoint`). There is no flag for it: ``pn-fold``
            writes it into the settings of a checkpoint.
    """

    encoder_norm: str = "power"
    decoder_norm: str = "layer"
    norm_variant: str = VARIANTS[0]
    norm_eps: float = 1e-5
    norm_alpha_fwd: float = 0.9
    norm_alpha_bwd: float = 0.9
    layer_scale_groups: int | None = None
    psi_warmup_updates: int | None = None
    norm_groups: int | None = None
    norm_detach: str = "mean,std"
    ada_k: float = 0.1
    ada_scale: float = 1.0
    alpha_init: float = 0.5
    norm_sync: str = "auto"
    no_norm_agreement: bool = False
    norm_stats_interval: int = 0
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
            help="decay of the running statistics of the forward pass: PN's psi^2, PN-V's and BN's averages for "
            f"evaluation (default: {default.norm_alpha_fwd})",
        )
        parser.add_argument(
            "--norm-alpha-bwd",
            type=_alpha,
            metavar="A",
            help=f"decay of PN's running correction nu of the backward pass (default: {default.norm_alpha_bwd})",
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
            help="updates during which PN normalizes with the batch's own psi (default: the warm-up of the learning "
            f"rate){_own_warmups()}",
        )
        parser.add_argument(
            "--norm-groups",
            type=_groups,
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
        synced = ", ".join(
            name for name, entry in NORMS.items() if entry.sync and issubclass(entry.cls, RunningNorm)
        )
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

    @classmethod
    def from_args(cls, args) -> "NormOptions":
        """Read the options from fairseq's model settings: a flat Namespace, or hydra's ``model`` node.

        The psi warm-up and the paths of norm modules are resolved here and written back, so that a checkpoint says what
        was used.
        """
        values = {name: safe_getattr(args, name, None) for name in cls.__dataclass_fields__}
        if values["psi_warmup_updates"] is None:
            values["psi_warmup_updates"] = _learning_rate_warmup(args)
            with open_dict(args) if OmegaConf.is_config(args) else ExitStack():
                args.psi_warmup_updates = values["psi_warmup_updates"]
        options = cls(**{name: value for name, value in values.items() if value is not None})
        if options.norm_module:
            # Absolute in the checkpoint, which is loaded from other folders too; hydra works in a folder of the run.
            paths = ",".join(to_absolute_path(path) for path in options.norm_module.split(",") if path)
            options = replace(options, norm_module=paths)
            with open_dict(args) if OmegaConf.is_config(args) else ExitStack():
                args.norm_module = paths
            for path in paths.split(","):
                load_norms(path)
        for name in (options.encoder_norm, options.decoder_norm):
            find_norm(name)
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
        by_default = find_norm(self.decoder_norm).layer_scale_per_head
        groups = self.layer_scale_groups if by_default else 0
        return self._build(self.decoder_norm, num_features, heads, groups, folds=folds)

    def _build(
        self, name: str, num_features: int, heads: int, groups: int | None, last: bool = False, folds: bool = True
    ) -> ChannelNorm | LayerScale:
        entry = find_norm(name)
        if groups is None:
            groups = heads if entry.layer_scale_per_head else 0
        own_warmup = getattr(entry.variant(self.norm_variant), "last_norm_warmup_updates", None) if last else None
        norm = build_norm(
            name,
            num_features,
            variant=self.norm_variant,
            eps=self.norm_eps,
            alpha_fwd=self.norm_alpha_fwd,
            alpha_bwd=self.norm_alpha_bwd,
            layer_scale_groups=groups,
            psi_warmup_updates=(self.psi_warmup_updates or 0) if own_warmup is None else own_warmup,
            groups=heads if self.norm_groups is None else self.norm_groups,
            detach=self.norm_detach,
            ada_k=self.ada_k,
            ada_scale=self.ada_scale,
            alpha_init=self.alpha_init,
            sync=entry.sync if self.norm_sync == "auto" else self.norm_sync == "on",
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


def _learning_rate_warmup(args) -> int:
    """The learning-rate warm-up in updates; 0 where the schedule has none.

    The command line gives one flat Namespace. Under hydra the schedule is a node beside the model's.
    """
    if OmegaConf.is_config(args):
        parent = args._get_parent()
        args = parent.get("lr_scheduler") if parent is not None else None
    for key in _WARMUP_KEYS:
        if value := safe_getattr(args, key, None):
            return int(value)
    return 0
