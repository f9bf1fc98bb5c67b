"""Statistics re-estimated for given weights: against NumPy, against torch's update_bn, and what is left alone."""

import numpy as np
import pytest
import torch
from torch import nn

from pn_fairseq.norms import NORMS, MaskedBatchNorm, build_norm, recalibrating
from pn_fairseq.norms.base import running_norms

from .helpers import (
    CHANNELS,
    STATEFUL,
    assert_close,
    assert_state_unchanged,
    random_batch,
    randomize_affine,
    real_tokens,
    rng,
    state_of,
    to_mask,
    train_step,
)

EPS = 1e-5
ALL = [(name, variant) for name in STATEFUL for variant in ("paper", *NORMS[name].variants)]


class Stack(nn.Module):
    """Two norms with a layer between them, as in a transformer: the second one's input depends on the first one."""

    def __init__(self, name, variant="paper"):
        super().__init__()
        self.first = randomize_affine(build_norm(name, CHANNELS, variant, psi_warmup_updates=2), 1)
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(CHANNELS, CHANNELS)
        self.second = randomize_affine(build_norm(name, CHANNELS, variant, psi_warmup_updates=2), 2)

    def forward(self, x, mask=None):
        return self.second(self.linear(self.dropout(self.first(x, mask))), mask)


def trained(name, variant="paper", steps=4):
    """A stack that has been trained beyond its psi warm-up, in training mode."""
    model = Stack(name, variant).train()
    for x, mask, dy in batches(steps, seed=7):
        model(tensor(x), to_mask(mask)).backward(tensor(dy))
    return model


def batches(number, seed=0):
    """Batches of different lengths, scales and numbers of real tokens."""
    generator = rng(seed)
    return [random_batch(generator, (3 + 2 * n, 3, CHANNELS), scale=1.0 + n) for n in range(number)]


def tensor(values):
    return torch.tensor(values, dtype=torch.float32)


def recalibrate(model, data):
    with torch.no_grad(), recalibrating(model):
        for x, mask, _ in data:
            model(tensor(x), to_mask(mask))


def statistics(h, name):
    """Statistics of one batch of real tokens (N, C), and the batch normalized with them."""
    if name == "batch":
        normalized = (h - h.mean(0)) / np.sqrt(h.var(0) + EPS)
        return {"running_mean": h.mean(0), "running_var": h.var(0, ddof=1)}, normalized
    psi2 = (h**2).mean(0)
    return {"running_psi2": psi2}, h / np.sqrt(psi2 + EPS)


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_the_mean_over_the_batches_of_the_statistics_of_each(name, variant):
    model = trained(name, variant)
    weight, bias = (value.detach().double().numpy() for value in (model.linear.weight, model.linear.bias))
    gain, shift = (value.detach().double().numpy() for value in (model.first.weight, model.first.bias))
    data = batches(5)
    expected = []
    for x, mask, _ in data:
        first, normalized = statistics(x[real_tokens(x.shape, mask)], name)
        second, _ = statistics((gain * normalized + shift) @ weight.T + bias, name)
        expected.append((first, second))

    recalibrate(model, data)
    for place, norm in enumerate((model.first, model.second)):
        for key in expected[0][place]:
            mean = np.mean([both[place][key] for both in expected], axis=0)
            assert_close(norm.get_buffer(key), mean, what=f"norm {place}, {key}")


def test_batch_norm_as_update_bn():
    own = nn.Sequential(MaskedBatchNorm(CHANNELS), nn.Linear(CHANNELS, CHANNELS), nn.ReLU(), MaskedBatchNorm(CHANNELS))
    theirs = nn.Sequential(nn.BatchNorm1d(CHANNELS), own[1], nn.ReLU(), nn.BatchNorm1d(CHANNELS))
    generator = rng(3)
    data = [tensor(generator.normal(n, 1 + n, size=(5 + 3 * n, CHANNELS))) for n in range(4)]
    torch.optim.swa_utils.update_bn(data, theirs)
    with torch.no_grad(), recalibrating(own):
        for batch in data:
            own(batch)
    for place in (0, 3):
        assert_close(own[place].running_mean, theirs[place].running_mean)
        assert_close(own[place].running_var, theirs[place].running_var)
    assert_close(own.eval()(data[0]), theirs.eval()(data[0]).detach())


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_all_else_is_as_it_was(name, variant):
    model = trained(name, variant)
    model.linear.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    with torch.no_grad(), recalibrating(model) as norms:
        assert norms == [model.first, model.second] == running_norms(model)
        assert all(norm.training and norm.recalibrating for norm in norms)
        assert not model.dropout.training and not model.training
        for x, mask, _ in batches(3):
            model(tensor(x), to_mask(mask))
    assert [module.training for module in model.modules()] == modes
    assert not any(norm.recalibrating for norm in norms)
    for key, value in model.state_dict().items():
        estimated = "running" in key
        assert torch.equal(value, before[key]) != estimated, key


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_the_order_of_batches_and_the_old_statistics_have_no_influence(name, variant):
    model = trained(name, variant)
    data = batches(4)
    recalibrate(model, data)
    once = state_of(model)
    for norm in running_norms(model):
        for key in once:
            if key.startswith("first.running"):
                norm.get_buffer(key.removeprefix("first.")).fill_(float("nan"))
    recalibrate(model, data[::-1])
    for key, value in state_of(model).items():
        assert_close(value, once[key], what=key)


def test_batches_count_equally_and_those_without_a_real_token_not_at_all():
    norm = build_norm("power", CHANNELS)
    ones, twos = torch.ones(40, CHANNELS), torch.full((2, CHANNELS), 2.0)
    with torch.no_grad(), recalibrating(norm):
        norm(ones)
        norm(torch.full((3, CHANNELS), 100.0), torch.ones(3, dtype=torch.bool))
        norm(twos)
    assert_close(norm.running_psi2, np.full(CHANNELS, (1 + 4) / 2))


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_training_goes_on_after_it_and_not_in_the_warmup(name, variant):
    """The forwards of the recalibration leave nothing behind: the next step is that of a copy with the same state."""
    model = trained(name, variant)
    recalibrate(model, batches(3))
    copy = Stack(name, variant).train()
    copy.load_state_dict(model.state_dict())
    x, mask, dy = random_batch(rng(9))
    step, expected = (train_step_of(each, x, mask, dy) for each in (model, copy))
    assert all(torch.equal(step[key], expected[key]) for key in expected)
    if name == "power":
        y = model.first(tensor(x))
        before_step = build_norm(name, CHANNELS, variant)
        before_step.load_state_dict(copy.first.state_dict())
        assert torch.equal(y, before_step.train()(tensor(x)))  # no warm-up at all: the running psi divides


def train_step_of(model, x, mask, dy):
    torch.manual_seed(1)
    model(tensor(x), to_mask(mask)).backward(tensor(dy))
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", STATEFUL)
def test_an_exception_brings_the_old_statistics_back(name):
    model = trained(name)
    before, modes = state_of(model), [module.training for module in model.modules()]
    with pytest.raises(KeyError), torch.no_grad(), recalibrating(model):
        model(torch.randn(4, 3, CHANNELS))
        raise KeyError("no such file")
    assert_state_unchanged(model, before)
    assert [module.training for module in model.modules()] == modes
    assert not model.first.recalibrating


@pytest.mark.parametrize("name", STATEFUL)
def test_a_norm_that_no_batch_reaches_keeps_its_statistics(name):
    model = trained(name)
    before = state_of(model)
    with torch.no_grad(), recalibrating(model):
        model.first(torch.randn(4, 3, CHANNELS))
        model.second(torch.full((4, 3, CHANNELS), float("nan")))
    assert_state_unchanged(model.second, {key[7:]: value for key, value in before.items() if key.startswith("second.")})
    running = next(key for key in before if key.startswith("first.running"))
    assert not torch.equal(state_of(model)[running], before[running])


def test_forwards_that_keep_a_graph_change_nothing_more():
    """Without torch.no_grad() and with a backward, nu stays, too."""
    norm = build_norm("power", CHANNELS).train()
    x, mask, dy = random_batch(rng(4))
    train_step(norm, x, mask, dy)
    nu = norm.nu.clone()
    with recalibrating(norm):
        train_step(norm, 3 * x, mask, dy)
    assert torch.equal(norm.nu, nu) and nu.abs().max() > 0


def test_a_model_without_running_statistics():
    model = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), build_norm("layer", CHANNELS))
    with recalibrating(model) as norms:
        model(torch.randn(2, 3, CHANNELS))
    assert norms == []
