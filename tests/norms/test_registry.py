"""build_norm and the registry behind it."""

import inspect

import pytest

from pn_fairseq.norms import NORMS, VARIANTS, build_norm

from .helpers import CHANNELS

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


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_takes_every_option_and_variant(name):
    norm = build_norm(name, CHANNELS, **EVERY_OPTION)
    assert type(norm) is type(build_norm(name, CHANNELS)) is NORMS[name].cls
    assert norm.weight is None and norm.bias is None
    for variant in VARIANTS:
        assert type(build_norm(name, CHANNELS, variant, **EVERY_OPTION)) is NORMS[name].variant(variant)
        assert variant in NORMS[name].variants or NORMS[name].variant(variant) is NORMS[name].cls
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


@pytest.mark.parametrize("name", NORMS)
def test_constructors_name_all_their_arguments(name):
    """Editors, ``inspect`` and the API page show them; an argument that is misspelt names the class that was called."""
    entry = NORMS[name]
    for cls in {entry.cls, *entry.variants.values()}:
        signature = inspect.signature(cls)
        assert set(signature.parameters) == {*entry.options, "num_features"}
        for option, parameter in signature.parameters.items():
            assert parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            assert option in ("num_features", "process_group") or parameter.annotation is not parameter.empty
        with pytest.raises(TypeError, match=rf"{cls.__name__} .*'layer_scale_group'"):
            cls(8, layer_scale_group=2)
        options = {option: parameter.default for option, parameter in list(signature.parameters.items())[1:]}
        changed = options | {"eps": 1e-3, "affine": False, "layer_scale_groups": 2, "batch_first": True}
        norm = cls(8, **changed | ({"sync": True, "alpha_fwd": 0.7} if "sync" in options else {}))
        assert (norm.eps, norm.affine, norm.layer_scale_groups, norm.batch_first) == (1e-3, False, 2, True)
        assert "sync" not in options or (norm.sync, norm.alpha_fwd) == (True, 0.7)
