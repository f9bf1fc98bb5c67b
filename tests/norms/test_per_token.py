"""The norms of single tokens: formulas in float64, identities between them, released variants,
options.
"""

import pytest
import torch
import torch.nn.functional as F

from pn_fairseq.norms import NORMS, GroupNorm, LayerNorm, ScaleNorm, build_norm

from .helpers import (
    CHANNELS,
    STATEFUL,
    affine_of,
    assert_close,
    assert_steps_close,
    assert_training_follows,
    random_batch,
    randomize_affine,
    rng,
    to_tensor,
    train_step,
)
from .oracle import FACTS, PerTokenOracle

NAMES = [name for name in NORMS if name not in STATEFUL]
#: Name, options of build_norm, and the same for the oracle.
CASES = []
for name in NAMES:
    for options, for_oracle in FACTS[name].settings:
        CASES.append((name, options, for_oracle))


@pytest.mark.every_implementation
@pytest.mark.parametrize(("layer_scale", "eps"), [(0, 0.3), (4, 1e-5)])
@pytest.mark.parametrize(("name", "options", "for_oracle"), CASES, ids=str)
def test_follows_the_formulas(name, options, for_oracle, layer_scale, eps):
    """In training and in evaluation."""
    norm = build_norm(name, CHANNELS, eps=eps, layer_scale_groups=layer_scale, **options)
    given = affine_of(randomize_affine(norm)) | for_oracle
    oracle = PerTokenOracle(CHANNELS, name, eps=eps, groups=layer_scale, **given)
    for dtype, rtol in ((torch.float32, 1e-5), (torch.float64, 1e-9)):
        steps = [random_batch(rng(1), scale=1.5)]
        assert_training_follows(norm.to(dtype).train(), oracle, steps, rtol, dtype)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("detach", "ada")])
def test_gradient_is_the_derivative(name):
    """By finite differences; of detach and ada it is not."""
    norm = randomize_affine(build_norm(name, 6, groups=2)).double()
    names = list(dict(norm.named_parameters()))

    def run(x, *parameters):
        return torch.func.functional_call(norm, dict(zip(names, parameters, strict=True)), (x,))

    x = torch.tensor(random_batch(rng(2), (3, 6), masked=False)[0], requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *norm.parameters()))
    if name not in ("none", "layer"):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("norm", "layer"),
    [
        (LayerNorm(CHANNELS, eps=1e-3), torch.nn.LayerNorm(CHANNELS, eps=1e-3)),
        (GroupNorm(CHANNELS, groups=1, eps=1e-3), torch.nn.LayerNorm(CHANNELS, eps=1e-3)),
        (build_norm("rms", CHANNELS, eps=0.1), torch.nn.RMSNorm(CHANNELS, eps=0.1)),
        (GroupNorm(CHANNELS, groups=2), torch.nn.GroupNorm(2, CHANNELS)),
        (GroupNorm(CHANNELS, groups=4), torch.nn.GroupNorm(4, CHANNELS)),
    ],
)
def test_norms_are_those_of_torch(norm, layer):
    """Tokens are what torch's GroupNorm takes for samples, so it is given each sentence by
    itself.
    """
    layer.load_state_dict(randomize_affine(norm).state_dict())
    x, _, dy = random_batch(rng(4), (7, CHANNELS), masked=False)
    assert_steps_close(train_step(norm, x, None, dy), train_step(layer, x, None, dy), 1e-5)
    x = to_tensor(x[:6].reshape(2, 3, CHANNELS))
    mask = torch.zeros(3, 2, dtype=torch.bool)
    expected = layer(x.flatten(0, 1)).view(2, 3, CHANNELS)
    assert_close(norm(x, mask), expected, 1e-5)


def test_scale_norm_divides_by_no_less_than_eps():
    norm = ScaleNorm(CHANNELS, eps=0.5).double()
    x = torch.tensor(random_batch(rng(6), (5, CHANNELS), masked=False)[0]) * 1e-3
    x[0] = 0
    x.requires_grad_()
    y = norm(x)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(y, norm.g * x / 0.5)
    torch.testing.assert_close(x.grad, torch.full_like(x, norm.g.item() / 0.5))
    assert_close(norm.g, [CHANNELS**0.5], 1e-6)


def released_ada(x):
    z = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)
    return 2.0 * (z - z * (z / 5).detach())


def released_rms(x):
    return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-8)


RELEASED = {"ada": released_ada, "rms": released_rms}


@pytest.mark.every_implementation
@pytest.mark.parametrize("name", RELEASED)
def test_released_variants(name):
    """The variants of Xu et al. (2019) and of Zhang & Sennrich (2019), differentiated by torch;
    also a token of zeros.
    """
    norm = build_norm(name, CHANNELS, "release", ada_k=0.2, ada_scale=2.0)
    assert type(norm) is NORMS[name].variants["release"]
    assert type(norm) is not NORMS[name].cls
    x, _, dy = random_batch(rng(8), masked=False)
    leaf = torch.tensor(x, requires_grad=True)
    y = RELEASED[name](leaf)
    y.backward(torch.tensor(dy))
    actual = train_step(norm, x, None, dy, torch.float64)
    assert_close(actual["y"], y, 1e-9)
    assert_close(actual["dx"], leaf.grad, 1e-9)
    x[0, 0] = 0
    actual = train_step(norm, x, None, dy)
    assert not actual["y"][0, 0].any()
    assert abs(actual["dx"]).max() < float("inf")


@pytest.mark.parametrize("name", RELEASED)
def test_released_variants_of_one_channel(name):
    x, _, dy = random_batch(rng(9), (3, 2, 1), masked=False)
    actual = train_step(build_norm(name, 1, "release"), x, None, dy)
    assert all(abs(value).max() < float("inf") for value in actual.values())


@pytest.mark.parametrize("name", NAMES)
def test_an_infinity_stays_in_its_token(name):
    norm = build_norm(name, CHANNELS)
    x, _, dy = random_batch(rng(10), masked=False)
    clean = train_step(norm, x, None, dy)
    x[1, 2, 3] = float("inf")
    faulty = train_step(norm, x, None, dy)
    for key in ("y", "dx"):
        faulty[key][1, 2] = clean[key][1, 2]
        assert_close(faulty[key], clean[key], 1e-6)


@pytest.mark.parametrize(("name", "function"), [("dyt", torch.tanh), ("derf", torch.erf)])
def test_squashing_is_as_precise_as_that_of_torch(name, function):
    """Relative to each single value: small ones pass nearly unchanged, large ones saturate at 1."""
    x = torch.cat([torch.logspace(-30, 1.5, 4000), torch.linspace(0, 12, 4000)]).repeat(2)
    x[8000:] *= -1
    norm = build_norm(name, 1, alpha_init=1.0)
    leaf = x[:, None].clone().requires_grad_()
    y = norm(leaf)
    y.sum().backward()
    wide = x.double().requires_grad_()
    exact = function(wide)
    exact.sum().backward()
    torch.testing.assert_close(y.flatten().double(), exact, rtol=50 * 2**-24, atol=0)
    grad = leaf.grad.flatten().double()
    torch.testing.assert_close(grad, wide.grad, rtol=100 * 2**-24, atol=100 * 2**-24)


def test_options_show():
    assert "detach=('std',)" in repr(build_norm("detach", CHANNELS, detach=["std"]))
    assert "ada_k=0.2, ada_scale=2.0" in repr(build_norm("ada", CHANNELS, ada_k=0.2, ada_scale=2))
    assert "groups=3" in repr(build_norm("group", CHANNELS, groups=3))
    assert "alpha_init=0.8" in repr(build_norm("derf", CHANNELS, alpha_init=0.8))


def test_nothing_is_what_none_does():
    x = to_tensor(random_batch(rng(11))[0])
    assert torch.equal(build_norm("none", CHANNELS)(x), x)
    expected = F.rms_norm(x, (CHANNELS,), eps=1e-5)
    assert_close(build_norm("none", CHANNELS, layer_scale_groups=1)(x), expected, 1e-6)
