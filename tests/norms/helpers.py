"""The helpers of the shared suite, and what compares a norm with its oracle."""

import numpy as np

from pn_fairseq.norms import NORMS, RunningNorm
from pn_fairseq.testing.helpers import *  # noqa: F403

ALL_NORMS = tuple(NORMS)
STATEFUL = tuple(name for name, entry in NORMS.items() if issubclass(entry.cls, RunningNorm))


def affine_of(norm):
    """The keyword arguments that give an oracle the module's parameters."""
    return {name: parameter.detach().double().numpy() for name, parameter in norm.named_parameters()}


def oracle_step(oracle, x, mask=None, dy=None):
    y, ctx = oracle.forward(x, mask)
    dx, dweight, dbias = oracle.backward(dy, ctx)
    others = {f"d{name}": np.atleast_1d(value) for name, value in getattr(oracle, "gradients", {}).items()}
    return {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias, **others}
