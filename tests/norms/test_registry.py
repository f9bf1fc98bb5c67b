"""build_norm and the registry behind it."""

import inspect

import pytest
import torch

from pn_fairseq import norms
from pn_fairseq.norms import (
    NORMS,
    AdaNorm,
    BatchRenorm,
    DetachNorm,
    DynamicErf,
    DynamicTanh,
    GroupNorm,
    LayerNorm,
    LayerNormSimple,
    MaskedBatchNorm,
    MovingAverageBatchNorm,
    NoNorm,
    PowerNorm,
    PowerNormV,
    ProgressiveBatchNorm,
    RegularizedBatchNorm,
    RMSNorm,
    ScaleNorm,
    UnifiedNorm,
    build_norm,
)

from .helpers import CHANNELS, assert_close, random_batch, rng, state_of, train_step

CLASSES = {
    "layer": LayerNorm,
    "batch": MaskedBatchNorm,
    "power-v": PowerNormV,
    "power": PowerNorm,
    "batch-renorm": BatchRenorm,
    "mabn": MovingAverageBatchNorm,
    "unified": UnifiedNorm,
    "batch-reg": RegularizedBatchNorm,
    "prep-batch": ProgressiveBatchNorm,
    "none": NoNorm,
    "layer-simple": LayerNormSimple,
    "detach": DetachNorm,
    "ada": AdaNorm,
    "rms": RMSNorm,
    "scale": ScaleNorm,
    "group": GroupNorm,
    "dyt": DynamicTanh,
    "derf": DynamicErf,
}
EVERY_OPTION = {
    "eps": 1e-3,
    "affine": False,
    "alpha_fwd": 0.5,
    "alpha_bwd": 0.7,
    "layer_scale_groups": 4,
    "psi_warmup_updates": 3,
    "detach": "mean",
    "ada_k": 0.2,
    "ada_scale": 2.0,
    "groups": 3,
    "alpha_init": 0.3,
}


def test_every_norm_and_variant_is_public():
    """docs/api.md shows what is in ``__all__``."""
    classes = {each.__name__ for entry in NORMS.values() for each in (entry.cls, *entry.variants.values())}
    assert classes <= set(norms.__all__)


def test_names():
    assert set(NORMS) == set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_defaults(name):
    norm = build_norm(name, CHANNELS)
    assert type(norm) is CLASSES[name]
    assert all(getattr(norm, each).shape == (CHANNELS,) for each in norm.learned)


@pytest.mark.parametrize("name", CLASSES)
def test_every_norm_takes_every_option(name):
    norm = build_norm(name, CHANNELS, **EVERY_OPTION)
    assert type(norm) is CLASSES[name]
    assert norm.weight is None and norm.bias is None


@pytest.mark.parametrize("name", CLASSES)
def test_layer_scale_groups_arrive(name):
    x = torch.tensor(random_batch(rng(1))[0], dtype=torch.float32) * 0.01
    grouped = build_norm(name, CHANNELS, layer_scale_groups=4, psi_warmup_updates=1)
    assert not torch.allclose(grouped(x), build_norm(name, CHANNELS, psi_warmup_updates=1)(x), rtol=1e-2)


#: Norms that divide by no statistic, and one with a bound in the place of a summand.
WITHOUT_EPS = ("none", "dyt", "derf", "scale")


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in WITHOUT_EPS])
def test_eps_arrives(name):
    x = torch.tensor(random_batch(rng(1))[0], dtype=torch.float32) * 0.01
    changed = build_norm(name, CHANNELS, eps=0.1)(x)
    assert changed.abs().max() < build_norm(name, CHANNELS, psi_warmup_updates=1)(x).abs().max()


@pytest.mark.parametrize("name", ["power-v", "power"])
def test_alpha_fwd_arrives(name):
    x = torch.tensor(random_batch(rng(2))[0])
    norm = build_norm(name, CHANNELS, alpha_fwd=0.25, alpha_bwd=0.95)
    train_step(norm, x, None, x)
    assert_close(state_of(norm)["running_psi2"], 0.25 + 0.75 * x.pow(2).mean((0, 1)), 1e-6)


def test_alpha_fwd_arrives_at_batch_norm():
    x = torch.tensor(random_batch(rng(3))[0])
    norm = build_norm("batch", CHANNELS, alpha_fwd=0.25)
    train_step(norm, x, None, x)
    assert_close(state_of(norm)["running_mean"], 0.75 * x.mean((0, 1)), 1e-6)


def test_alpha_bwd_and_warmup_arrive_at_power_norm():
    x, _, dy = random_batch(rng(4), masked=False)
    norm = build_norm("power", CHANNELS, alpha_fwd=0.95, alpha_bwd=0.25)
    train_step(norm, x, None, dy)
    assert_close(state_of(norm)["nu"], 0.75 * (dy * x).mean((0, 1)), 5e-5)
    norm = build_norm("power", CHANNELS, psi_warmup_updates=1)
    train_step(norm, x, None, dy)
    assert_close(state_of(norm)["running_psi2"], (x**2).mean((0, 1)), 1e-6)


@pytest.mark.parametrize("name", ["", "rsm", "Power", "power_v", None])
def test_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError) as error:
        build_norm(name, CHANNELS)
    assert all(known in str(error.value) for known in CLASSES)
    assert str(name) in str(error.value)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("option", ["momentum", "alpha", "num_groups", "warmup"])
def test_unknown_option_lists_the_known_ones(name, option):
    with pytest.raises(ValueError) as error:
        build_norm(name, CHANNELS, **{option: 1})
    assert all(known in str(error.value) for known in EVERY_OPTION)
    assert option in str(error.value)


@pytest.mark.parametrize("name", CLASSES)
def test_values_are_checked(name):
    with pytest.raises(ValueError, match="5"):
        build_norm(name, CHANNELS, layer_scale_groups=5)
    with pytest.raises(ValueError, match="eps"):
        build_norm(name, CHANNELS, eps=-1.0)
    with pytest.raises(ValueError, match="0"):
        build_norm(name, 0)


@pytest.mark.parametrize("name", CLASSES)
def test_every_norm_may_be_told_the_number_of_updates(name):
    """The trainer calls a method of the model and does not look at the norms."""
    build_norm(name, CHANNELS).set_num_updates(3)


@pytest.mark.parametrize("name", NORMS)
def test_constructors_name_all_their_arguments(name):
    """Editors, ``inspect`` and the API page show them; an argument that is misspelt names the class that was called."""
    entry = NORMS[name]
    for cls in {entry.cls, *entry.variants.values()}:
        signature = inspect.signature(cls)
        assert set(signature.parameters) == entry.options | {"num_features"}
        for option, parameter in signature.parameters.items():
            assert parameter.kind == parameter.POSITIONAL_OR_KEYWORD
            assert option in ("num_features", "process_group") or parameter.annotation is not parameter.empty
        owner = next(each for each in cls.__mro__ if "__init__" in vars(each))
        with pytest.raises(TypeError, match=rf"{owner.__name__}.*'layer_scale_group'"):
            cls(8, layer_scale_group=2)
        options = {option: parameter.default for option, parameter in list(signature.parameters.items())[1:]}
        changed = options | {"eps": 1e-3, "affine": False, "layer_scale_groups": 2, "batch_first": True}
        norm = cls(8, **changed | ({"sync": True, "alpha_fwd": 0.7} if "sync" in options else {}))
        assert (norm.eps, norm.affine, norm.layer_scale_groups, norm.batch_first) == (1e-3, False, 2, True)
        assert "sync" not in options or (norm.sync, norm.alpha_fwd) == (True, 0.7)
