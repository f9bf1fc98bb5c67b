"""Wrong arguments raise an error at once, which names the values."""

import math

import pytest
import torch

from pn_fairseq.norms import NORMS, LayerScale, MaskedBatchNorm, PowerNorm, PowerNormV, build_norm

ALPHAS = [(PowerNorm, "alpha_fwd"), (PowerNorm, "alpha_bwd"), (PowerNormV, "alpha_fwd"), (MaskedBatchNorm, "alpha_fwd")]
MISTAKES = [
    (LayerScale, {"groups": -1}, "groups=-1 must be a whole number of at least 0"),
    (LayerScale, {"groups": 24}, "num_features=12 is not divisible by groups=24"),
    (LayerScale, {"groups": 4, "eps": 0.0}, "eps=0.0 must be a number greater than 0"),
    (LayerScale, {"groups": 0, "num_features": -3}, "num_features=-3 must be a whole number of at least 1"),
    (PowerNorm, {"psi_warmup_updates": -1}, "psi_warmup_updates=-1 must be a whole number of at least 0"),
    (PowerNorm, {"eps": 0.0}, "eps=0.0 must be a number greater than 0"),
    (PowerNorm, {"eps": math.nan}, "eps=nan must be a number greater than 0"),
    *(
        (cls, {argument: alpha}, f"{argument}={alpha} must lie strictly between 0 and 1")
        for cls, argument in ALPHAS
        for alpha in (0.0, 1.0, 1.5, math.nan)
    ),
]


@pytest.mark.parametrize(("cls", "arguments", "message"), MISTAKES)
def test_arguments_that_do_not_fit(cls, arguments, message):
    with pytest.raises(ValueError, match=message):
        cls(**{"num_features": 12, **arguments})


@pytest.mark.parametrize("name", NORMS)
def test_values_that_every_norm_checks(name):
    with pytest.raises(ValueError, match="num_features=12 is not divisible by groups=5"):
        build_norm(name, 12, layer_scale_groups=5)
    with pytest.raises(ValueError, match="eps=-1.0"):
        build_norm(name, 12, eps=-1.0)
    with pytest.raises(ValueError, match="num_features=0"):
        build_norm(name, 0)


@pytest.mark.parametrize("groups", [0, 4])
def test_layer_scale_wrong_number_of_channels(groups):
    with pytest.raises(ValueError, match=r"(?s)(?=.*\b12\b)(?=.*\b16\b)"):
        LayerScale(12, groups)(torch.zeros(5, 3, 16))
