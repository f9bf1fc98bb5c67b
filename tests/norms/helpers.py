"""The helpers of the shared suite, and what compares a norm with its oracle."""

import numpy as np
import torch

from pn_fairseq.norms import NORMS, RunningNorm
from pn_fairseq.testing.helpers import *  # noqa: F403
from pn_fairseq.testing.helpers import (
    CHANNELS,
    assert_close,
    random_batch,
    rng,
    state_of,
    train_step,
)

from .oracle import oracle_state

STATEFUL = tuple(name for name, entry in NORMS.items() if issubclass(entry.cls, RunningNorm))


def affine_of(norm):
    """The keyword arguments that give an oracle the module's parameters."""
    values = {}
    for name, parameter in norm.named_parameters():
        values[name] = parameter.detach().double().numpy()
    return values


def oracle_step(oracle, x, mask=None, dy=None):
    y, ctx = oracle.forward(x, mask)
    dx, dweight, dbias = oracle.backward(dy, ctx)
    step = {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}
    for name, value in getattr(oracle, "gradients", {}).items():
        step[f"d{name}"] = np.atleast_1d(value)
    return step


def assert_steps_close(actual, expected, rtol=2e-5, what=""):
    """Compare what ``actual`` has: an oracle gives parameter gradients even where the norm has no
    parameters.
    """
    largest = max(float(abs(value).max(initial=0.0)) for value in expected.values())
    for key, value in actual.items():
        # A parameter of one element is a sum over everything.
        terms = largest if value.size == 1 else 0.0
        assert_close(value, expected[key], rtol, f"{what} {key}", terms)


def assert_state_close(norm, expected, rtol=2e-5, what=""):
    """The module's buffers against a mapping of the same names."""
    actual = state_of(norm)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if name == "num_batches_tracked":
            assert int(actual[name]) == int(value), f"{what} {name}"
        else:
            assert_close(actual[name], value, rtol, f"{what} {name}")


def batches(steps, masked=True, seed=0, low=0.2, high=3.0, sentences=1):
    """Batches whose shape, level and spread change at every step, as in training on text; from one
    token on, or from one in each of ``sentences``.
    """
    generator = rng(seed)
    for step in range(steps):
        shape = (1 + step % 5, sentences + step % 2, CHANNELS)
        yield random_batch(generator, shape, masked, generator.uniform(low, high))


def assert_training_follows(norm, oracle, steps, rtol=2e-5, dtype=torch.float32, update_freq=None):
    """Train on ``steps`` and compare everything after each of them, and evaluation at the end;
    ``update_freq`` steps make an update.
    """
    for step, (x, mask, dy) in enumerate(steps):
        if update_freq is not None:
            norm.set_num_updates(step // update_freq)
            oracle.set_num_updates(step // update_freq)
        actual = train_step(norm, x, mask, dy, dtype)
        assert_steps_close(actual, oracle_step(oracle, x, mask, dy), rtol, f"step {step}:")
        assert_state_close(norm, oracle_state(oracle), rtol, f"step {step}:")
    y = norm.eval()(torch.tensor(x, dtype=dtype))
    assert_close(y, oracle.evaluate(x), rtol, "eval")
