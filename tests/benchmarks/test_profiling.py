"""What a contestant of the benchmarks reads, writes and allocates, against counts by hand."""

from functools import partial

import pytest
import torch
from torch import nn

from benchmarks import norms
from benchmarks.profiling import Counts, count, peak_memory
from pn_fairseq import kernels
from pn_fairseq.kernels import reference
from pn_fairseq.norms import build_norm

ROWS = 48
CHANNELS = 16
X = ROWS * CHANNELS * 4
VECTOR = CHANNELS * 4


@pytest.fixture
def activations():
    """x that needs a gradient, and dy, of 48 tokens and 16 channels."""
    x = torch.randn(ROWS, CHANNELS, requires_grad=True)
    return x, torch.randn(ROWS, CHANNELS)


def test_counts_of_layer_norm_by_hand(activations):
    x, dy = activations
    norm = nn.LayerNorm(CHANNELS)
    statistics = 2 * ROWS * 4
    # x, weight, bias; y, means, 1 / standard deviations
    assert count(lambda: norm(x)) == Counts(1, X + 2 * VECTOR, X + statistics)
    y = norm(x)
    # dy, x, weight, bias, both statistics; the gradients of x, weight and bias
    read = 2 * X + statistics + 2 * VECTOR
    written = X + 2 * VECTOR
    assert count(lambda: y.backward(dy)) == Counts(1, read, written)


def test_counts_of_operators_by_hand(activations):
    x = activations[0].detach()
    mask = torch.zeros(ROWS, 1, dtype=torch.bool)
    out = torch.empty_like(x)
    row = torch.randn(1, CHANNELS)

    def check(function, kernels, read, written):
        assert count(function) == Counts(kernels, read, written)

    check(lambda: x.view(-1).unsqueeze(0).expand(3, -1), 0, 0, 0)
    check(lambda: torch.empty_like(x).detach(), 0, 0, 0)
    check(lambda: x + 1.0, 1, X + 8, X)
    check(lambda: x * x, 1, X, X)
    check(lambda: x + row.expand_as(x), 1, X + VECTOR, X)
    check(lambda: torch.exp(x, out=out), 1, X, X)
    check(lambda: out.copy_(x), 1, X, X)
    check(lambda: out.add_(x), 1, 2 * X, X)
    check(lambda: torch.cat([x, out]), 1, 2 * X, 2 * X)
    # A copy, and then the copy and the mask are read and the copy is written.
    check(lambda: x.masked_fill(mask, 0.0), 2, X + X + ROWS, 2 * X)
    check(lambda: x.to(torch.bfloat16), 1, X, X // 2)
    check(lambda: x.to(torch.float32), 0, 0, 0)
    check(lambda: x.reshape(-1), 0, 0, 0)
    check(lambda: x.t().reshape(-1), 1, X, X)
    check(lambda: x.exp().sum(), 2, 2 * X, X + 4)
    assert count(lambda: x.exp(), opaque=True) == Counts(1, None, None)


@pytest.mark.skipif("cpp" not in kernels.available(), reason="there are no C++ kernels")
@pytest.mark.parametrize("groups", [0, 4])
def test_counts_of_fused_pn_by_hand(groups, activations):
    x, dy = activations
    norm = build_norm("power", CHANNELS, layer_scale_groups=groups)
    mask = torch.zeros(ROWS, dtype=torch.bool)
    scales = ROWS * groups * 4
    with kernels.using("cpp"):
        forward = count(lambda: norm(x, mask))
        y = norm(x, mask)
        backward = count(lambda: y.backward(dy))
    copies = 2 * VECTOR  # of psi^2 and nu
    read = X + ROWS + 3 * VECTOR  # x, mask, weight, bias, psi^2
    written = X + scales + VECTOR + 4  # y, 1 / rms, psi_B^2, N
    assert forward == Counts(2, read + copies, written + copies)
    # dy, x, mask, weight, psi^2, nu, 1 / rms, the state, psi_B^2, N; the gradients of x, weight and
    # bias, the state
    state = 2 * VECTOR + 8
    of_batch = VECTOR + 4
    read = 2 * X + ROWS + 3 * VECTOR + scales + state + of_batch
    assert backward == Counts(1, read, X + 2 * VECTOR + state)


def test_the_reference_is_counted_by_what_it_is_made_of(activations):
    x = activations[0].detach()
    mask = torch.zeros(ROWS, dtype=torch.bool)
    args = (x, None, None, None, torch.ones(CHANNELS), mask, None, 4, 1e-5, True)
    alone = count(lambda: reference.normalize(*args))
    with kernels.using("reference"):
        normalize = partial(kernels.normalize, *args)
        assert count(normalize, look_into="pn_fairseq") == alone
        if len(kernels.available()) > 1:  # or else torch itself sees that it is made of others
            assert count(normalize).kernels == 1
    assert alone.kernels > 10
    assert alone.bytes_read > 5 * X


def test_peak_memory_of_layer_norm_by_hand(activations):
    x, dy = activations
    norm = nn.LayerNorm(CHANNELS)
    contestant = norms.Contestant("LayerNorm", norms.Unmasked(norm), "LayerNorm")
    step = partial(norms.step, contestant, (x, dy, None), lambda: None)
    step()
    contestant.forget(x)
    peak = peak_memory(step, torch.device("cpu"))
    # y, dx, both statistics, the gradients of weight and bias, and each thread's sums for these two
    of_parameters = (1 + torch.get_num_threads()) * 2 * VECTOR
    assert peak == 2 * X + 2 * ROWS * 4 + of_parameters
