"""``pn check``: the operators of every implementation that this machine can run, against the
reference.
"""

import torch

from pn_fairseq.kernels.first_use import TOLERANCE, difference, results_of, samples
from pn_fairseq.kernels.ops import OPERATORS
from pn_fairseq.kernels.selection import IMPLEMENTATIONS, available, using


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _errors(implementation: str, device: str) -> dict[str, dict[torch.dtype, float]]:
    """Operator -> type -> the largest relative difference to the reference."""
    errors: dict[str, dict] = {name: dict.fromkeys(TOLERANCE, 0.0) for name in OPERATORS}
    for dtype in TOLERANCE:
        for name, arguments in samples(dtype, torch.device(device)):
            expected = results_of(OPERATORS[name], name, arguments)
            with using(implementation):
                result = results_of(getattr(torch.ops.pn_fairseq, name), name, arguments)
            errors[name][dtype] = max(errors[name][dtype], difference(result, expected))
    return errors


def check() -> tuple[str, bool]:
    """A table with a line for each operator and implementation, and whether all differences are
    allowed.
    """
    rows, fine = [], True
    for implementation in available():
        device = (IMPLEMENTATIONS[implementation] or "").lower()
        if not device or (device == "cuda" and not torch.cuda.is_available()):
            continue
        for name, errors in _errors(implementation, device).items():
            off = [_name(dtype) for dtype, error in errors.items() if error > TOLERANCE[dtype]]
            fine = fine and not off
            verdict = f"OFF: {', '.join(off)}" if off else "ok"
            numbers = "".join(f"{error:12.1e}" for error in errors.values())
            rows.append(f"{implementation:15}{device:6}{name:17}{numbers}  {verdict}")
    if not rows:
        return "only the reference can run on this machine: nothing to compare", True
    types = "".join(f"{_name(dtype):>12}" for dtype in TOLERANCE)
    head = f"{'implementation':15}{'on':6}{'operator':17}{types}"
    return "\n".join([f"{head}  largest difference to the reference, relative", *rows]), fine
