"""What :mod:`benchmarks.gpu` measures: a function of a :class:`Kit` for each section.

A section runs in a process of its own, or in several. It sends each row of a table as soon as it is
measured, so that a section that is cut off keeps what it has.
"""

import gc
import itertools
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import hide_messages
from benchmarks.norms import DTYPES, Gathered, Unmasked
from benchmarks.results import in_turns, quartiles, ratios
from pn_fairseq import kernels
from pn_fairseq.kernels import ops
from pn_fairseq.kernels.first_use import TOLERANCE, difference
from pn_fairseq.norms import NORMS, RunningNorm, build_norm, convert_norms, set_loss_scale
from pn_fairseq.norms.core.base import running_norms

EPS = 1e-5
ALPHA = 0.9
#: Layer-scale groups of what has +LS.
GROUPS = 4


class Kit:
    """Where a section computes, which of its cases are its own, and where its rows go.

    Attributes:
        tiny: whether this is a dry run on the CPU, with small sizes.
        device: where the section computes.
        part, parts: of all cases this process measures number ``part``, ``part + parts``, ...
        send: takes a message to the process that writes the table.
        only_compile: every kernel is called once and nothing is measured.
        failed: whether a case has failed.
    """

    def __init__(self, tiny: bool, part: int, parts: int, send: Callable[[tuple], None]):
        self.tiny = tiny
        self.part = part
        self.parts = parts
        self.send = send
        self.device = torch.device("cpu" if tiny else "cuda")
        self.only_compile = False
        self.failed = False

    def own(self, cases: Iterable) -> list:
        """The cases that this process measures."""
        return list(cases)[self.part :: self.parts]

    def row(self, table: str, **values: object) -> None:
        """Add a row to a table."""
        if not self.only_compile:
            self.send(("row", table, values))

    def note(self, text: str) -> None:
        """Add a line to the section."""
        if not self.only_compile:
            self.send(("note", text))

    @contextmanager
    def trying(self, case: str) -> Iterator[None]:
        """A case whose error becomes a line of the section; the next case begins."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed = True
            self.send(("note", f"{case} failed: {first_line(error)}"))

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def times(self, call: Callable[[], object], calls: int, rounds: int) -> tuple[float, float]:
        """Median microseconds of a call: until it is issued, and until its results are there.

        A round is ``calls`` calls on an idle GPU. On a CPU both times are the same.
        """
        call()
        if self.only_compile:
            return 1.0, 1.0
        issued = []
        finished = []
        for _ in range(rounds):
            self.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            issued.append((time.perf_counter() - begin) / calls * 1e6)
            self.synchronize()
            finished.append((time.perf_counter() - begin) / calls * 1e6)
        return statistics.median(issued), statistics.median(finished)

    def captured(self, call: Callable[[], object], calls: int = 1) -> Callable[[], None]:
        """Run ``call`` once, and return what repeats it ``calls`` times: a CUDA graph's replay."""
        if self.device.type == "cpu":
            call()
            return partial(_repeat, call, calls)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        return graph.replay

    def device_time(self, call: Callable[[], object]) -> float:
        """Median microseconds of a call on the device, without the host's part."""
        if self.device.type == "cpu" or self.only_compile:
            return self.times(call, 1, 3)[1]
        calls = 10
        replay = self.captured(call, calls)
        found = []
        for _ in range(9):
            first = torch.cuda.Event(enable_timing=True)
            last = torch.cuda.Event(enable_timing=True)
            first.record()
            replay()
            last.record()
            torch.cuda.synchronize()
            found.append(first.elapsed_time(last) * 1000 / calls)
        return statistics.median(found[2:])


def _repeat(call: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        call()


def first_line(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    if lines:
        return f"{type(error).__name__}: {lines[0]}"
    return type(error).__name__


def training_step(module: nn.Module, given: tuple, dy: Tensor) -> Callable[[], None]:
    """A forward of ``module`` on ``given``, whose first tensor needs a gradient, and a backward."""
    leaf = given[0]

    def step() -> None:
        leaf.grad = None
        module.zero_grad(set_to_none=True)
        module(*given).backward(dy)

    return step


def watched(module: nn.Module) -> nn.Module:
    """Let the norms of ``module`` collect diagnostics, as ``pn train`` does."""
    for norm in running_norms(module):
        norm.collecting = True
    return module


# Every norm against float64.

CHECK = "Norms against float64"
#: Column: a difference as a share of its tolerance.
SHARE = "of the tolerance"
CHECKED_CHANNELS = 64
TRAINING_STEPS = 6


def modules() -> list[tuple[str, str, int]]:
    """Name, variant and layer-scale groups of each norm that is checked."""
    found = []
    for name, entry in NORMS.items():
        for variant in ("paper", *entry.variants):
            for groups in (0, GROUPS):
                found.append((name, variant, groups))
    return found


def check_norms(kit: Kit) -> None:
    """Six training steps and an evaluation of every norm, variant and layer-scale, compared with
    the same module on a CPU in float64: y, dx, the gradients of vectors, the state.
    """
    for (name, variant, groups), dtype in kit.own(itertools.product(modules(), DTYPES)):
        label = f"{name}, {variant}{', +LS' if groups else ''}"
        with kit.trying(f"{label}, {dtype}"):
            results = []
            for device, wide in ((kit.device, DTYPES[dtype]), (torch.device("cpu"), torch.float64)):
                norm = _checked_norm(name, variant, groups).to(device)
                if wide == torch.float64:
                    norm.double()
                results.append(_trained(norm, DTYPES[dtype], wide, device))
            largest, where = _largest_difference(*results)
            tolerance = TOLERANCE[DTYPES[dtype]]
            row = {"dtype": dtype, "module": label, "largest difference": largest}
            kit.row(CHECK, **row, tolerance=tolerance, where=f"{where} of {label}")


def _checked_norm(name: str, variant: str, groups: int) -> nn.Module:
    options = {"groups": GROUPS, "fade_updates": 4, "renorm_updates": 4}
    return build_norm(name, CHECKED_CHANNELS, variant=variant, layer_scale_groups=groups, **options)


def _trained(
    norm: nn.Module, dtype: torch.dtype, wide: torch.dtype, device: torch.device
) -> list[dict[str, Tensor]]:
    """What each step and the evaluation give. The batches have ``dtype`` and are computed in
    ``wide``.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(TRAINING_STEPS):
        x, dy = torch.randn(2, 33, 9, CHECKED_CHANNELS, generator=generator).to(dtype)
        mask = (torch.rand(9, 33, generator=generator) < 0.3).to(device)
        leaf = x.to(device, wide).requires_grad_()
        norm.zero_grad()
        y = norm(leaf, mask)
        y.backward(dy.to(device, wide))
        results = {"y": y.detach(), "dx": leaf.grad}
        for key, parameter in norm.named_parameters():
            if parameter.numel() > 1:  # the gradient of one number is a sum that may cancel
                results[f"d{key}"] = parameter.grad
        for key, buffer in norm.named_buffers():
            results[key] = buffer.clone()
        found.append(results)
    norm.eval()
    with torch.no_grad():
        found.append({"y in evaluation": norm(leaf.detach(), mask)})
    return found


def _largest_difference(
    results: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]
) -> tuple[float, str]:
    """The largest norm of a difference divided by the norm of what is expected, and its name."""
    largest = 0.0
    where = "nothing"
    for step, wanted in zip(results, expected, strict=True):
        for key, value in wanted.items():
            exact = value.double()
            error = (step[key].cpu().double() - exact).norm()
            off = float(error / exact.norm().clamp(min=1e-30))
            if not off <= largest:
                largest = off
                where = key
    return largest, where


def summary_of_check(rows: list[dict]) -> list[dict]:
    """A row for each dtype: its worst module."""
    found = []
    for dtype in DTYPES:
        own = [row for row in rows if row["dtype"] == dtype]
        if not own:
            continue
        worst = max(own, key=_of_tolerance)
        found.append(
            {
                "dtype": dtype,
                "modules": len(own),
                "largest difference": worst["largest difference"],
                SHARE: _of_tolerance(worst),
                "where": worst["where"],
            }
        )
    return found


def _of_tolerance(row: dict) -> float:
    share = row["largest difference"] / row["tolerance"]
    return share if share == share else float("inf")


# One rank that is told that it has two.

RANKS = "One rank that sums as two"


def one_rank_as_two(kit: Kit) -> None:
    """Norms with synchronized statistics in a group of one rank that is told that it has two, so
    that every all-reduce runs; the results are those without synchronization.
    """
    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if kit.tiny else "nccl"
        store = f"file://{folder}/store"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        try:
            for name in ("batch", "power-v", "power"):
                with kit.trying(name):
                    results = [_summed(kit, name, sync) for sync in (True, False)]
                    largest = max(difference(*pair) for pair in zip(*results, strict=True))
                    share = largest / TOLERANCE[torch.float32]
                    row = {"backend": backend, "largest difference": largest}
                    kit.row(RANKS, norm=name, **row, **{SHARE: share})
        finally:
            dist.destroy_process_group()


def _summed(kit: Kit, name: str, sync: bool) -> list[tuple[Tensor, ...]]:
    norm = build_norm(name, CHECKED_CHANNELS, sync=sync).to(kit.device)
    found = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x, dy = torch.randn(2, 33, 9, CHECKED_CHANNELS, generator=generator).to(kit.device)
        mask = (torch.rand(9, 33, generator=generator) < 0.3).to(kit.device)
        x.requires_grad_()
        two_ranks = patch("pn_fairseq.norms.core.base.world_size", lambda group=None: 2)
        with two_ranks if sync else nullcontext():
            y = norm(x, mask)
            y.backward(dy)
        buffers = [buffer.clone() for buffer in norm.buffers()]
        found.append((y.detach(), x.grad, *buffers))
    return found


# CUDA graphs.

REPLAYS = "Replays of a CUDA graph of a training step"
REPLAYED = {
    "pn": ("power", {}),
    "pn +LS": ("power", {"layer_scale_groups": GROUPS}),
    "pn, psi warm-up": ("power", {"psi_warmup_updates": 100}),
    "pnv": ("power-v", {}),
    "bn": ("batch", {}),
    "brn": ("batch-renorm", {"renorm_updates": 4}),
    "mabn": ("mabn", {}),
    "un": ("unified", {}),
    "rbn": ("batch-reg", {}),
    "prepbn": ("prep-batch", {"fade_updates": 4}),
}


def replays(kit: Kit) -> None:
    """A training step is captured and replayed five times; an equal module makes as many steps
    without a graph. On a CPU the step itself takes the place of the graph.
    """
    for label, (name, options) in REPLAYED.items():
        with kit.trying(label):
            x, dy = torch.randn(2, 64, 8, 128, device=kit.device)
            mask = torch.rand(8, 64, device=kit.device) < 0.1
            results = []
            for by_graph in (True, False):
                norm = watched(build_norm(name, 128, **options).to(kit.device))
                step = training_step(norm, (x.clone().requires_grad_(), mask), dy)
                replay = kit.captured(step) if by_graph else step
                for _ in range(5 if by_graph else 6):
                    replay()
                kit.synchronize()
                results.append(tuple(norm.buffers()))
            counted = int(results[0][-1])
            row = {"steps": 6, "counted": counted, "missed": 6 - counted}
            kit.row(REPLAYS, norm=label, **row, **{"state differs by": difference(*results)})


# Kernels that are measured later.


def warm(kit: Kit) -> None:
    """Compile, in many processes at once, what the other sections measure."""
    from torch._inductor import config as inductor_config  # 2 seconds

    kit.only_compile = True
    inductor_config.compile_threads = 1  # or each of the many processes starts one for each core
    first = kit.part
    for number, measure in enumerate((updates, compiled, inductor, bandwidth, steps)):
        kit.part = (first + 5 * number) % kit.parts  # no process gets the first case of all
        with kit.trying(measure.__name__):
            measure(kit)


# A step of one norm.

STEPS = "A training step of one norm, 4096 tokens, 128 channels, float32"


def _contestants(channels: int) -> dict[str, nn.Module]:
    """torch's norms and all of this project's; those with state also with diagnostics."""
    found: dict[str, nn.Module] = {"torch LN": Unmasked(nn.LayerNorm(channels))}
    found["torch BatchNorm1d"] = Gathered(channels)
    for name, entry in NORMS.items():
        norm = build_norm(name, channels, groups=GROUPS)
        found[entry.short] = norm
        if isinstance(norm, RunningNorm):
            found[f"{entry.short}, diagnostics"] = watched(build_norm(name, channels))
    scaled = build_norm("power", channels, layer_scale_groups=GROUPS)
    found["pn +LS, diagnostics"] = watched(scaled)
    return found


def steps(kit: Kit) -> None:
    """Launches, time on the device and time on the host of a forward and a backward."""
    calls, rounds = (2, 2) if kit.tiny else (50, 15)
    timed = []
    for label, module in kit.own(_contestants(128).items()):
        with kit.trying(label):
            step = _step(kit, module)
            host, _ = kit.times(step, calls, rounds)
            timed.append((label, step, host))
    if kit.only_compile:
        return
    # The profiler comes after all host times: once loaded, it can slow down every later launch.
    for label, step, host in timed:
        with kit.trying(label):
            row = {"launches": _launches(kit, step), "device, µs": kit.device_time(step)}
            kit.row(STEPS, norm=label, **row, **{"host, µs": host})


def _step(kit: Kit, module: nn.Module) -> Callable[[], None]:
    length, sentences = (8, 8) if kit.tiny else (128, 32)
    module.to(kit.device)
    x, dy = torch.randn(2, length, sentences, 128, device=kit.device)
    mask = torch.zeros(sentences, length, dtype=torch.bool, device=kit.device)
    mask[:, -length // 8 :] = True
    given = (x.requires_grad_(), None if isinstance(module, Gathered) else mask)
    return training_step(module, given, dy)


def _launches(kit: Kit, step: Callable[[], None]) -> int | None:
    """Kernels, copies and fills of a step on the GPU."""
    if kit.device.type == "cpu":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == on_gpu for event in seen.events())


# Updates of whole models.

UPDATES = "An update of a whole model: ms with LN, times LN with the others"
LN = "ln"
LN_AGAIN = "ln again"
DIAGNOSTICS = "pn, diagnostics"


def updates(kit: Kit) -> None:
    """Models with LN, BN, PN, RMSNorm, PN with diagnostics as ``pn train`` runs it, and LN once
    more, in turns on the same batches.
    """
    rounds = {"tiny": 2} if kit.tiny else {"tiny": 40, "iwslt": 25}
    dtypes = ["float32"] if kit.tiny else ["bfloat16", "float32", "float16"]
    trainer = "fairseq"
    make = fairseq_updates
    try:
        import fairseq  # noqa: F401
    except Exception as error:  # one that is there can fail in many ways
        trainer = "torch"
        make = torch_updates
        kit.note(f"Updates are of torch.nn.Transformer: no fairseq ({first_line(error)})")
    for size, dtype in kit.own(itertools.product(rounds, dtypes)):
        with kit.trying(f"{size}, {dtype}"):
            work = make(kit, size, dtype)
            if kit.only_compile:
                for update in work.values():
                    update(0)
                continue
            seconds = in_turns(work, rounds[size], warm=1 if kit.tiny else 4)
            row = {"LN, ms": quartiles(seconds[LN])[1] * 1e3}
            for name, own in seconds.items():
                row[name] = ratios(own, seconds[LN])[1]
            kit.row(UPDATES, model=size, dtype=dtype, trainer=trainer, **row)


Update = Callable[[int], object]


def fairseq_updates(kit: Kit, size: str, dtype: str) -> dict[str, Update]:
    """An update by fairseq's trainer for each model."""
    from benchmarks import training

    words = ["--size", size, "--device", kit.device.type]
    if kit.tiny:
        words += "--tokens 48 --length 6 --vocabulary 50".split()
    args = training.parse(words)
    batches = training.make_batches(args)
    found = {}
    for name, norm in {**_updated_norms(), LN_AGAIN: LN}.items():
        trainer = training.make_trainer(norm, dtype, args)
        if name == DIAGNOSTICS:
            watched(trainer.get_model())
        found[name] = partial(training.update_by, trainer, batches)
    return found


def _updated_norms() -> dict[str, str]:
    """What is compared -> the abbreviation of its norm."""
    return {LN: LN, "bn": "bn", "pn": "pn", "rms": "rms", DIAGNOSTICS: "pn"}


@dataclass(frozen=True)
class Size:
    """Sizes of a model: those of fairseq's architecture of the same name."""

    channels: int
    inner: int
    heads: int
    layers: int


SIZES = {"tiny": Size(128, 256, 4, 3), "iwslt": Size(512, 1024, 4, 6)}


class TorchModel(nn.Module):
    """A pre-norm ``torch.nn.Transformer`` whose encoder has the norm abbreviated ``short``."""

    def __init__(self, size: Size, short: str, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size.channels)
        options = {"dropout": 0.3, "batch_first": True, "norm_first": True}
        layers = size.layers, size.layers
        self.transformer = nn.Transformer(size.channels, size.heads, *layers, size.inner, **options)
        if short != LN:
            (name,) = (name for name, entry in NORMS.items() if entry.short == short)
            options = {"psi_warmup_updates": 0, "layer_scale_groups": size.heads}
            encoder = self.transformer.encoder
            mask = {"mask_from": "src_key_padding_mask", "layout": "BTC"}
            convert_norms(encoder, name, **mask, **(options if short == "pn" else {}))

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        future = nn.Transformer.generate_square_subsequent_mask(
            target.size(1), device=target.device
        )
        y = self.transformer(
            self.embedding(source),
            self.embedding(target),
            tgt_mask=future,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return functional.linear(y, self.embedding.weight)


def torch_updates(kit: Kit, size: str, dtype: str) -> dict[str, Update]:
    """The same with ``torch.nn.Transformer``, Adam and autocast, where there is no fairseq."""
    found: dict[str, Update] = {}
    for name, short in {**_updated_norms(), LN_AGAIN: LN}.items():
        torch.manual_seed(1)
        vocabulary = 50 if kit.tiny else 10000
        model = TorchModel(SIZES[size], short, vocabulary).to(kit.device)
        if name == DIAGNOSTICS:
            watched(model)
        found[name] = _torch_update(kit, model, vocabulary, DTYPES[dtype])
    return found


def _torch_update(kit: Kit, model: nn.Module, vocabulary: int, dtype: torch.dtype) -> Update:
    sentences, length = (8, 6) if kit.tiny else (128, 32)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, vocabulary, (2, sentences, length), generator=generator)
    source, target = tokens.to(kit.device)
    padding = torch.zeros(sentences, length, dtype=torch.bool, device=kit.device)
    padding[::5, length // 2 :] = True
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler(kit.device.type, 4.0, enabled=dtype == torch.float16)
    if scaler.is_enabled():
        set_loss_scale(model, scaler)

    def update(_: int) -> None:
        with torch.autocast(kit.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(source, target, padding)
            loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        kit.synchronize()

    return update


# The reference's formulas compiled by inductor, beside Triton.

#: Columns: inductor's time as a multiple of Triton's.
ON_DEVICE = "inductor, device"
ON_HOST = "inductor, host"
INDUCTOR = "The reference compiled by inductor, beside Triton: forward and backward"


@dataclass
class Batch:
    """Arguments of the operators of the norms."""

    x: Tensor
    dy: Tensor
    mask: Tensor
    vectors: Tensor
    number: Tensor

    @classmethod
    def of(cls, kit: Kit, rows: int, channels: int, dtype: str) -> "Batch":
        generator = torch.Generator(kit.device).manual_seed(0)
        like = {"generator": generator, "device": kit.device}
        x, dy = (torch.randn(rows, channels, dtype=DTYPES[dtype], **like) for _ in range(2))
        mask = torch.rand(rows, **like) < 0.1
        vectors = torch.rand(5, channels, **like) + 0.5
        return cls(x, dy, mask, vectors, torch.zeros((), dtype=torch.int64, device=kit.device))


#: An implementation of each operator, by name.
Operators = dict[str, Callable]
#: Forward, backward -> their results.
Passes = tuple[Callable[[], tuple], Callable[[], tuple]]


def pn_passes(by: Operators, batch: Batch, groups: int = 0) -> Passes:
    """PN after its warm-up: it reads x and writes y; it reads x and dy, writes dx and moves the
    state.
    """
    x = batch.x
    dy = batch.dy
    mask = batch.mask
    weight, bias, psi2, nu, _ = batch.vectors
    state = psi2.clone(), nu.clone(), batch.number.clone(), None
    given = x, weight, bias, None, psi2, mask, None, groups, EPS, True
    _, inv_rms, batch_psi2, count = by["normalize"](*given)
    of_forward = weight, psi2, nu, None, inv_rms
    step = dy, x, mask, *of_forward, *state, batch_psi2, count, groups, EPS, 0, ALPHA, ALPHA
    return partial(by["normalize"], *given), partial(by["power_step_"], *step)


def bn_passes(by: Operators, batch: Batch) -> Passes:
    """BN: two passes over the tokens each way."""
    x = batch.x
    dy = batch.dy
    mask = batch.mask
    weight, bias, variance, mean, _ = batch.vectors
    given = x, weight, bias, mask, 0, EPS, True
    _, inv_rms, batch_mean, moment, count = by["batch_normalize"](*given)
    of_forward = weight, batch_mean, moment, count, None, inv_rms
    state = variance.clone(), mean.clone(), batch.number.clone(), None
    step = dy, x, mask, *of_forward, *state, 0, EPS, ALPHA, True
    return partial(by["batch_normalize"], *given), partial(by["batch_step_"], *step)


def rms_passes(by: Operators, batch: Batch) -> Passes:
    """RMSNorm: layer-scale with one group and a gain."""
    weight = batch.vectors[0]
    given = batch.x, weight, None, None, None, None, None, 1, EPS, False
    inv_rms = by["normalize"](*given)[1]
    nothing = None, None, None, None, None, None
    step = batch.dy, batch.x, None, weight, *nothing, inv_rms, 1, EPS, True
    return partial(by["normalize"], *given), partial(by["gradient"], *step)


def ln_passes(by: Operators, batch: Batch) -> Passes:
    """LayerNorm of this project."""
    weight, bias = batch.vectors[:2]
    options = True, 1.0, EPS, 0.0, 0.0, 1.0, 0.0
    given = batch.x, weight, bias, 1, *options
    stats = by["standardize"](*given)[1]
    step = batch.dy, batch.x, weight, stats, 1, 1.0, 0.0, True, True, True
    return partial(by["standardize"], *given), partial(by["standardize_gradient"], *step)


def torch_ln_passes(batch: Batch) -> Passes:
    """LayerNorm of torch, in the type of x."""
    weight, bias = batch.vectors[:2].to(batch.x.dtype)
    given = batch.x, weight.shape, weight, bias, EPS
    _, mean, inverse = torch.native_layer_norm(*given)
    step = batch.dy, batch.x, weight.shape, mean, inverse, weight, bias, (True, True, True)
    backward = torch.ops.aten.native_layer_norm_backward.default
    return partial(torch.native_layer_norm, *given), partial(backward, *step)


def own_operators() -> Operators:
    """The operators as the norms call them: by Triton on a GPU."""
    return {name: getattr(ops, name) for name in kernels.OPERATORS}


def compiled_operators(kit: Kit) -> Operators:
    """The reference, compiled."""
    backend = "aot_eager" if kit.tiny else "inductor"
    found = {}
    for name, function in kernels.OPERATORS.items():
        found[name] = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
    return found


def inductor(kit: Kit) -> None:
    """PN, BN and RMSNorm by Triton and by the compiled reference: device and host time."""
    if kit.tiny:
        shapes = [(64, 32)]
    else:
        shapes = [(4096, 512), (32768, 1024)]
    dtypes = ["float32"] if kit.tiny else ["float32", "bfloat16"]
    norms = {"pn": pn_passes, "bn": bn_passes, "rms": rms_passes}
    calls, rounds = (1, 2) if kit.tiny else (50, 9)
    for (name, passes), shape, dtype in kit.own(itertools.product(norms.items(), shapes, dtypes)):
        with kit.trying(f"{name}, {shape}, {dtype}"):
            torch._dynamo.reset()
            device = {}
            host = {}
            results = []
            for label, by in (("Triton", own_operators()), ("inductor", compiled_operators(kit))):
                batch = Batch.of(kit, *shape, dtype)
                forward, backward = passes(by, batch)
                results.append((*forward(), *backward()))
                device[label] = kit.device_time(forward) + kit.device_time(backward)
                issued_forward, _ = kit.times(forward, calls, rounds)
                issued_backward, _ = kit.times(backward, calls, rounds)
                host[label] = issued_forward + issued_backward
            row = {"Triton, device, µs": device["Triton"], "Triton, host, µs": host["Triton"]}
            row[ON_DEVICE] = device["inductor"] / device["Triton"]
            row[ON_HOST] = host["inductor"] / host["Triton"]
            row["results differ by"] = difference(*results)
            kit.row(INDUCTOR, norm=name, shape=_times(shape), dtype=dtype, **row)


def _times(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


# Bandwidth.

BANDWIDTH = "Share of a copy's bandwidth"
#: The shape that the goal is about.
LARGE = (131072, 1024)
#: Rows and channels: a tiny model's, the paper's, large ones; many tokens of few channels, and the
#: reverse.
SHAPES = [
    LARGE,
    (4096, 128),
    (4096, 512),
    (32768, 512),
    (1 << 20, 64),
    (1 << 21, 16),
    (16384, 4096),
    (16384, 5120),
    (16384, 8192),
]
#: The tensors of the size of x that a forward and a backward read and write.
MOVED = {
    "PN": (2, 3),
    "PN +LS": (2, 3),
    "BN": (3, 5),
    "LN": (2, 3),
    "RMS": (2, 3),
    "torch LN": (2, 3),
}
KERNEL_COLUMNS = tuple(f"{name} {way}" for name in MOVED for way in ("forward", "backward"))
OWN_COLUMNS = tuple(column for column in KERNEL_COLUMNS if not column.startswith("torch"))


def bandwidth(kit: Kit) -> None:
    """Bytes that a forward and a backward have to move, over their time on the device, as a share
    of what a copy reaches.
    """
    shapes = [(64, 32)] if kit.tiny else SHAPES
    for shape, dtype in kit.own(itertools.product(shapes, ("float32", "bfloat16"))):
        with kit.trying(f"{shape}, {dtype}"):
            batch = Batch.of(kit, *shape, dtype)
            by = own_operators()
            y = torch.empty_like(batch.x)
            copy = kit.device_time(partial(y.copy_, batch.x))
            row = {"copy, GB/s": 2 * y.nbytes / copy / 1e3}
            passes = {
                "PN": pn_passes(by, batch),
                "PN +LS": pn_passes(by, batch, GROUPS),
                "BN": bn_passes(by, batch),
                "LN": ln_passes(by, batch),
                "RMS": rms_passes(by, batch),
                "torch LN": torch_ln_passes(batch),
            }
            for name, both in passes.items():
                ways = zip(("forward", "backward"), both, MOVED[name], strict=True)
                for way, call, moved in ways:
                    row[f"{name} {way}"] = moved / 2 * copy / kit.device_time(call)
            kit.row(BANDWIDTH, shape=_times(shape), dtype=dtype, **row)


# torch.compile.

COMPILED = "A compiled encoder of 6 layers, 256 channels, 1024 tokens"
MODES = ("reduce-overhead", "default", "eager")


def compiled(kit: Kit) -> None:
    """Training steps of an encoder with PN and with LN, by mode of torch.compile, and how many of
    them the state of PN has counted.
    """
    calls, rounds = (1, 1) if kit.tiny else (20, 5)
    for name, mode in kit.own(itertools.product(("power", "layer"), MODES)):
        with kit.trying(f"{name}, {mode}"):
            torch._dynamo.reset()
            encoder = _encoder(kit, name)
            x = encoder.batch().to(kit.device).requires_grad_()
            called = encoder
            if mode != "eager":
                backend = "aot_eager" if kit.tiny else "inductor"
                if kit.tiny or mode == "default":
                    how = {"backend": backend}
                else:
                    how = {"mode": mode}
                called = torch.compile(encoder, **how)
            step = training_step(called, (x,), torch.randn_like(x))
            begin = time.perf_counter()
            for _ in range(3):
                step()
            kit.synchronize()
            first = time.perf_counter() - begin
            counted = {int(norm.num_batches_tracked) for norm in running_norms(encoder)}
            row = {"counted of 3": ", ".join(map(str, sorted(counted)))}
            row["missed"] = 3 - min(counted) if counted else None
            row["step, µs"] = kit.times(step, calls, rounds)[1]
            row["first 3 steps, s"] = first
            kit.row(COMPILED, norm=name, mode=mode, **row)


def _encoder(kit: Kit, name: str) -> nn.Module:
    from benchmarks.compile import Encoder

    sizes = {"sentences": 2, "channels": 16, "layers": 1} if kit.tiny else {}
    return Encoder(name, **sizes).to(kit.device).train()


# Processes.


@dataclass(frozen=True)
class Section:
    """A part of the kit.

    Attributes:
        name: as in the table of sections.
        seconds: how long it may take; more if other sections leave time.
        measure: sends its rows to a :class:`Kit`.
        parts: the processes that share its cases.
        summary: makes of the rows what the page shows.
    """

    name: str
    seconds: float
    measure: Callable[[Kit], None]
    parts: int = 1
    summary: Callable[[list[dict]], list[dict]] | None = None


#: What is wanted most comes first. The seconds add up to 520.
SECTIONS = (
    Section("norms", 90, check_norms, parts=14, summary=summary_of_check),
    Section("ranks", 15, one_rank_as_two),
    Section("replays", 25, replays),
    Section("warm", 75, warm, parts=14),
    Section("updates", 120, updates),
    Section("inductor", 55, inductor),
    Section("steps", 30, steps),
    Section("bandwidth", 50, bandwidth),
    Section("compiled", 60, compiled),
)


def run(section: Section, tiny: bool, part: int, parts: int, log: Path, connection) -> None:
    """What the process of a part does: measure, and send rows, notes and errors."""
    os.setsid()  # what it starts ends with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with log.open("a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    hide_messages()
    torch.set_num_threads(1)
    gc.freeze()  # or every capture of a CUDA graph looks for garbage in all that was imported
    kit = Kit(tiny, part, parts, connection.send)
    with kit.trying(section.name):
        section.measure(kit)
        check_kernels(kit)
    connection.close()
    print(f"{section.name}, part {part}: {time.process_time():.0f} s of a processor")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(kit.failed))  # the threads of NCCL and of inductor may not end


def check_kernels(kit: Kit) -> None:
    """Raise RuntimeError if not Triton but the reference has computed on the GPU."""
    used, reason = kernels.describe()[kit.device.type.upper()]
    if used == "reference":
        raise RuntimeError(f"plain PyTorch computed in place of the kernels ({reason})")


def _end_with_parent() -> None:
    parent_process().join()
    os.killpg(0, signal.SIGKILL)
