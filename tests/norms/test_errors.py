"""Wrong arguments raise an error at once, one line which names the values."""

import math

import pytest
import torch

from pn_fairseq.norms import NORMS, LayerScale, build_norm

ALPHAS = [("power", "alpha_fwd"), ("power", "alpha_bwd"), ("power-v", "alpha_fwd"), ("batch", "alpha_fwd")]
MISTAKES = [
    ("power", {"psi_warmup_updates": -1}, "psi_warmup_updates=-1 must be a whole number of at least 0"),
    ("power", {"eps": 0.0}, "eps=0.0 must be a number greater than 0"),
    ("power", {"eps": math.nan}, "eps=nan must be a number greater than 0"),
    ("detach", {"detach": "men"}, "detach='men' must be mean, std or mean,std"),
    ("detach", {"detach": ""}, "detach='' must be"),
    ("detach", {"detach": "mean,mean"}, "detach='mean,mean' must be"),
    ("ada", {"ada_k": -0.1}, "ada_k=-0.1 must be a number of at least 0"),
    ("ada", {"ada_scale": 0.0}, "ada_scale=0.0 must be a number greater than 0"),
    ("group", {"groups": 5}, "num_features=12 is not divisible by groups=5"),
    ("group", {"groups": 0}, "groups=0 must be a whole number of at least 1"),
    ("dyt", {"alpha_init": -1}, "alpha_init=-1 must be a number greater than 0"),
    ("derf", {"alpha_init": math.nan}, "alpha_init=nan must be a number greater than 0"),
    *(("batch-renorm", {option: -1}, f"{option}=-1") for option in ("renorm_r_max", "renorm_d_max")),
    *(("batch-reg", {option: -1}, f"{option}=-1") for option in ("lambda_mean", "lambda_var")),
    ("mabn", {"window": -1}, "window=-1"),
    *(
        (name, {option: alpha}, f"{option}={alpha} must lie strictly between 0 and 1")
        for name, option in ALPHAS
        for alpha in (0.0, 1.0, 1.5, math.nan)
    ),
]


@pytest.mark.parametrize(("name", "options", "message"), MISTAKES)
def test_options_that_do_not_fit(name, options, message):
    with pytest.raises(ValueError) as error:
        build_norm(name, 12, **options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": -1}, "groups=-1 must be a whole number of at least 0"),
        ({"groups": 24}, "num_features=12 is not divisible by groups=24"),
        ({"groups": 4, "eps": 0.0}, "eps=0.0 must be a number greater than 0"),
        ({"groups": 0, "num_features": -3}, "num_features=-3 must be a whole number of at least 1"),
    ],
)
def test_arguments_of_layer_scale_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        LayerScale(**{"num_features": 12, **arguments})


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
