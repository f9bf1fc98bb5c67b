"""``pn check``: the operators of every implementation that this machine can run, against the
reference.
"""

import torch

from pn_fairseq.kernels.first_use import TOLERANCE, difference, results_of, samples
from pn_fairseq.kernels.ops import OPERATORS
from pn_fairseq.kernels.selection import IMPLEMENTATIONS, available, using


def check() -> tuple[str, bool]:
    """A table with a line for each operator and implementation,

    and whether all differences are allowed.
    """
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    rows, fine = [], True
    for implementation in available():
        for device in devices:
            if implementation == "reference" or IMPLEMENTATIONS[implementation] != device.upper():
                continue
            worst: dict[tuple[str, torch.dtype], float] = {}
            for dtype in TOLERANCE:
                for name, arguments in samples(dtype, torch.device(device)):
                    expected = results_of(OPERATORS[name], name, arguments)
                    with using(implementation):
                        result = results_of(getattr(torch.ops.pn_fairseq, name), name, arguments)
                    worst[name, dtype] = max(
                        worst.get((name, dtype), 0.0), difference(result, expected)
                    )
            for name in OPERATORS:
                errors = {
                    dtype: worst[name, dtype] for dtype in TOLERANCE if (name, dtype) in worst
                }
                off = [
                    str(dtype)[6:] for dtype, error in errors.items() if error > TOLERANCE[dtype]
                ]
                fine = fine and not off
                cells = "".join(f"{error:12.1e}" for error in errors.values())
                rows.append(
                    f"{implementation:15}{device:6}{name:17}{cells}  "
                    f"{'OFF: ' + ', '.join(off) if off else 'ok'}"
                )
    head = f"{'implementation':15}{'on':6}{'operator':17}" + "".join(
        f"{str(dtype)[6:]:>12}" for dtype in TOLERANCE
    )
    if not rows:
        return "only the reference can run on this machine: nothing to compare", True
    return "\n".join([f"{head}  largest difference to the reference, relative", *rows]), fine
