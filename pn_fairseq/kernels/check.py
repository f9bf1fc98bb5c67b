"""``pn check`` compares the operators of every implementation that this machine can run with the
reference.
"""

import torch

from pn_fairseq.kernels.first_use import TOLERANCE, largest_differences, samples
from pn_fairseq.kernels.ops import OPERATORS
from pn_fairseq.kernels.selection import IMPLEMENTATIONS, available, using


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check() -> tuple[str, bool]:
    """A table with a line for each operator and implementation, and whether all differences are
    within the tolerance.
    """
    rows = []
    fine = True
    for implementation in available():
        device = (IMPLEMENTATIONS[implementation] or "").lower()
        if not device or (device == "cuda" and not torch.cuda.is_available()):
            continue
        of_type = {}
        for dtype in TOLERANCE:
            with using(implementation):
                calls = samples(dtype, torch.device(device))
                of_type[dtype] = largest_differences(torch.ops.pn_fairseq, calls)
        for name in OPERATORS:
            numbers = ""
            off = []
            for dtype, found in of_type.items():
                numbers += f"{found[name]:12.1e}"
                if found[name] > TOLERANCE[dtype]:
                    off.append(_name(dtype))
            fine = fine and not off
            verdict = f"OFF: {', '.join(off)}" if off else "ok"
            rows.append(f"{implementation:15}{device:6}{name:17}{numbers}  {verdict}")
    if not rows:
        return "only the reference can run on this machine: nothing to compare", True
    types = "".join(f"{_name(dtype):>12}" for dtype in TOLERANCE)
    head = f"{'implementation':15}{'on':6}{'operator':17}{types}"
    return "\n".join([f"{head}  largest difference from the reference, relative", *rows]), fine
