"""A norm as a module: parameters, state, copies, memory, and the types of its numbers."""

import copy
import io
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pn_fairseq.norms import RunningNorm, build_norm
from pn_fairseq.testing.helpers import (
    CHANNELS,
    COUNT,
    SCHEDULES,
    as_float64,
    assert_close,
    assert_same,
    assert_state_unchanged,
    assert_states_close,
    assert_states_equal,
    gradients_of,
    long,
    random_batch,
    rng,
    some_steps,
    state_of,
    tensors,
    to_mask,
    to_tensor,
    train_step,
    unrounded,
)

# The module.


def test_parameters_and_initial_state(case):
    norm = case.build(affine=False)
    assert norm.weight is None
    assert norm.bias is None
    norm = build_norm(case.name, CHANNELS, case.variant)
    for name, initial in (("weight", torch.ones(CHANNELS)), ("bias", torch.zeros(CHANNELS))):
        parameter = getattr(norm, name)
        assert (parameter is not None) == (name in norm.learned)
        assert parameter is None or torch.equal(parameter, initial)
    assert str(CHANNELS) in repr(norm)
    norm.set_num_updates(3)


def test_reset_parameters_gives_the_initial_values(case):
    norm = case.trained()
    new = build_norm(case.name, CHANNELS, case.variant, **SCHEDULES)
    norm.register_buffer("of_user", torch.ones(2), persistent=False)
    norm.reset_parameters()
    assert norm.of_user.all()
    del norm.of_user
    assert_same(norm.state_dict().values(), new.state_dict().values())
    assert_same(some_steps(norm), some_steps(new))


def on_meta(norm):
    """A model with ``norm`` on the meta device, where the values of the norm are lost."""
    return torch.nn.Sequential(norm).to("meta")


def without_some(state):
    return {
        key: value
        for key, value in state.items()
        if not key.endswith(("weight", "running_psi2", "running_var"))
    }


#: How a module without values gets values.
MATERIALIZATIONS = (
    "to_empty",
    "to_empty of each module",
    "to_empty, then a part",
    "a copy",
    "assign",
    "assign a part, then to_empty",
)


def materialized(model, how, state):
    """``model`` with memory, and with the values of ``state`` that ``how`` loads."""
    if how == "a copy":
        model = copy.deepcopy(model)
    if how == "assign":
        model.load_state_dict(state, assign=True)
    if how == "assign a part, then to_empty":
        model.load_state_dict(without_some(state), strict=False, assign=True)
    if how == "to_empty of each module":
        model.apply(lambda module: module.to_empty(device="cpu", recurse=False))
    elif how != "assign":
        model.to_empty(device="cpu")
    if how == "to_empty, then a part":
        model.load_state_dict(without_some(state), strict=False)
    return model


@pytest.mark.parametrize("how", MATERIALIZATIONS)
def test_state_is_initial_or_loaded_however_memory_is_given(running, how):
    model = on_meta(running.trained())
    loaded = torch.nn.Sequential(running.trained())
    (norm,) = materialized(model, how, loaded.state_dict())
    initial = state_of(running.build())
    given = state_of(loaded[0])
    for key, value in state_of(norm).items():
        in_part = "part" in how and without_some({key: value})
        if how == "assign" or in_part:
            expected = given
        else:
            expected = initial
        assert torch.equal(value, expected[key]), key


def test_memory_that_is_given_to_a_module_with_values_keeps_the_state(running):
    norm = running.trained()
    before = state_of(norm)
    memory = {buffer.data_ptr() for buffer in norm.buffers()}
    torch.nn.Sequential(norm).to_empty(device="cpu")
    assert memory.isdisjoint(buffer.data_ptr() for buffer in norm.buffers())
    assert_state_unchanged(norm, before)


def test_a_module_on_meta_is_refused(running):
    for training in (True, False):
        norm = on_meta(running.build())[0].train(training)
        with pytest.raises(RuntimeError, match=f"{COUNT} of .* never got values: .*to_empty"):
            norm(torch.ones(2, CHANNELS))
        assert norm(torch.ones(2, CHANNELS, device="meta")).is_meta
        some = without_some(running.trained().state_dict())
        norm.load_state_dict(some, strict=False, assign=True)
        with pytest.raises(RuntimeError, match="running_.* never got values"):
            norm(torch.ones(2, CHANNELS))


def test_state_belongs_to_a_running_norm(case):
    """The tests of state cover only running norms: a norm composed of norms would be used
    untested.
    """
    norm = case.build()
    with_state = [module for module in norm.modules() if list(module.buffers(recurse=False))]
    if isinstance(norm, RunningNorm):
        expected = [norm]
    else:
        expected = []
    assert with_state == expected, (
        "a norm with buffers, or with parts that have some, derives from RunningNorm and has its "
        "state from add_state; token_part adds a part with statistics of each token "
        "(docs/adding_a_norm.md)"
    )


def test_state_is_float32_and_a_counter(running):
    state = state_of(running.build())
    assert state.pop(COUNT).dtype == torch.int64
    assert state
    for value in state.values():
        assert value.dtype == torch.float32
        assert value.shape[-1] == CHANNELS


@pytest.mark.parametrize("steps", [1, 4])
def test_state_dict_round_trip(case, steps):
    """In the middle of a warm-up of 2 and after it. Training continues bitwise equally."""
    norm = case.trained(4, steps, psi_warmup_updates=2)
    twin = case.build(4, psi_warmup_updates=2)
    assert set(norm.state_dict()) == {*dict(norm.named_parameters()), *state_of(norm)}
    file = io.BytesIO()
    torch.save(norm.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert_same(some_steps(twin), some_steps(norm))


@pytest.mark.parametrize(
    ("how", "when"),
    [
        ("deepcopy", "before a backward"),
        ("deepcopy", "after a backward"),
        ("pickle", "with updates"),
        ("torch.save", "after a backward"),
    ],
)
@long
def test_copies_continue_alike_and_apart(case, how, when):
    norm = case.trained(4, 1, psi_warmup_updates=2)
    if when == "with updates":
        norm.set_num_updates(1)
    y = norm(torch.ones(2, 2, CHANNELS, requires_grad=True))
    if when == "after a backward":
        y.sum().backward()
    if how == "deepcopy":
        twin = copy.deepcopy(norm)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(norm))
    else:
        file = io.BytesIO()
        torch.save(norm, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert_states_equal(twin, norm)
    before = state_of(norm)
    some_steps(copy.deepcopy(twin), 1)
    assert_state_unchanged(norm, before)
    assert_same(some_steps(twin), some_steps(norm))


def test_a_graph_belongs_to_the_original_and_not_to_its_copy(running):
    norm = running.trained()
    y = norm(torch.ones(2, 2, CHANNELS, requires_grad=True))
    twin = copy.deepcopy(norm)
    before = state_of(twin)
    y.sum().backward()
    assert_state_unchanged(twin, before)
    assert state_of(norm)[COUNT] == before[COUNT] + 1


class HostReads(TorchDispatchMode):
    """Records the operations of a block that would wait for a GPU, because they read values or
    have results of unknown size.
    """

    NAMES = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal")

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.NAMES:
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("masked", "counted"),
    [(True, True), (False, False)],
    ids=["mask, with updates", "no mask, counting itself"],
)
def test_no_value_is_read_in_a_training_step(case, masked, counted):
    """The host never waits for a GPU. An ``if`` on a value of a tensor would read it."""
    norm = case.build(4, psi_warmup_updates=2, outlier_filtration=True)
    x, mask, dy = tensors(2)
    with HostReads() as reads:
        for step in range(4):  # in the warm-up and after it
            if counted:
                norm.set_num_updates(step)
            # Includes a fault, which must be handled on the device that holds the numbers.
            values = x * float("inf") if step == 3 else x
            inputs = values.detach().requires_grad_()
            norm(inputs, mask if masked else None).backward(dy)
    # A norm that is not told the number of updates may check once whether its own steps have ended
    # a warm-up.
    assert len(reads.operations) <= (not counted), (
        f"a training step reads values, for which a GPU waits (use torch.where): {reads.operations}"
    )


# Precision.

#: Methods that convert a module, one after the other.
CASTS = {
    "half": [("half",)],
    "to-device-bfloat16": [("to", "cpu", torch.bfloat16)],
    "double": [("double",)],
    "type": [("type", torch.float16)],
    "half-and-back": [("half",), ("float",)],
}


@pytest.mark.parametrize("cast", CASTS)
def test_conversion_casts_parameters_and_leaves_the_state_float32(running, cast):
    norm = running.trained()
    linear = torch.nn.Linear(1, 1)
    before = state_of(norm)
    keys = list(norm.state_dict())
    for model in (torch.nn.Sequential(norm), linear):
        for method, *arguments in CASTS[cast]:
            getattr(model, method)(*arguments)
    assert_state_unchanged(norm, before)
    assert norm.weight.dtype == linear.weight.dtype
    assert list(norm.state_dict()) == keys
    assert all(buffer.is_meta for buffer in norm.to("meta", torch.float16).buffers())


@pytest.mark.parametrize(("assign", "dtype"), [(False, torch.float64), (True, torch.bfloat16)])
def test_loaded_state_is_float32(running, assign, dtype):
    """In whatever type it was saved. The caller keeps what was loaded, and training continues."""
    saved = running.trained()
    norm = running.build()
    source = torch.nn.Sequential(saved)
    target = torch.nn.Sequential(norm)
    state = source.state_dict()
    for key, value in state.items():
        if value.is_floating_point():
            state[key] = value.to(dtype)
    given = dict(state)
    target.load_state_dict(state, assign=assign)
    assert state.keys() == given.keys()
    assert all(state[key] is value for key, value in given.items())
    actual = state_of(norm)
    for key, value in state_of(saved).items():
        assert actual[key].dtype == value.dtype, key
        assert torch.equal(actual[key], value.to(dtype).to(value.dtype)), key
    given = {key: value.clone() for key, value in given.items()}
    some_steps(norm, 1)
    assert int(norm.num_batches_tracked) == 4
    if not assign:
        assert_same(state.values(), given.values())


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
@long
def test_results_have_the_types_of_what_they_belong_to(case, dtype, training):
    """In mixed precision, parameters have another type than the input."""
    for parameters in DTYPES:
        norm = case.build(4).to(parameters).train(training)
        x, mask, _ = random_batch(3)
        x = to_tensor(x, dtype, requires_grad=True)
        y = norm(x, to_mask(mask))
        y.sum().backward()
        assert y.dtype == dtype
        assert x.grad.dtype == dtype
        gradients = gradients_of(norm)
        assert not training or len(gradients) == len(list(norm.parameters()))
        assert {gradient.dtype for gradient in gradients} <= {parameters}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_one_rounding_away_from_float32(case, dtype):
    """Statistics and state are computed from the rounded input in float32; squares of 300 overflow
    float16.
    """
    wide = case.build(4, psi_warmup_updates=2)
    narrow = case.build(4, psi_warmup_updates=2).to(dtype)
    # One pass over the tokens rounds once. Other norms consist of several operators, each of which
    # rounds: at most three times, with a margin of five.
    one_pass = isinstance(narrow, RunningNorm) and not narrow.further_parameters()
    if one_pass:
        rtol = 1e-4
    else:
        rtol = 5 * 3 * torch.finfo(dtype).eps / 2
    state = {key: value.float() for key, value in narrow.state_dict().items()}
    wide.load_state_dict(state)
    generator = rng(4)
    for step in range(4):
        x, mask, dy = random_batch(generator, scale=300.0)
        x = as_float64(to_tensor(x, dtype))
        dy = as_float64(to_tensor(dy, dtype))
        actual = train_step(narrow, x, mask, dy, dtype)
        expected = train_step(wide, x, mask, dy)
        for key, value in expected.items():
            terms = 0.0 if key in ("y", "dx") else 1.0
            found = unrounded(actual[key], value, dtype)
            assert_close(found, value, rtol, f"step {step}: {key}", terms)
        assert_states_close(narrow, wide, 1e-5, f"step {step}:")


def test_works_under_autocast(case):
    norm = case.build(4)
    x, mask, dy = tensors(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = x.bfloat16().requires_grad_()
        y = norm(x, mask)
    y.backward(dy.to(y.dtype))
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    types = {value.dtype for value in state_of(norm).values()}
    assert types <= {torch.float32, torch.int64}
