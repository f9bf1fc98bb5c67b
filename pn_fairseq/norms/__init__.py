"""Normalization layers for padded sequences of tokens. Needs torch and nothing else.

To add a norm, subclass :class:`ChannelNorm` (no state) or :class:`RunningNorm` (running statistics) and register it
with :func:`register_norm`; see docs/adding_a_norm.md.
"""

from pn_fairseq.norms.base import ChannelNorm, RunningNorm, running_norms
from pn_fairseq.norms.batch import MaskedBatchNorm
from pn_fairseq.norms.distributed import average_running_stats
from pn_fairseq.norms.dyt import DynamicErf, DynamicTanh
from pn_fairseq.norms.group import GroupNorm
from pn_fairseq.norms.layer import LayerNorm
from pn_fairseq.norms.layer_scale import LayerScale
from pn_fairseq.norms.power import PowerNorm
from pn_fairseq.norms.power_release import PowerNormRelease
from pn_fairseq.norms.power_v import PowerNormV
from pn_fairseq.norms.recalibrate import recalibrating
from pn_fairseq.norms.registry import NORMS, VARIANTS, build_norm, load_norms, register_norm
from pn_fairseq.norms.rms import RMSNorm, RMSNormRelease, ScaleNorm
from pn_fairseq.norms.simple import AdaNorm, AdaNormRelease, DetachNorm, LayerNormSimple, NoNorm
from pn_fairseq.norms.tokens import Moments, Step, Tokens

__all__ = [
    "NORMS",
    "VARIANTS",
    "AdaNorm",
    "AdaNormRelease",
    "ChannelNorm",
    "DetachNorm",
    "DynamicErf",
    "DynamicTanh",
    "GroupNorm",
    "LayerNorm",
    "LayerNormSimple",
    "LayerScale",
    "MaskedBatchNorm",
    "Moments",
    "NoNorm",
    "PowerNorm",
    "PowerNormRelease",
    "PowerNormV",
    "RMSNorm",
    "RMSNormRelease",
    "RunningNorm",
    "ScaleNorm",
    "Step",
    "Tokens",
    "average_running_stats",
    "build_norm",
    "load_norms",
    "recalibrating",
    "register_norm",
    "running_norms",
]
