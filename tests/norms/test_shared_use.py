"""Several forwards before a backward, against the oracles."""

import pytest

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
