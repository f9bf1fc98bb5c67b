"""Measurements.

Nothing here is a test: times are ratios within one run, on the machine that runs it.
"""

import logging
import os
import sys
import warnings

#: glibc returns large blocks to the system at once; the page faults would dominate a measurement on
#: a CPU.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}

#: Hides the profiler's messages about each start, and about blocks that were allocated before it.
PROFILER = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def keep_memory() -> None:
    """Restart the benchmark with an allocator that keeps its memory, unless it has one.

    The variables are read when a process starts.
    """
    if any(name not in os.environ for name in ALLOCATOR):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **ALLOCATOR, **PROFILER})


def hide_messages() -> None:
    """Hide the log messages and warnings of fairseq, torch and hydra."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
