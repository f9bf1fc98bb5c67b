"""What the output of a norm does not change under, computed for every norm: the table in
docs/theory.md.

The norm stands behind a linear map: its input is W x for the tokens x of a data set. The state of a
norm, if it has any, is what training on this data set with these weights leads to.
"""

import numpy as np
import torch

from pn_fairseq.norms import NORMS, RunningNorm, build_norm
from pn_fairseq.norms.registry import HEADS

CHANNELS = 12
INPUTS = 7
TOKENS = 40
GROUPS = 4


def _scaled(values: np.ndarray, row: int) -> np.ndarray:
    values = values.copy()
    values[row] *= 3
    return values


#: Column of the table -> weights (C, I) and data (N, I) after the change.
CHANGES = {
    "all weights scaled": lambda weights, data, by: (3 * weights, data),
    "all weights shifted": lambda weights, data, by: (weights + by, data),
    "weights of one channel scaled": lambda weights, data, by: (_scaled(weights, 0), data),
    "data set scaled": lambda weights, data, by: (weights, 3 * data),
    "data set shifted": lambda weights, data, by: (weights, data + by),
    "single token scaled": lambda weights, data, by: (weights, _scaled(data, 0)),
}

#: Row of the table -> name and layer-scale groups of the norm.
ROWS = {f"`{name}`": (name, 0) for name in NORMS}
for name, entry in NORMS.items():
    if entry.default("layer_scale_groups") is HEADS:
        ROWS[f"`{name}` after layer-scale"] = (name, GROUPS)


def _outputs(
    name: str, layer_scale_groups: int, weights: np.ndarray, data: np.ndarray
) -> list[torch.Tensor]:
    """y of all tokens in training, when warm-ups and schedules are over, and in evaluation."""
    options = {"layer_scale_groups": layer_scale_groups, "groups": GROUPS}
    norm = build_norm(name, CHANNELS, eps=1e-12, alpha_fwd=0.5, **options).double()
    x = torch.tensor(data @ weights.T)
    if isinstance(norm, RunningNorm):
        for _ in range(40):  # 0.5^40 of the initial state is left
            norm(x.clone().requires_grad_()).sum().backward()
        norm.set_num_updates(10**6)
    return [norm(x).detach(), norm.eval()(x).detach()]


def invariances(name: str, layer_scale_groups: int = 0) -> dict[str, bool]:
    """Column -> whether y stays the same, in training and in evaluation; of a single token, the y
    of this token.

    Raises:
        AssertionError: training and evaluation differ, or a change of y is neither rounding nor
            clear.
    """
    generator = np.random.default_rng(5)
    weights = generator.normal(size=(CHANNELS, INPUTS))
    data = generator.normal(size=(TOKENS, INPUTS)) + 0.5
    shift = generator.normal(size=INPUTS)
    before = _outputs(name, layer_scale_groups, weights, data)
    found = {}
    for column, change in CHANGES.items():
        after = _outputs(name, layer_scale_groups, *change(weights, data, shift))
        tokens = slice(0, 1) if column == "single token scaled" else slice(None)
        changes = []
        for one, two in zip(before, after, strict=True):
            changes.append(float((one[tokens] - two[tokens]).abs().max()))
        found[column] = max(changes) < 1e-5
        assert found[column] or min(changes) > 1e-2, (name, column, changes)
    return found


def marks(found: dict[str, bool]) -> list[str]:
    return ["✓" if same else "–" for same in found.values()]


def table_of_invariances() -> str:
    """As Markdown."""
    lines = [f"| {' | '.join(['norm', *CHANGES])} |", "|---" + "|:---:" * len(CHANGES) + "|"]
    for title, row in ROWS.items():
        lines.append(f"| {' | '.join([title, *marks(invariances(*row))])} |")
    return "\n".join(lines)
