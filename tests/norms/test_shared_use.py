"""Several forwards before a backward: shared modules, ensembles, gradients asked for out of order."""

import gc

import pytest
import torch

from pn_fairseq.norms import build_norm
from pn_fairseq.norms.pending import MAX_PENDING

from .helpers import (
    CHANNELS,
    STATEFUL,
    affine_of,
    assert_close,
    assert_state_close,
    assert_state_unchanged,
    random_batch,
    randomize_affine,
    rng,
    state_of,
    to_mask,
    train_step,
)
from .oracle import make_oracle, oracle_state


def make_pair(name, groups=0, **options):
    norm = randomize_affine(build_norm(name, CHANNELS, layer_scale_groups=groups, **options)).train()
    return norm, make_oracle(name, CHANNELS, layer_scale_groups=groups, **options, **affine_of(norm))


def leaf_of(x):
    return torch.tensor(x, dtype=torch.float32, requires_grad=True)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-first", "last-first"])
@pytest.mark.parametrize("warmup", [0, 5])
def test_each_backward_uses_the_values_of_its_own_forward(name, order, warmup):
    norm, oracle = make_pair(name, psi_warmup_updates=warmup)
    generator = rng(1)
    for step in range(6):
        norm.zero_grad()
        work = []
        for _ in range(2):
            x, mask, dy = random_batch(generator)
            leaf = leaf_of(x)
            y = norm(leaf, to_mask(mask))
            expected_y, ctx = oracle.forward(x, mask)
            assert_close(y, expected_y)
            work.append((leaf, y, dy, ctx))
        dweight, dbias = 0, 0
        for index in order:
            leaf, y, dy, ctx = work[index]
            y.backward(torch.tensor(dy, dtype=torch.float32))
            dx, dw, db = oracle.backward(dy, ctx)
            dweight, dbias = dweight + dw, dbias + db
            assert_close(leaf.grad, dx, 5e-5, f"step {step}, forward {index}")
        assert_close(norm.weight.grad, dweight, 5e-5)
        assert_close(norm.bias.grad, dbias, 5e-5)
        assert_state_close(norm, oracle_state(oracle), what=f"step {step}:")


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("groups", [0, 4])
def test_module_used_twice_in_one_graph(name, groups):
    norm, oracle = make_pair(name, groups, psi_warmup_updates=2)
    generator = rng(2)
    for step in range(5):
        norm.zero_grad()
        x, mask, dy = random_batch(generator)
        leaf = leaf_of(x)
        z = torch.tanh(norm(leaf, to_mask(mask)))
        y = norm(z, to_mask(mask))
        y.backward(torch.tensor(dy, dtype=torch.float32))

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


@pytest.mark.parametrize("name", STATEFUL)
def test_second_backward_over_a_retained_graph_gives_the_same_gradient(name):
    """PN: the gradient takes the nu of the forward, whatever nu has become by the first backward."""
    norm, _ = make_pair(name)
    generator = rng(3)
    for _ in range(2):
        train_step(norm, *random_batch(generator))
    x, mask, dy = random_batch(generator)
    leaf = leaf_of(x)
    y = norm(leaf, to_mask(mask))
    dy = torch.tensor(dy, dtype=torch.float32)
    (once,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
    (twice,) = torch.autograd.grad(y, leaf, dy)
    assert torch.equal(once, twice)


@pytest.mark.parametrize("name", ["batch", "power-v"])
def test_second_backward_over_a_retained_graph_changes_no_state(name):
    norm, _ = make_pair(name)
    x, mask, dy = random_batch(rng(4))
    y = norm(leaf_of(x), to_mask(mask))
    dy = torch.tensor(dy, dtype=torch.float32)
    y.backward(dy, retain_graph=True)
    before = state_of(norm)
    y.backward(dy)
    assert_state_unchanged(norm, before)


@pytest.mark.parametrize("name", STATEFUL)
def test_forward_whose_backward_never_comes_counts_as_a_forward(name):
    """As in a loss that is thrown away: later steps are those of the oracle."""
    norm, oracle = make_pair(name, psi_warmup_updates=3)
    generator = rng(5)
    for _ in range(5):
        x, mask, dy = random_batch(generator)
        norm(leaf_of(x), to_mask(mask))
        oracle.forward(x, mask)
        x, mask, dy = random_batch(generator)
        actual = train_step(norm, x, mask, dy)
        y, ctx = oracle.forward(x, mask)
        assert_close(actual["y"], y)
        assert_close(actual["dx"], oracle.backward(dy, ctx)[0], 5e-5)
        assert_state_close(norm, oracle_state(oracle))


@pytest.mark.parametrize("name", ["batch", "power"])
@pytest.mark.parametrize("grad", [True, False])
def test_forwards_without_a_backward_do_not_pile_up(name, grad):
    norm, _ = make_pair(name)
    x = torch.tensor(random_batch(rng(6))[0], dtype=torch.float32)

    def tensors_after(forwards):
        with torch.set_grad_enabled(grad):
            for _ in range(forwards):
                norm(x)
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    assert tensors_after(2 * MAX_PENDING) <= tensors_after(MAX_PENDING + 10) + 10


@pytest.mark.parametrize("name", STATEFUL)
def test_two_modules_keep_apart(name):
    """State lives in the module: no class attribute, no default argument shared."""
    one, _ = make_pair(name)
    other, _ = make_pair(name)
    before = state_of(other)
    train_step(one, *random_batch(rng(7)))
    one.set_num_updates(5) if hasattr(one, "set_num_updates") else None
    assert_state_unchanged(other, before)
