"""The arithmetic of the norms, fused: one contract (:mod:`.ops`), one definition (:mod:`.reference`), and faster
implementations of the same.

=============  ===============================================================================================
``reference``  plain PyTorch, any device, always there
``triton``     Triton for CUDA, where triton is installed (torch for CUDA brings it)
``cpp``        C++ for CPUs, compiled when the package is installed if there is a compiler
=============  ===============================================================================================

The fastest that the machine can run is used. ``PN_FAIRSEQ_KERNELS`` forces one, and whatever that one cannot do then
fails in place of falling back. ``python -m pn_fairseq --info`` prints what is in use, and why.
"""

from pn_fairseq.kernels.ops import (
    batch_backward,
    batch_forward,
    gradient,
    gradient_sums,
    moments,
    normalize,
    power_backward,
    power_forward,
)
from pn_fairseq.kernels.selection import VARIABLE, Unavailable, available, describe, forced, using

__all__ = [
    "VARIABLE",
    "Unavailable",
    "available",
    "batch_backward",
    "batch_forward",
    "describe",
    "forced",
    "gradient",
    "gradient_sums",
    "moments",
    "normalize",
    "power_backward",
    "power_forward",
    "using",
]
