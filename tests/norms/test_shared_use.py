"""Several forwards before a backward, against the oracles."""

import pytest
import torch

from pn_fairseq.norms import build_norm

from .helpers import (
    CHANNELS,
    STATEFUL,
    affine_of,
    assert_close,
    assert_state_close,
    random_batch,
    randomize_affine,
    rng,
    to_mask,
    to_tensor,
)
from .oracle import make_oracle, oracle_state


def make_pair(name, groups=0, **options):
    norm = randomize_affine(build_norm(name, CHANNELS, layer_scale_groups=groups, **options)).train()
    return norm, make_oracle(name, CHANNELS, layer_scale_groups=groups, **options, **affine_of(norm))


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize(("order", "warmup"), [((0, 1), 5), ((1, 0), 0)], ids=["first-first", "last-first"])
def test_each_backward_uses_the_values_of_its_own_forward(name, order, warmup):
    norm, oracle = make_pair(name, psi_warmup_updates=warmup)
    generator = rng(1)
    for step in range(6):
        norm.zero_grad()
        work = []
        for _ in range(2):
            x, mask, dy = random_batch(generator)
            leaf = to_tensor(x, requires_grad=True)
            y = norm(leaf, to_mask(mask))
            expected_y, ctx = oracle.forward(x, mask)
            assert_close(y, expected_y)
            work.append((leaf, y, dy, ctx))
        dweight, dbias = 0, 0
        for index in order:
            leaf, y, dy, ctx = work[index]
            y.backward(to_tensor(dy))
            dx, dw, db = oracle.backward(dy, ctx)
            dweight, dbias = dweight + dw, dbias + db
            assert_close(leaf.grad, dx, 5e-5, f"step {step}, forward {index}")
        assert_close(norm.weight.grad, dweight, 5e-5)
        assert_close(norm.bias.grad, dbias, 5e-5)
        assert_state_close(norm, oracle_state(oracle), what=f"step {step}:")


@pytest.mark.parametrize("name", STATEFUL)
def test_module_used_twice_in_one_graph(name):
    norm, oracle = make_pair(name, groups=4, psi_warmup_updates=2)
    generator = rng(2)
    for step in range(5):
        norm.zero_grad()
        x, mask, dy = random_batch(generator)
        leaf = to_tensor(x, requires_grad=True)
        z = torch.tanh(norm(leaf, to_mask(mask)))
        y = norm(z, to_mask(mask))
        y.backward(to_tensor(dy))

        inner, first = oracle.forward(x, mask)
        hidden = torch.tanh(torch.tensor(inner)).numpy()
        expected_y, second = oracle.forward(hidden, mask)
        dhidden, dw2, db2 = oracle.backward(dy, second)
        dx, dw1, db1 = oracle.backward(dhidden * (1 - hidden**2), first)
        assert_close(y, expected_y, 5e-5, f"step {step}: y")
        assert_close(leaf.grad, dx, 1e-4, f"step {step}: dx")
        assert_close(norm.weight.grad, dw1 + dw2, 1e-4, f"step {step}: dweight")
        assert_close(norm.bias.grad, db1 + db2, 1e-4, f"step {step}: dbias")
        assert_state_close(norm, oracle_state(oracle), 1e-4, f"step {step}:")
