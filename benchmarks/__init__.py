"""Measurements. Nothing here is a test: times are ratios within one run, on the machine that runs it."""

import logging
import os
import sys
import warnings

#: glibc gives big blocks back to the system at once, and the page faults then dominate what is measured on a CPU.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}

#: The profiler reports each of its many starts, and each block that was allocated before it.
PROFILER = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def keep_memory() -> None:
    """Start the running benchmark anew with an allocator that keeps its memory, unless that was done already.

    The variables are read when a process starts, so setting them from within would be too late.
    """
    if any(name not in os.environ for name in ALLOCATOR):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **ALLOCATOR, **PROFILER})


def be_quiet() -> None:
    """Keep what fairseq, torch and hydra have to say about each other from hiding the figures."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
