"""Normalization layers for padded sequences of tokens. Needs torch and nothing else."""

from pn_fairseq.norms.batch import MaskedBatchNorm
from pn_fairseq.norms.layer import LayerNorm
from pn_fairseq.norms.layer_scale import LayerScale
from pn_fairseq.norms.power import PowerNorm
from pn_fairseq.norms.power_release import PowerNormRelease
from pn_fairseq.norms.power_v import PowerNormV
from pn_fairseq.norms.psi_warmup import PsiWarmup
from pn_fairseq.norms.recalibrate import recalibrating
from pn_fairseq.norms.registry import NORMS, VARIANTS, build_norm

__all__ = [
    "NORMS",
    "VARIANTS",
    "LayerNorm",
    "LayerScale",
    "MaskedBatchNorm",
    "PowerNorm",
    "PowerNormRelease",
    "PowerNormV",
    "PsiWarmup",
    "build_norm",
    "recalibrating",
]
