"""The arithmetic of the norms: operators (:mod:`.ops`), their definition (:mod:`.reference`), fused
implementations.

- ``reference``: plain PyTorch, any device, always available
- ``triton``: Triton for CUDA, if triton is installed (torch for CUDA installs it)
- ``cpp``: C++ for CPUs, compiled when the package is installed if there is a compiler

The fastest implementation that the machine can run is used. ``PN_FAIRSEQ_KERNELS`` forces one; if
that one cannot run, this is an error, and no other replaces it. The first use of a GPU compares its
results with the reference (:mod:`pn_fairseq.kernels.first_use`). ``pn info`` prints what is in use,
and why.
"""

from pn_fairseq.kernels.ops import (
    CHANGED,
    OPERATORS,
    batch_normalize,
    batch_step_,
    compiled,
    evaluate,
    gradient,
    gradient_sums,
    moments,
    normalize,
    power_step_,
    power_update_,
    refuse_second_derivative,
    running_average_,
    squashed,
    standardized,
    window_statistics,
    window_update_,
)
from pn_fairseq.kernels.reference import acc_dtype
from pn_fairseq.kernels.selection import FORCED, VARIABLE, Unavailable, available, describe, using
