"""The reference itself, against torch's autograd and by hand. Tests of BN, LN, GN and RMSNorm compare with torch's."""

import numpy as np
import pytest
import torch

from .helpers import CHANNELS, random_batch, real_tokens, rng
from .oracle import PowerNormOracle, PowerNormVOracle


def autograd(formula, x, dy):
    x = torch.tensor(x, requires_grad=True)
    y = formula(x)
    y.backward(torch.tensor(dy))
    return y.detach().numpy(), x.grad.numpy()


def layer_scale(x, groups):
    if groups == 0:
        return x
    split = x.unflatten(-1, (groups, -1))
    return (split / (split.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2)


@pytest.mark.parametrize("groups", [0, 1, 4, CHANNELS])
@pytest.mark.parametrize("masked", [False, True])
def test_power_v_oracle_agrees_with_autograd(groups, masked):
    x, mask, dy = random_batch(rng(3), masked=masked)
    real = torch.tensor(real_tokens(x.shape, mask))

    def formula(x):
        x = layer_scale(x, groups)
        root = (x[real].pow(2).mean(0) + 1e-5).sqrt()
        return torch.where(real[..., None], x / root, x / root.detach())

    oracle = PowerNormVOracle(CHANNELS, groups=groups)
    y, ctx = oracle.forward(x, mask)
    expected_y, expected_dx = autograd(formula, x, dy)
    np.testing.assert_allclose(y, expected_y, rtol=1e-10)
    np.testing.assert_allclose(oracle.backward(dy, ctx)[0], expected_dx, rtol=1e-8, atol=1e-10)


def test_power_oracle_in_one_worked_example():
    """One channel, tokens 3 and 4, a third that is padding; alphas 0.5: every number by hand."""
    oracle = PowerNormOracle(1, alpha_fwd=0.5, alpha_bwd=0.5, eps=0.0)
    mask = np.array([False, False, True])
    oracle.psi2, oracle.nu = np.array([25.0]), np.array([2.0])
    y, ctx = oracle.forward(np.array([[3.0], [4.0], [5.0]]), mask)
    np.testing.assert_allclose(y[:, 0], [0.6, 0.8, 1.0])
    np.testing.assert_allclose(oracle.psi2, 25.0)
    dx, dweight, dbias = oracle.backward(np.array([[1.0], [-1.0], [10.0]]), ctx)
    np.testing.assert_allclose(dx[:, 0], [(1 - 1.2) / 5, (-1 - 1.6) / 5, 10 / 5])
    np.testing.assert_allclose(oracle.psi2, [0.5 * 25 + 0.5 * 12.5])
    np.testing.assert_allclose(oracle.nu, [2 * (1 - 0.5 * 0.5) + 0.5 * (0.6 - 0.8) / 2])
    np.testing.assert_allclose([dweight[0], dbias[0]], [0.6 - 0.8 + 10, 10])
