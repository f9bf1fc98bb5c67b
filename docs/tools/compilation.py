"""Training with and without ``torch.compile``, compared: for tests, and for the table in
docs/own_model.md.
"""

import copy

import torch

from pn_fairseq.norms import NORMS, build_norm, running_norms

CHANNELS = 8

#: Mode of the table -> backend, dtype, and ``dynamic`` of torch.compile.
MODES = {
    "aot_eager, float32": ("aot_eager", torch.float32, None),
    "aot_eager, bfloat16": ("aot_eager", torch.bfloat16, None),
    "aot_eager, dynamic": ("aot_eager", torch.float32, True),
    "inductor, float32": ("inductor", torch.float32, None),
    "inductor, bfloat16": ("inductor", torch.bfloat16, None),
}

#: Lengths of the batches: the third one is the second length.
LENGTHS = (5, 5, 6, 4, 7, 9)


def results(model, call, batches) -> list[torch.Tensor]:
    """y of the last batch, the gradients of x and of the parameters, summed over ``batches``,
    and the state.
    """
    model.zero_grad()
    gradients = []
    for x, *arguments in batches:
        leaf = x.detach().clone().requires_grad_()
        y = call(leaf, *arguments)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
        gradients.append(leaf.grad)
    parameters = [
        torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()
    ]
    return [y.detach(), *gradients, *parameters, *(buffer.clone() for buffer in model.buffers())]


def deviation(one: list[torch.Tensor], two: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest value of a result or to 1."""
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1.0))
        for a, b in zip(one, two, strict=True)
    )


def compare(
    model, updates, backend="aot_eager", dynamic=None, before_update=lambda model, number: None
):
    """Graphs, breaks and largest deviation of ``model`` when compiled; ``updates`` are lists of
    batches.

    ``before_update(model, number)`` runs before each update of each of the two models.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, other = model, copy.deepcopy(model)
    compiled = torch.compile(other, backend=backend, fullgraph=True, dynamic=dynamic)
    worst = 0.0
    for number, batches in enumerate(updates):
        for each in (eager, other):
            before_update(each, number)
        worst = max(
            worst, deviation(results(other, compiled, batches), results(eager, eager, batches))
        )
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), worst


def tell_updates(model, number):
    for norm in running_norms(model):
        norm.set_num_updates(number)


def batch(length, sentences=3, dtype=torch.float32, channels=CHANNELS):
    """x, (length, sentences, channels), and a mask of which one sentence is complete."""
    lengths = torch.randint(1, length + 1, (sentences,))
    lengths[0] = length
    return torch.randn(length, sentences, channels).to(dtype), torch.arange(length) >= lengths[
        :, None
    ]


def measure(name: str, mode: str, variant: str = "paper") -> tuple[int, int, float]:
    """:func:`compare` for the norm ``name`` through its warm-up and schedules."""
    backend, dtype, dynamic = MODES[mode]
    torch.manual_seed(0)
    norm = build_norm(
        name, CHANNELS, variant, psi_warmup_updates=2, renorm_updates=4, fade_updates=3
    ).to(dtype)
    updates = [[batch(length, dtype=dtype)] for length in LENGTHS]
    return compare(norm, updates, backend, dynamic, tell_updates)


def table_of_compiled_norms() -> str:
    """Breaks, graphs and deviation of every norm by mode, as Markdown."""
    lines = ["| norm | " + " | ".join(MODES) + " |", "|---" + "|---" * len(MODES) + "|"]
    for name in NORMS:
        cells = []
        for mode, (backend, dtype, _) in MODES.items():
            graphs, breaks, worst = measure(name, mode)
            # Whether the code of inductor gives the very same bits depends on the processor.
            bounds = (1e-6, 1e-2, 1e-1) if backend == "inductor" else (0, 1e-6, 1e-2, 1e-1)
            bound = next(bound for bound in bounds if worst <= bound)
            assert bound <= 1e-6 or dtype == torch.bfloat16, (name, mode, worst)
            cells.append(
                f"{breaks}, {graphs}, {f'< {bound:.0e}' if bound else '0'}".replace("e-0", "e-")
            )
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)
