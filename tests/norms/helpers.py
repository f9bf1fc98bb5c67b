"""The helpers of the shared suite, and what compares a norm with its oracle."""

from pn_fairseq.norms import NORMS, RunningNorm
from pn_fairseq.testing.helpers import *  # noqa: F403

ALL_NORMS = tuple(NORMS)
STATEFUL = tuple(name for name, entry in NORMS.items() if issubclass(entry.cls, RunningNorm))


def affine_of(norm):
    """The keyword arguments that give an oracle the module's affine parameters."""
    if norm.weight is None:
        return {}
    return {"weight": norm.weight.detach().double().numpy(), "bias": norm.bias.detach().double().numpy()}


def oracle_step(oracle, x, mask=None, dy=None):
    y, ctx = oracle.forward(x, mask)
    dx, dweight, dbias = oracle.backward(dy, ctx)
    return {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}
