"""Evaluation, also compiled and exported; diagnostics; recalibration of the statistics of
evaluation.
"""

import functools

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pn_fairseq.norms import VARIANTS, RunningNorm, recalibrating, running_norms
from pn_fairseq.norms.fold import folded_linear
from pn_fairseq.testing.helpers import (
    CHANNELS,
    COUNT,
    assert_close,
    assert_same,
    assert_state_unchanged,
    assert_states_equal,
    gradients_of,
    long,
    poison,
    random_batch,
    real_tokens,
    rng,
    some_steps,
    state_of,
    tensors,
    to_mask,
    to_tensor,
    train_step,
)

# Evaluation.


def test_evaluation_is_causal_and_changes_no_state(case):
    """Each token is normalized by itself: later tokens, other sentences and masks do not matter."""
    norm = case.trained(4).eval()
    before = state_of(norm)
    x, mask, dy = tensors(2)
    whole = norm(x)
    part = norm(x[1:3, 2:])
    assert_close(part, whole[1:3, 2:], 1e-6)
    for time in range(1, len(x) + 1):
        beginning = norm(x[:time])
        assert_close(beginning[-1], whole[time - 1], 1e-6)
    assert torch.equal(norm(x, mask), whole)
    x[0, 0, 0] = torch.nan
    norm(x.requires_grad_(), mask).backward(dy)
    assert_state_unchanged(norm, before)


def test_training_mixes_tokens_as_the_norm_says(case):
    """Whether y depends on later tokens: in update 1, and, with statistics that fit the batch, long
    after it.
    """
    x = torch.randn(5, 2, CHANNELS, generator=torch.Generator().manual_seed(3))
    twin = torch.cat([x[:-1], x[-1:] * 1.1])
    early, late = (case.build(psi_warmup_updates=2, alpha_fwd=0.5) for _ in range(2))
    early.set_num_updates(1)
    for _ in range(25):
        late(x.clone().requires_grad_()).sum().backward()
    if isinstance(late, RunningNorm):
        late.num_batches_tracked.fill_(10**6)
    late.set_num_updates(10**6)
    says = case.cls.mixes_tokens
    mixes_early = says != "never"
    mixes_late = says == "always"
    for when, norm, mixes in (("update 1", early, mixes_early), ("the long run", late, mixes_late)):
        change = norm(x) - norm(twin)
        difference = float(change[:-1].abs().max().detach())
        if mixes:
            as_said = difference > 1e-3
        else:
            as_said = difference < 1e-5
        assert as_said, (
            f"mixes_tokens is {says!r}, but in {when} another token changes y by {difference:.2g}"
        )


def test_statistics_are_means_over_tokens(running):
    """A batch that contains all its tokens twice changes only the gradients of weights, up to
    N / (N - 1).
    """
    once, twice = (running.build(4, psi_warmup_updates=2).double() for _ in range(2))
    generator = rng(4)
    for step in range(5):
        x, mask, dy = tensors(generator)
        x, dy, batch = x.double(), dy.double(), x.size(1)
        one = x.clone().requires_grad_()
        two = torch.cat([x, x], 1).requires_grad_()
        y_one = once(one, mask)
        y_two = twice(two, torch.cat([mask, mask]))
        y_one.backward(dy)
        y_two.backward(torch.cat([dy, dy], 1))
        expected = {"y": y_one, "dx": one.grad, **state_of(once)}
        actual = {"y": y_two[:, :batch], "dx": two.grad[:, :batch], **state_of(twice)}
        for key, value in expected.items():
            difference = (actual[key] - value).abs().max()
            assert difference < 0.1 * value.abs().max().clamp(min=1e-6), (
                f"step {step}: {key} depends on how many tokens a batch has: divide sums by "
                "step.batch.count"
            )


def test_the_gradient_is_a_derivative_in_the_long_run(running):
    """Statistics settle if one batch is repeated. dx is then the derivative of the output of a norm
    that has settled on x; or, if the norm treats statistics as constants, of its affine map.
    """
    x, _, dy = tensors(3)
    x = x.double()
    dy = dy.double()

    def settled(x):
        norm = running.build(alpha_fwd=0.5, alpha_bwd=0.5, psi_warmup_updates=2).double()
        for _ in range(25):
            leaf = x.clone().requires_grad_()
            y = norm(leaf)
            y.backward(dy)
        return norm.eval(), y.detach(), leaf.grad

    norm, _, dx = settled(x)
    generator = torch.Generator().manual_seed(1)
    step = 1e-3
    for _ in range(2):
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        there = x + step * direction
        back = x - step * direction
        change = settled(there)[1] - settled(back)[1]
        affine = norm(there) - norm(back)
        exact = float((change * dy).sum()) / (2 * step)
        constant = float((affine.detach() * dy).sum()) / (2 * step)
        actual = float((dx * direction).sum())
        nearest = min(abs(actual - exact), abs(actual - constant))
        assert nearest < 0.01 * float(dx.norm()), (
            f"dx is wrong: along a direction the derivative is {exact:.4g} ({constant:.4g} with "
            f"constant statistics), and dx gives {actual:.4g}"
        )


@pytest.mark.parametrize(("groups", "affine"), [(0, True), (1, False), (4, True)])
def test_evaluation_is_the_affine_map_that_folding_uses(running, groups, affine):
    norm = running.trained(groups, affine=affine).eval()
    x = to_tensor(random_batch(5)[0], torch.float64)
    part = norm.token_part(x, dict(norm.named_buffers()))
    assert (part is None) == norm.folds
    scale, shift = norm.evaluation_affine()
    expected = scale * norm.layer_scale(x) + shift
    if part is not None:
        expected += part
    torch.testing.assert_close(norm(x), expected, rtol=1e-11, atol=1e-11)
    if not norm.folds:
        return
    weight = torch.randn(7, CHANNELS, dtype=torch.float64)
    bias = torch.randn(7, dtype=torch.float64)
    for given in (bias, None):
        folded = folded_linear(norm, weight, given)
        actual = torch.nn.functional.linear(norm.layer_scale(x), *folded)
        expected = torch.nn.functional.linear(norm(x), weight, given)
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def test_evaluation_follows_a_state_that_was_loaded_or_trained(running):
    """Nothing is kept from one call to the next."""
    norm = running.trained().eval()
    twin = running.trained(steps=6).eval()
    x = torch.randn(3, CHANNELS)
    norm(x)
    norm.load_state_dict(twin.state_dict())
    assert torch.equal(norm(x), twin(x))
    some_steps(norm, 2), some_steps(twin, 2)
    assert torch.equal(norm.eval()(x), twin.eval()(x))
    assert not torch.equal(norm(x), running.trained().eval()(x))


def test_evaluation_has_gradients(running):
    norm = running.trained(4).eval().double()
    x, _, _ = random_batch(5, (3, 2, CHANNELS))
    x = to_tensor(x, torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,), fast_mode=True)
    with torch.inference_mode():
        y = norm(x)
    assert torch.equal(y, norm(x))
    some_steps(norm.float(), 1)


def test_a_gradient_of_an_evaluation_is_of_the_state_that_it_used(running):
    norm = running.trained().eval()
    twin = running.trained().eval()
    x, mask, dy = tensors(3)
    y = norm(x, mask)
    some_steps(norm)
    for model, result in ((norm, y), (twin, twin(x, mask))):
        model.zero_grad()
        result.backward(dy)
    assert gradients_of(norm)
    assert_same(gradients_of(norm), gradients_of(twin))


# torch.compile, torch.export, torch.func.


@pytest.fixture
def compiler():
    """torch.compile counts what it has compiled of one function, and stops at a limit."""
    torch._dynamo.reset()
    yield functools.partial(torch.compile, backend="aot_eager")
    torch._dynamo.reset()


@long
def test_evaluation_compiles_without_a_graph_break(case, compiler):
    norm = case.trained(4).eval()
    x, mask, _ = tensors(2)
    compiled = compiler(norm, fullgraph=True)
    torch.testing.assert_close(compiled(x, mask), norm(x, mask))
    torch.testing.assert_close(compiled(x), norm(x))


@long
def test_training_under_compile_is_training(case, compiler):
    """In one graph, and one more for all other lengths; the updates of a warm-up recompile nothing
    except at the end of PRepBN's fade.
    """
    plain = case.build(4, psi_warmup_updates=2)
    twin = case.build(4, psi_warmup_updates=2)
    compiled = compiler(twin, fullgraph=True)
    generator = rng(1)
    torch._dynamo.utils.counters.clear()
    for step, length in enumerate((5, 6, 4, 7, 9)):
        batch = random_batch(generator, (length, 3, CHANNELS))
        results = []
        for norm, call in ((plain, plain), (twin, compiled)):
            norm.set_num_updates(step)
            gradients = train_step(call, *batch).values()
            results.append([*map(torch.tensor, gradients), *state_of(norm).values()])
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    if str(case) in ("power", "prep-batch"):
        graphs = 3
    else:
        graphs = 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@long
def test_evaluation_can_be_exported(case):
    norm = case.trained(4).eval()
    x, mask, _ = tensors(2)
    exported = torch.export.export(norm, (x, mask))
    torch.testing.assert_close(exported.module()(x, mask), norm(x, mask))
    for node in exported.graph.nodes:
        loads_anywhere = not str(node.target).startswith("pn_fairseq")
        assert node.op != "call_function" or loads_anywhere, "loads only where this package is"


def test_evaluation_under_transforms_of_torch_func(case):
    norm = case.trained(4).eval()
    parameters = dict(norm.named_parameters())
    x = torch.randn(6, CHANNELS)

    def loss(parameters, x):
        return torch.func.functional_call(norm, parameters, (x,)).square().sum()

    gradient, dx = torch.func.grad(loss, argnums=(0, 1))(parameters, x)
    for parameter in norm.parameters():
        # it stays zero if only training uses the parameter
        parameter.grad = torch.zeros_like(parameter)
    norm(x.requires_grad_()).square().sum().backward()
    # may be zero except for rounding, because the loss sees only the norm
    assert_close(dx, x.grad, terms=1.0)
    per_token = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x[:, None])
    for key, parameter in norm.named_parameters():
        assert_close(gradient[key], parameter.grad, terms=1.0)
        assert_close(per_token[key].sum(0), parameter.grad, terms=1.0)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_transforms_of_torch_func_and_second_derivatives_in_training_are_refused(running):
    norm = running.trained(4)
    x = torch.randn(6, CHANNELS, requires_grad=True)

    def loss(parameters):
        return torch.func.functional_call(norm, parameters, (x,)).square().sum()

    parameters = {key: value.detach() for key, value in norm.named_parameters()}
    with pytest.raises(RuntimeError, match=r"torch.func .* call eval\(\) first"):
        torch.func.grad(loss)(parameters)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    for strict in (False, True):
        with pytest.raises(RuntimeError, match=r"torch.export .* call eval\(\) first"):
            torch.export.export(norm, (x,), strict=strict)
    with pytest.raises(RuntimeError, match=r"torch.jit.trace.* call eval\(\) first"):
        torch.jit.trace(norm, (x,))


def test_a_training_step_with_given_buffers_moves_these(running):
    """``torch.func.functional_call``: the module's own state stays, and the given buffers move."""
    norm = running.trained(4)
    twin = running.trained(4)
    x = torch.randn(6, CHANNELS, requires_grad=True)
    before = state_of(norm)
    given = state_of(norm)
    torch.func.functional_call(norm, given, (x,)).sum().backward()
    assert_state_unchanged(norm, before)
    parameters = dict(twin.named_parameters())
    torch.func.functional_call(twin, parameters, (x,)).sum().backward()
    assert_state_unchanged(twin, given)
    assert given[COUNT] == before[COUNT] + 1


def test_a_recomputation_in_a_cuda_graph_is_refused(running, monkeypatch):
    """A replay of the recomputation could not tell which forward it repeats.

    A step without a recomputation can be captured.
    """
    norm = running.trained(4)
    if norm.reads == ():
        pytest.skip("it reads no state")
    x = torch.randn(6, CHANNELS, requires_grad=True)
    y = checkpoint(norm, x, use_reentrant=False)
    before = state_of(norm)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph .* leave out activation checkpointing"):
        y.sum().backward()
    assert_state_unchanged(norm, before)
    norm(x).sum().backward()
    assert state_of(norm)[COUNT] == before[COUNT] + 1


# Diagnostics.


@pytest.mark.parametrize("warmup", [0, 2])
def test_diagnostics_change_no_number_and_count_faults(running, warmup):
    plain, watched = (running.build(4, psi_warmup_updates=warmup) for _ in range(2))
    assert plain.diagnostics() == {}
    watched.collecting = True
    generator = rng(3)
    for step in range(5):
        x, mask, dy = random_batch(generator)
        if step == 1:
            x = poison(x, mask, np.nan)
        elif step == 2:  # only padding: not a fault
            mask[:] = True
        elif step == 3:
            dy = poison(dy, mask, np.inf)
        results = [train_step(norm, x, mask, dy) for norm in (plain, watched)]
        for key, value in results[0].items():
            np.testing.assert_array_equal(results[1][key], value, f"step {step}: {key}")
        assert_states_equal(plain, watched)
    report = watched.diagnostics()
    assert {"psi_distance", "nonfinite_steps"} <= report.keys()
    assert all(value.dim() == 0 and value.isfinite() for value in report.values())
    assert int(report["nonfinite_steps"]) == 2
    assert str(running) != "power-release" or "guarded_steps" not in report  # it has no guard
    assert plain.diagnostics() == {}


# Recalibration.


class Stack(torch.nn.Module):
    """Two norms with layers between them: the input of the second depends on the first."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(6)
        self.first = case.build(psi_warmup_updates=2)
        self.dropout = torch.nn.Dropout(0.5)
        self.linear = torch.nn.Linear(CHANNELS, CHANNELS)
        self.second = case.build(psi_warmup_updates=2)

    def forward(self, x, mask=None):
        return self.second(self.linear(self.dropout(self.first(x, mask))), mask)


def trained_stack(case, steps=4):
    model = Stack(case).train()
    for step in range(steps):
        x, mask, dy = tensors(20 + step)
        model(x.requires_grad_(), mask).backward(dy)
    return model


def calibration_batches(number, masked=True):
    generator = rng(30)
    batches = []
    for n in range(number):
        length = 3 + 2 * n
        x, mask, _ = random_batch(generator, (length, 3, CHANNELS), masked, 1.0 + n)
        batches.append((x, mask))
    return batches


def recalibrate(model, batches):
    with torch.no_grad(), recalibrating(model):
        for x, mask in batches:
            model(to_tensor(x), to_mask(mask))


def test_recalibration_is_the_mean_over_the_batches_of_the_statistics_of_each(running):
    """A norm with a mean may use the biased or the unbiased variance. A batch without a real token
    does not count. How a variant treats padding is not tested.
    """
    norm = running.trained()
    batches = calibration_batches(4, masked=running.variant == VARIANTS[0])
    only_padding = (np.ones((2, 1, CHANNELS)), np.ones((1, 2), dtype=bool))
    recalibrate(norm, [*batches, only_padding])
    real = [x[real_tokens(x.shape, mask)] for x, mask in batches]
    mean, moment = norm.evaluation_statistics()
    if mean is None:
        moments = [(tokens**2).mean(0) for tokens in real]
        assert_close(moment, np.mean(moments, axis=0))
        return
    means = [tokens.mean(0) for tokens in real]
    assert_close(mean, np.mean(means, axis=0))
    biased = np.mean([tokens.var(0) for tokens in real], axis=0)
    unbiased = np.mean([tokens.var(0, ddof=1) for tokens in real], axis=0)
    distances = [abs(moment.numpy() - variance).sum() for variance in (biased, unbiased)]
    nearest = biased if distances[0] < distances[1] else unbiased
    assert_close(moment, nearest)


def test_recalibration_changes_the_evaluation_statistics_alone(running):
    model = trained_stack(running)
    model.linear.eval()
    before = state_of(model)
    modes = [module.training for module in model.modules()]
    with torch.no_grad(), recalibrating(model) as norms:
        assert norms == [model.first, model.second] == running_norms(model)
        assert all(norm.training and norm.recalibration for norm in norms)
        assert not model.dropout.training
        assert not model.training
        for x, mask in calibration_batches(3):
            model(to_tensor(x), to_mask(mask))
    assert [module.training for module in model.modules()] == modes
    assert not any(norm.recalibration for norm in norms)
    estimated = {model.first.mean_name, model.first.moment_name}
    for key, value in state_of(model).items():
        changed = not torch.equal(value, before[key])
        assert changed == (key.partition(".")[2] in estimated), key


def test_training_after_recalibration_is_that_of_a_model_with_the_same_state(running):
    model = trained_stack(running)
    recalibrate(model, calibration_batches(3))
    twin = Stack(running).train()
    twin.load_state_dict(model.state_dict())
    x, mask, dy = tensors(9)
    for stack in (model, twin):
        torch.manual_seed(1)
        stack(x, mask).backward(dy)
    assert_states_equal(model, twin)


def test_recalibration_that_fails_or_reaches_no_batch_restores(running):
    model = trained_stack(running)
    before = state_of(model)
    modes = [module.training for module in model.modules()]
    with pytest.raises(KeyError), torch.no_grad(), recalibrating(model):
        model(torch.randn(4, 3, CHANNELS))
        raise KeyError("no such file")
    assert_state_unchanged(model, before)
    assert [module.training for module in model.modules()] == modes
    with recalibrating(model):  # also with a graph and a backward
        x = torch.full((4, 3, CHANNELS), torch.nan, requires_grad=True)
        model.second(x).sum().backward()
    assert_state_unchanged(model, before)
