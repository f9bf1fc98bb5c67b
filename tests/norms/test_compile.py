"""torch.compile in training: one graph, and the results and the state of eager mode.

The shared suite compiles every norm by itself.
"""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch._inductor import scheduler
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from docs.tools.compilation import (
    CHANNELS,
    LENGTHS,
    MODES,
    batch,
    compare,
    deviation,
    measure,
    results,
    tell_updates,
)
from pn_fairseq.norms import (
    NORMS,
    build_norm,
    convert_norms,
    padding,
    recalibrating,
    set_loss_scale,
)
from pn_fairseq.testing.helpers import of_kinds
from pn_fairseq.testing.ranks import run_ranks

from .helpers import STATEFUL

COMPILED_NORMS = of_kinds("batch", "running", "token, then batch", "window, geometric")
#: Of a mode and a norm what runs by default.
SOME_MODES = [("aot_eager, bfloat16", "power")]
#: Of a norm, uses in a step, and whether it is checkpointed, what CI runs.
SOME = [("power", 1, True)]
#: Of a norm, and of where the checkpoint is, what CI runs.
SOME_CHECKPOINTED = [("power", "inside")]


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        pytest.param(mode, name, marks=() if (mode, name) in SOME_MODES else pytest.mark.slow)
        for mode in list(MODES)[1:]  # the first one is in the shared suite
        for name in NORMS
    ],
)
def test_each_norm_trains_in_one_graph(mode, name):
    graphs, breaks, worst = measure(name, mode)
    if "dynamic" in mode:  # another graph after the warm-up or the fade
        expected = 1 + (name in ("power", "prep-batch"))
    else:  # one for each kind of length; the second length comes when PN's warm-up has ended
        expected = 2 + (name == "prep-batch")
    assert (graphs, breaks) == (expected, 0)
    assert worst <= (1e-6 if MODES[mode][1] == torch.float32 else 1e-1)


class Block(nn.Module):
    """Uses its norm ``uses`` times, the last time with the input of the time before."""

    def __init__(self, name, uses=1, checkpointed=False):
        super().__init__()
        self.first, self.second = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.norm = build_norm(name, CHANNELS, psi_warmup_updates=2, fade_updates=2)
        self.uses, self.checkpointed = uses, checkpointed

    def part(self, x, mask):
        y = self.norm(self.first(x), mask)
        for _ in range(self.uses - 1):
            y = self.norm(y, mask) + self.norm(y, mask)
        return x + self.second(nn.functional.gelu(y))

    def forward(self, x, mask):
        if self.checkpointed:
            return checkpoint(self.part, x, mask, use_reentrant=False)
        return self.part(x, mask)


@pytest.mark.parametrize(
    ("name", "uses", "checkpointed"),
    [
        pytest.param(*case, marks=pytest.mark.ci if case in SOME else pytest.mark.slow)
        for case in itertools.product(COMPILED_NORMS, (1, 2), (False, True))
    ],
)
def test_accumulation_shared_norms_and_checkpoints_count_each_step_once(name, uses, checkpointed):
    model = Block(name, uses, checkpointed)
    updates = [[batch(length), batch(length + 1)] for length in LENGTHS[1:4]]
    graphs, breaks, worst = compare(model, updates, before_update=tell_updates)
    # another graph when the warm-up or the fade has ended
    changes = name in ("power", "prep-batch")
    assert (graphs, breaks) == (2 + changes, 0) and worst <= 1e-6
    assert model.norm.num_batches_tracked == 2 * len(updates) * (2 * uses - 1)


def test_evaluation_loading_and_frozen_parameters_between_steps():
    def before_update(model, number):
        if number == 2:
            model.load_state_dict(start)
        for parameter in model.parameters():
            parameter.requires_grad_(number != 3)
        model.train(number != 4)

    model = Block("power")
    start = copy.deepcopy(model.state_dict())
    graphs, breaks, worst = compare(
        model, [[batch(5)] for _ in range(6)], before_update=before_update
    )
    assert breaks == 0 and worst <= 1e-6 and model.norm.num_batches_tracked == 3


def test_a_frozen_norm_in_a_checkpointed_part_counts_once():
    model = Block("power", checkpointed=True)
    model.first.requires_grad_(False), model.norm.requires_grad_(False)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        compiled(*batch(5)).sum().backward()
    assert model.norm.num_batches_tracked == 2


def test_steps_without_gradients_are_those_of_eager_mode():
    norm = build_norm("batch", CHANNELS, affine=False)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(*batch(5))
    assert norm.num_batches_tracked == 0
    compiled(*batch(5))
    assert norm.num_batches_tracked == 1
    compiled(batch(5)[0].requires_grad_())  # its backward never comes
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param(*case, marks=pytest.mark.ci if case in SOME_CHECKPOINTED else pytest.mark.slow)
        for case in itertools.product(COMPILED_NORMS, ("inside", "outside"))
    ],
)
def test_two_forwards_before_one_backward_under_checkpointing(name, where):
    """A recomputation reads what its forward read, though the backward of the other batch has
    moved the state.
    """
    torch._dynamo.reset()
    model = Block(name, checkpointed=where == "inside")
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=where == "outside")
    use = partial(checkpoint, compiled, use_reentrant=False) if where == "outside" else compiled
    results_of = []
    for module, call in ((model, model), (other, use)):
        torch.manual_seed(0)
        values = []
        for _ in range(2):
            module.zero_grad()
            batches = [batch(5), batch(6)]
            leaves = [x.requires_grad_() for x, _ in batches]
            outputs = [call(x, mask) for x, mask in batches]
            sum(y.square().sum() for y in outputs).backward()
            values += [
                *(y.detach() for y in outputs),
                *(leaf.grad for leaf in leaves),
                *(p.grad.clone() for p in module.parameters()),
            ]
        results_of.append([*values, *module.buffers()])
    assert deviation(*results_of) <= 1e-6


@pytest.mark.parametrize("name", STATEFUL)
def test_the_number_of_updates_compiles_nothing_again(name):
    """But for the end of a warm-up and of a fade, of which there are none here."""
    norm = build_norm(name, CHANNELS, fade_updates=99)
    updates = [[batch(5)] for _ in range(10)]
    assert compare(
        norm, updates, before_update=lambda model, number: tell_updates(model, number + 1)
    ) == (1, 0, 0.0)


@pytest.mark.parametrize("name", ["batch", "power"])
def test_all_lengths_share_a_graph_also_without_a_mask(name):
    """The first length has its own graph, the second one serves all others."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(build_norm(name, CHANNELS), backend=counter, fullgraph=True)
    for length in (5, 6, 4, 7, 9):
        compiled(torch.randn(length, 3, CHANNELS, requires_grad=True)).sum().backward()
    assert counter.frame_count == 2


@pytest.mark.slow
def test_a_loss_scale_compiles_nothing_again():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def before_update(model, number):
        set_loss_scale(model, scaler if number == 5 else 2.0**number)

    graphs, breaks, worst = compare(
        Block("power"), [[batch(5)] for _ in range(7)], before_update=before_update
    )
    assert graphs <= 3 and (breaks, worst) == (0, 0.0)  # no scale, a number, a scaler


def test_recalibration_of_a_compiled_model():
    norms = [build_norm("batch", CHANNELS) for _ in range(2)]
    compiled = torch.compile(norms[1], backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    batches = [batch(length) for length in (5, 6, 7)]
    for norm, call in zip(norms, (norms[0], compiled), strict=True):
        with torch.no_grad(), recalibrating(norm):
            for x, mask in batches:
                call(x, mask)
    assert norms[0].running_mean.any()
    for name, value in norms[0].state_dict().items():
        assert_close(norms[1].state_dict()[name], value, rtol=1e-6, atol=1e-6)


class Asked:
    """Asks inductor's scheduler, as if the tensors were on a GPU, around what a CUDA graph has
    to be cut.
    """

    def __init__(self, monkeypatch):
        self.reasons: dict[str, str | None] = {}
        init = scheduler.Scheduler._init

        def ask(instance, *args, **kwargs):
            init(instance, *args, **kwargs)
            with (
                monkeypatch.context() as gpu,
                torch._inductor.config.patch({"triton.cudagraphs": True}),
            ):
                gpu.setattr(scheduler.BaseSchedulerNode, "is_gpu", lambda node: True)
                for node in instance.nodes:
                    self.reasons[str(getattr(node.node, "op_overload", node))] = (
                        instance.should_partition(node)
                    )

        monkeypatch.setattr(scheduler.Scheduler, "_init", ask)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.ci) if one == "power" else one for one in STATEFUL],
)
def test_inductor_need_not_cut_a_cuda_graph_around_a_step(monkeypatch, name):
    asked = Asked(monkeypatch)
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        for updates in (0, 10):  # in the warm-up and after it
            norm = build_norm(name, CHANNELS, psi_warmup_updates=4)
            norm.set_num_updates(updates)
            x, mask = batch(5)
            (torch.compile(norm, fullgraph=True)(x.requires_grad_() * 2, mask) * 3).sum().backward()
    ours = [operator for operator in asked.reasons if "pn_fairseq" in operator]
    assert any("_" in operator for operator in ours), "the operators are not in the graphs"
    assert {operator: reason for operator, reason in asked.reasons.items() if reason} == {}


def test_layers_that_are_compiled_one_by_one_share_a_graph():
    layers = nn.ModuleList(build_norm("power", CHANNELS) for _ in range(12))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x, mask = batch(5)
    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True)
        x = layer(x.detach().requires_grad_(), mask)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x, padding_mask=None):
        return x + self.linear(self.norm(x))


class AroundLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x, padding_mask=None):
        return self.layer(x, padding_mask)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_layers_with_masks_that_are_compiled_one_by_one_share_graphs(fullgraph):
    """Two graphs, as the unconverted layers: the input of the first layer needs no gradient."""
    x, mask = torch.randn(4, 6, CHANNELS), torch.arange(6) >= torch.tensor([6, 4, 3, 5])[:, None]
    plain = nn.ModuleList(AroundLayer() for _ in range(12))
    graphs, outputs = [], []
    for convert, compiles in ((False, True), (True, False), (True, True)):
        layers = copy.deepcopy(plain)
        if convert:
            convert_norms(layers, "batch", layout="BTC")
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        y = x
        for layer in layers:
            if compiles:
                layer.compile(backend=counter, fullgraph=fullgraph)
            y = layer(y, mask)
        y.sum().backward()
        outputs.append(y)
        graphs.append(counter.frame_count)
    assert graphs == [2, 0, 2]
    assert_close(outputs[2], outputs[1], rtol=0, atol=0)


def test_a_norm_that_counts_its_own_steps_is_compiled_once():
    norm = build_norm("prep-batch", CHANNELS, fade_updates=20)
    steps = [batch(5) for _ in range(20)]
    assert compare(norm, [steps[:10], steps[10:]]) == (1, 0, 0.0)


def test_parameters_that_are_given_are_used():
    norm, x = build_norm("batch", CHANNELS), batch(5)[0]
    given = {"weight": torch.rand(CHANNELS, requires_grad=True)}

    def call():
        y = torch.func.functional_call(norm, given, (x,))
        return y, *torch.autograd.grad(y.square().sum(), list(given.values()))

    compiled = torch.compile(call, backend="aot_eager")
    assert_close(compiled(), call(), rtol=0, atol=0)


# Masks.


class Encoder(nn.Module):
    """Its first layer has another mask, and the second one none."""

    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(2)), nn.LayerNorm(CHANNELS)

    def forward(self, x, padding_mask=None):
        first = None if padding_mask is None else padding_mask.flip(0)
        for layer, mask in zip(self.layers, (first, None), strict=True):
            x = layer(x, mask)
        return self.norm(x)


class Source(nn.Module):
    """Has no mask itself: its norm takes that of the encoder which ended last."""

    def __init__(self):
        super().__init__()
        self.encoder, self.norm = Encoder(), nn.LayerNorm(CHANNELS)

    def forward(self, x, padding_mask):
        return self.norm(self.encoder(x, padding_mask))


@pytest.mark.filterwarnings("ignore:.*layers.1.norm takes statistics")
@pytest.mark.parametrize(
    ("make", "zero_padding", "form"),
    [
        (Encoder, True, "mask"),
        pytest.param(Source, False, lambda mask: mask, marks=pytest.mark.slow),
    ],
)
def test_masks_from_arguments_are_in_the_graph(make, zero_padding, form):
    model = convert_norms(
        make(), "power", mask_from={"padding_mask": form}, layout="TBC", zero_padding=zero_padding
    )
    updates = [[batch(length)] for length in LENGTHS]
    assert compare(model, updates) == (2, 0, 0.0)
    if zero_padding:
        assert compare(model.eval(), updates) == (2, 0, 0.0)


def test_compilation_is_not_taken_for_an_export(monkeypatch):
    """Up to torch 2.11, ``torch.compiler.is_exporting()`` is true in compiled code."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    norm = build_norm("power", 8)
    norm(torch.randn(4, 3, 8)).sum().backward()
    assert norm.num_batches_tracked == 1


@pytest.mark.ci
def test_a_block_around_a_compiled_model():
    class Within(nn.Module):
        def __init__(self, call):
            super().__init__()
            self.call = call

        def forward(self, x, mask):
            with padding(mask):
                return self.call(x)

    eager = convert_norms(Encoder(), "batch", layout="TBC")
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for length in LENGTHS[:4]:
        batches = [batch(length)]
        assert (
            deviation(
                results(other, Within(compiled), batches), results(eager, Within(eager), batches)
            )
            == 0.0
        )


# Ranks.


def train_rank(rank, world, name):
    """The state after some updates, without and with the compiler."""
    states = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Block(name)
        model.norm.sync = True
        wrapped = DistributedDataParallel(model)
        call = torch.compile(wrapped, backend="aot_eager") if compiled else wrapped
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(rank + 1)
        for update in range(4):
            tell_updates(model, update)
            optimizer.zero_grad()
            call(*batch(4 + rank + update)).square().mean().backward()
            optimizer.step()
        states.append(model.state_dict())
    return states


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch", "power"])
def test_ranks(name):
    for plain, compiled in run_ranks(train_rank, 2, name):
        for key, value in plain.items():
            assert_close(compiled[key], value, rtol=1e-6, atol=1e-6, msg=key)
