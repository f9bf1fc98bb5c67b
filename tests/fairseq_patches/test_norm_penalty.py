"""The penalty of RBN in fairseq's training step: as large as if the criterion had added it to its
loss.
"""

import pytest
import torch
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from fairseq.tasks.fairseq_task import FairseqTask
from torch.utils.checkpoint import checkpoint

from pn_fairseq import fairseq_patches
from pn_fairseq.norms import build_norm
from pn_fairseq.testing.helpers import assert_close

CHANNELS = 6
OPTIONS = {"lambda_mean": 3.0, "lambda_var": 2.0, "affine": False}


class Model(torch.nn.Module):
    """Learned activations, and a norm behind them."""

    def __init__(self, x, recomputed=False, sync=False):
        super().__init__()
        self.x = torch.nn.Parameter(x.clone())
        self.norm = build_norm("batch-reg", CHANNELS, sync=sync, **OPTIONS)
        self.recomputed = recomputed

    def forward(self):
        return (
            checkpoint(self.norm, self.x, use_reentrant=True)
            if self.recomputed
            else self.norm(self.x)
        )

    def set_num_updates(self, num_updates):
        self.norm.set_num_updates(num_updates)


class Criterion(torch.nn.Module):
    """A sum over tokens, as fairseq's."""

    def forward(self, model, sample):
        return (model() * sample).sum(), sample.size(0), {}


class Optimizer:
    """What fairseq's fp16 optimizer does with a loss."""

    def __init__(self, scale):
        self.scaler = DynamicLossScaler(init_scale=scale)

    def backward(self, loss):
        self.scaler.scale(loss).backward()


def step(model, sample, scale=1.0, ignore_grad=False):
    FairseqTask(None).train_step(sample, model, Criterion(), Optimizer(scale), 1, ignore_grad)


def loss_and_penalty(x, samples, mean=0.0, var=1.0):
    """With running statistics (mean, var), of one batch."""
    y = torch.nn.functional.batch_norm(x, None, None, training=True)
    own_mean = x.mean(0)
    own_var = x.var(0, correction=0)
    gap = (own_var + 1e-5).sqrt() - (torch.as_tensor(var) + 1e-5).sqrt()
    return (y * samples).sum() + 3 * (own_mean - mean).square().sum() + 2 * gap.square().sum()


@pytest.fixture(autouse=True)
def patches():
    fairseq_patches.apply()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(9, CHANNELS, generator=generator) + 1
    return x, torch.randn(9, CHANNELS, generator=generator)


def expected_gradient(x, sample, **statistics):
    x = x.double().requires_grad_()
    return torch.autograd.grad(loss_and_penalty(x, sample.double(), **statistics), x)[0].float()


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_gradient_is_that_of_loss_and_penalty_times_the_loss_scale(batch, scale, recomputed):
    x, sample = batch
    model = Model(x, recomputed)
    step(model, sample, scale)
    assert_close(model.x.grad, scale * expected_gradient(x, sample))


def test_a_batch_that_is_ignored_has_no_penalty(batch):
    x, sample = batch
    model = Model(x)
    step(model, sample, ignore_grad=True)
    assert not model.x.grad.any()
    step(model, sample)
    assert_close(model.x.grad, expected_gradient(x, sample))


def test_every_batch_of_an_update_has_its_penalty(batch):
    """--update-freq 2.

    The second one is measured from the running statistics that hold the first.
    """
    x, sample = batch
    model = Model(x)
    for _ in range(2):
        step(model, sample)
    statistics = {"mean": 0.05 * x.mean(0), "var": 0.95 + 0.05 * x.var(0)}
    expected = expected_gradient(x, sample) + expected_gradient(x, sample, **statistics)
    assert_close(model.x.grad, expected)
