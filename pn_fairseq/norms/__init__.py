"""Normalization layers for padded sequences of tokens. They need only torch.

To add a norm, subclass :class:`ChannelNorm` (no state) or :class:`RunningNorm` (running statistics)
and register it with :func:`register_norm`; see docs/adding_a_norm.md.
"""

from pn_fairseq.norms.batch import MaskedBatchNorm, MaskedBatchNormRelease
from pn_fairseq.norms.batch_reg import RegularizedBatchNorm, RegularizedBatchNormRelease
from pn_fairseq.norms.batch_renorm import BatchRenorm
from pn_fairseq.norms.conversion.convert import convert_norms, norm_parameter_names, norm_report
from pn_fairseq.norms.core.base import (
    ChannelNorm,
    RunningNorm,
    ignoring,
    running_norms,
    set_loss_scale,
)
from pn_fairseq.norms.core.layer_scale import LayerScale
from pn_fairseq.norms.core.step import Moments, Step
from pn_fairseq.norms.dyt import DynamicErf, DynamicTanh
from pn_fairseq.norms.fold import fold_norms
from pn_fairseq.norms.group import GroupNorm
from pn_fairseq.norms.layer import LayerNorm
from pn_fairseq.norms.mabn import MovingAverageBatchNorm
from pn_fairseq.norms.masks.padding import padding
from pn_fairseq.norms.power import PowerNorm
from pn_fairseq.norms.power_release import PowerNormRelease
from pn_fairseq.norms.power_v import PowerNormV
from pn_fairseq.norms.prep_batch import ProgressiveBatchNorm
from pn_fairseq.norms.recalibrate import average_running_stats, recalibrating
from pn_fairseq.norms.registry import NORMS, VARIANTS, build_norm, load_norms, register_norm
from pn_fairseq.norms.rms import RMSNorm, RMSNormRelease, ScaleNorm
from pn_fairseq.norms.simple import AdaNorm, AdaNormRelease, DetachNorm, LayerNormSimple, NoNorm
from pn_fairseq.norms.unified import UnifiedNorm, UnifiedNormRelease

__all__ = [
    "NORMS",
    "VARIANTS",
    "AdaNorm",
    "AdaNormRelease",
    "BatchRenorm",
    "ChannelNorm",
    "DetachNorm",
    "DynamicErf",
    "DynamicTanh",
    "GroupNorm",
    "LayerNorm",
    "LayerNormSimple",
    "LayerScale",
    "MaskedBatchNorm",
    "MaskedBatchNormRelease",
    "Moments",
    "MovingAverageBatchNorm",
    "NoNorm",
    "PowerNorm",
    "PowerNormRelease",
    "PowerNormV",
    "ProgressiveBatchNorm",
    "RMSNorm",
    "RMSNormRelease",
    "RegularizedBatchNorm",
    "RegularizedBatchNormRelease",
    "RunningNorm",
    "ScaleNorm",
    "Step",
    "UnifiedNorm",
    "UnifiedNormRelease",
    "average_running_stats",
    "build_norm",
    "convert_norms",
    "fold_norms",
    "ignoring",
    "load_norms",
    "norm_parameter_names",
    "norm_report",
    "padding",
    "recalibrating",
    "register_norm",
    "running_norms",
    "set_loss_scale",
]
