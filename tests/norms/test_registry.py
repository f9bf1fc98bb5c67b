"""build_norm and the registry behind it; wrong arguments raise an error at once, one line which
names the values.
"""

import inspect
import subprocess
import sys

import pytest
import torch
import yaml

from pn_fairseq.kernels import using
from pn_fairseq.norms import (
    NORMS,
    VARIANTS,
    ChannelNorm,
    LayerScale,
    build_norm,
    register_norm,
    registry,
)

from ..tables import rows
from .helpers import CHANNELS

EVERY_OPTION = dict(
    eps=1e-3,
    affine=False,
    alpha_fwd=0.5,
    alpha_bwd=0.7,
    layer_scale_groups=4,
    psi_warmup_updates=3,
    detach="mean",
    ada_k=0.2,
    ada_scale=2.0,
    groups=3,
    alpha_init=0.3,
)


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_takes_every_option_and_variant(name):
    entry = NORMS[name]
    norm = build_norm(name, CHANNELS, **EVERY_OPTION)
    assert type(norm) is entry.cls
    assert type(build_norm(name, CHANNELS)) is entry.cls
    assert norm.weight is None
    assert norm.bias is None
    for variant in VARIANTS:
        norm = build_norm(name, CHANNELS, variant, **EVERY_OPTION)
        assert type(norm) is entry.variants.get(variant, entry.cls)
    assert VARIANTS == ("paper", "release")


@pytest.mark.parametrize("name", ["", "rsm", "Power", "power_v", None])
def test_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError) as error:
        build_norm(name, CHANNELS)
    assert all(known in str(error.value) for known in NORMS)
    assert str(name) in str(error.value)


@pytest.mark.parametrize("option", ["momentum", "num_groups"])
def test_unknown_option_lists_the_known_ones(option):
    with pytest.raises(ValueError) as error:
        build_norm("layer", CHANNELS, **{option: 1})
    assert all(known in str(error.value) for known in EVERY_OPTION)
    assert option in str(error.value)


def test_a_name_that_is_taken_is_refused(monkeypatch):
    monkeypatch.setattr(registry, "NORMS", dict(NORMS))
    own, other = (type(name, (ChannelNorm,), {}) for name in ("Own", "Other"))
    for _ in range(2):  # again where its module is loaded again
        register_norm("own", "own", "")(own)
    for name, short in (("own", "other"), ("other", "own"), ("power", "other")):
        with pytest.raises(ValueError, match="is taken by"):
            register_norm(name, short, "")(other)


@pytest.mark.parametrize("name", NORMS)
def test_constructors_name_all_their_arguments(name):
    """Editors, ``inspect`` and the API page show them; an argument that is misspelt names the
    class that was called.
    """
    entry = NORMS[name]
    for cls in {entry.cls, *entry.variants.values()}:
        signature = inspect.signature(cls)
        assert set(signature.parameters) == {*entry.options, "num_features"}
        for option, parameter in signature.parameters.items():
            assert parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if option not in ("num_features", "process_group"):
                assert parameter.annotation is not parameter.empty
        with pytest.raises(TypeError, match=rf"{cls.__name__} .*'layer_scale_group'"):
            cls(8, layer_scale_group=2)
        if "alpha_fwd" in entry.options:
            with pytest.raises(
                TypeError, match="'momentum'; alpha_fwd=0.9 is torch's momentum=0.1"
            ):
                cls(8, momentum=0.1)
        options = {name: parameter.default for name, parameter in signature.parameters.items()}
        del options["num_features"]
        has_state = "sync" in options
        options |= {"eps": 1e-3, "affine": False, "layer_scale_groups": 2, "batch_first": True}
        if has_state:
            options |= {"sync": True, "alpha_fwd": 0.7}
        norm = cls(8, **options)
        assert norm.eps == 1e-3
        assert norm.affine is False
        assert norm.layer_scale_groups == 2
        assert norm.batch_first is True
        if has_state:
            assert norm.sync is True
            assert norm.alpha_fwd == 0.7


# Arguments that do not fit.

#: Norm, option, its value, and what the message says after OPTION=VALUE.
MISTAKES = """
power        | psi_warmup_updates | -1        | must be a whole number of at least 0
power        | eps                | 0.0       | must be a number greater than 0
power        | eps                | .nan      | must be a number greater than 0
detach       | detach             | men       | must be mean, std or mean,std
detach       | detach             | ''        | must be
detach       | detach             | mean,mean | must be
ada          | ada_k              | -0.1      | must be a number of at least 0
ada          | ada_scale          | 0.0       | must be a number greater than 0
group        | groups             | 0         | must be a whole number of at least 1
dyt          | alpha_init         | -1        | must be a number greater than 0
derf         | alpha_init         | .nan      | must be a number greater than 0
batch-renorm | renorm_r_max       | -1        | must be a number of at least 1
batch-renorm | renorm_d_max       | -1        | must be a number of at least 0
batch-reg    | lambda_mean        | -1        | must be a number of at least 0
batch-reg    | lambda_var         | -1        | must be a number of at least 0
mabn         | window             | -1        | must be a whole number of at least 1
"""
ALPHAS = ["power | alpha_fwd", "power | alpha_bwd", "power-v | alpha_fwd", "batch | alpha_fwd"]
for alpha in ALPHAS:
    for value in ("0.0", "1.0", "1.5", ".nan"):
        MISTAKES += f"{alpha} | {value} | must lie strictly between 0 and 1\n"


@pytest.mark.parametrize(("name", "option", "value", "remedy"), rows(MISTAKES))
def test_options_that_do_not_fit(name, option, value, remedy):
    value = yaml.safe_load(value)
    with pytest.raises(ValueError) as error:
        build_norm(name, 12, **{option: value})
    assert f"{option}={value!r} {remedy}" in str(error.value)
    assert "\n" not in str(error.value)


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


def test_groups_that_do_not_divide_the_channels():
    with pytest.raises(ValueError, match="num_features=12 is not divisible by groups=5"):
        build_norm("group", 12, groups=5)


@pytest.mark.parametrize("name", NORMS)
def test_values_that_every_norm_checks(name):
    with pytest.raises(ValueError, match="num_features=12 is not divisible by groups=5"):
        build_norm(name, 12, layer_scale_groups=5)
    with pytest.raises(ValueError, match="eps=-1.0"):
        build_norm(name, 12, eps=-1.0)
    with pytest.raises(ValueError, match="num_features=0"):
        build_norm(name, 0)


def test_a_bias_without_a_weight_is_refused():
    with pytest.raises(TypeError, match="Biased: learned = .* is a bias without a weight"):
        type("Biased", (NORMS["batch"].cls,), {"learned": ("bias",)})


def test_a_norm_with_statistics_may_have_a_gain_alone():
    norm = type("GainOnly", (NORMS["batch"].cls,), {"learned": ("weight",)})(12)
    with using("reference"):
        norm(torch.randn(5, 3, 12)).square().sum().backward()
    assert norm.bias is None and norm.weight.grad.any()


@pytest.mark.ci
def test_norms_without_docstrings():
    script = "import pn_fairseq.norms as n; assert n.convert_norms.__doc__ is None"
    subprocess.run([sys.executable, "-OO", "-c", script + "; n.build_norm('power', 4)"], check=True)


@pytest.mark.parametrize("groups", [0, 4])
def test_layer_scale_wrong_number_of_channels(groups):
    with pytest.raises(ValueError, match=r"(?s)(?=.*\b12\b)(?=.*\b16\b)"):
        LayerScale(12, groups)(torch.zeros(5, 3, 16))
