"""A training step in C++ is the step that the norm's passes compute, to the bit."""

import pickle
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing

from pn_fairseq.kernels.ops import COMPILED
from pn_fairseq.norms import ignoring, set_loss_scale
from pn_fairseq.norms.power import PowerNorm
from pn_fairseq.testing.helpers import (
    CHANNELS,
    assert_state_unchanged,
    cases,
    checkpointed,
    rng,
    state_of,
    tensors,
)

pytestmark = pytest.mark.skipif(not COMPILED, reason="there are no C++ kernels")

NORMS = [case for case in cases() if getattr(case.cls, "whole_step", None)]


def backwards(norm, call, scale=1.0, passes=1):
    """A step by ``call``, whose graph serves so many backward ``passes``."""
    x, mask, dy = tensors(rng(7))
    leaf = x.requires_grad_()
    y = call(leaf, mask)
    for number in range(passes):
        y.backward(dy * scale, retain_graph=number + 1 < passes)
    return [y.detach(), leaf.grad]


def ordinary(norm):
    return backwards(norm, norm)


def retained(norm):
    return backwards(norm, norm, passes=3)


def ignored(norm):
    def call(x, mask):
        with ignoring(norm):
            return norm(x, mask)

    return backwards(norm, call)


def replaced(norm):
    def call(x, mask):
        y = norm(x, mask)
        norm.reset_running_stats()
        return y

    return backwards(norm, call)


def scaled_late(norm):
    """The first loss scale comes after the forward."""

    def call(x, mask):
        y = norm(x, mask)
        set_loss_scale(norm, SimpleNamespace(scale=lambda tensor: tensor * 8.0))
        return y

    return backwards(norm, call, scale=8.0)


def scaled_by_a_number(norm):
    set_loss_scale(norm, 4.0)
    return backwards(norm, norm, scale=4.0)


def checkpointed_twice(norm):
    """The second recomputation runs after the first backward has moved the state."""
    call = checkpointed(norm, "non-reentrant")
    results = []
    for seed in (1, 2):
        x, mask, dy = tensors(rng(seed))
        results.append((x.requires_grad_(), call(x, mask), dy))
    for _, y, dy in results:
        y.backward(dy)
    return [x.grad for x, _, _ in results]


def not_finite(norm):
    x, mask, dy = tensors(rng(7))
    x[-1, -1, 5] = torch.inf
    norm(x.requires_grad_(), mask).backward(dy)
    return []


def without_parameters(norm):
    norm.weight = norm.bias = None
    return backwards(norm, norm)


def frozen_parameters(norm):
    norm.requires_grad_(False)
    return backwards(norm, norm)


SCENES = (
    ordinary,
    retained,
    ignored,
    replaced,
    scaled_late,
    scaled_by_a_number,
    checkpointed_twice,
    not_finite,
    without_parameters,
    frozen_parameters,
)


def results_of(case, scene, collecting):
    norm = case.trained(4)
    norm.collecting = collecting
    results = scene(norm)
    results += backwards(norm, norm)
    results += [parameter.grad for parameter in norm.parameters()]
    return [*results, *state_of(norm).values(), *norm.diagnostics().values()]


@pytest.mark.parametrize("collecting", [False, True], ids=["", "with diagnostics"])
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("case", NORMS, ids=str)
def test_a_step_in_cpp_is_that_of_the_passes(case, scene, collecting, monkeypatch):
    in_cpp = results_of(case, scene, collecting)
    monkeypatch.setattr("pn_fairseq.kernels.ops.COMPILED", {})
    by_passes = results_of(case, scene, collecting)
    for ours, expected in zip(in_cpp, by_passes, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", NORMS, ids=str)
def test_a_norm_in_another_process_trains_on_when_the_state_is_replaced_here(case):
    """The processes share the memory of the buffers, as in Hogwild."""
    norm = case.build()
    twin = pickle.loads(ForkingPickler.dumps(norm))
    norm.reset_running_stats()
    backwards(twin, twin)
    assert twin.num_batches_tracked == norm.num_batches_tracked == 1


@pytest.mark.parametrize("case", NORMS, ids=str)
def test_eager_training_runs_in_cpp(case):
    x, mask, _ = tensors(rng(1))
    assert "Train" in case.trained()(x.requires_grad_(), mask).grad_fn.name()


def test_a_norm_that_overrides_a_pass_computes_by_its_own():
    class Still(PowerNorm):
        def update(self, step, state):
            pass

    norm = Still(CHANNELS)
    before = state_of(norm)
    backwards(norm, norm)
    assert_state_unchanged(norm, before)
