"""Wrong arguments raise an error at once, which names the values."""

import math

import pytest
import torch

from pn_fairseq.norms import LayerNorm, LayerScale, MaskedBatchNorm, PowerNorm, PowerNormV

CLASSES = [PowerNorm, PowerNormV, MaskedBatchNorm, LayerNorm]
ALPHAS = [(PowerNorm, "alpha_fwd"), (PowerNorm, "alpha_bwd"), (PowerNormV, "alpha_fwd"), (MaskedBatchNorm, "alpha_fwd")]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("groups", [5, 24])
def test_channels_that_do_not_divide_into_groups(cls, groups):
    with pytest.raises(ValueError, match=rf"(?s)(?=.*\b12\b)(?=.*\b{groups}\b)"):
        cls(12, layer_scale_groups=groups)


@pytest.mark.parametrize("groups", [5, 24])
def test_layer_scale_channels_that_do_not_divide_into_groups(groups):
    with pytest.raises(ValueError, match=rf"(?s)(?=.*\b12\b)(?=.*\b{groups}\b)"):
        LayerScale(12, groups)


@pytest.mark.parametrize("groups", [-1, -4])
def test_negative_groups(groups):
    with pytest.raises(ValueError, match=str(groups)):
        LayerScale(12, groups)


@pytest.mark.parametrize(("cls", "argument"), ALPHAS)
@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 1.5, math.nan, math.inf])
def test_alpha_outside_the_open_interval(cls, argument, alpha):
    with pytest.raises(ValueError, match=rf"(?s)(?=.*alpha)(?=.*{alpha})"):
        cls(12, **{argument: alpha})


@pytest.mark.parametrize("cls", [*CLASSES, LayerScale])
@pytest.mark.parametrize("num_features", [0, -3])
def test_no_channels(cls, num_features):
    with pytest.raises(ValueError, match=str(num_features)):
        cls(num_features, **({"groups": 0} if cls is LayerScale else {}))


@pytest.mark.parametrize("cls", [*CLASSES, LayerScale])
@pytest.mark.parametrize("eps", [0.0, -1e-5, math.nan])
def test_eps_that_is_not_positive(cls, eps):
    with pytest.raises(ValueError, match=rf"(?s)(?=.*eps)(?=.*{eps})"):
        cls(12, eps=eps, **({"groups": 4} if cls is LayerScale else {}))


def test_negative_warmup():
    with pytest.raises(ValueError, match="-1"):
        PowerNorm(12, psi_warmup_updates=-1)


@pytest.mark.parametrize("groups", [0, 4])
def test_layer_scale_wrong_number_of_channels(groups):
    with pytest.raises(ValueError, match=r"(?s)(?=.*\b12\b)(?=.*\b16\b)"):
        LayerScale(12, groups)(torch.zeros(5, 3, 16))
