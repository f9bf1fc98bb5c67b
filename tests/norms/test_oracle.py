"""The reference itself, by hand. Tests of BN, LN, GN and RMSNorm compare with torch's."""

import numpy as np

from .oracle import PowerNormOracle


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
