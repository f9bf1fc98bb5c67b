"""Which implementation a test of the operators runs with, and small tiles under Triton's interpreter."""

import os

import pytest

from pn_fairseq import kernels

INTERPRETED = kernels.forced() == "triton" and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@pytest.fixture(params=kernels.available())
def implementation(request):
    if kernels.forced() not in (None, request.param):
        pytest.skip(f"{kernels.VARIABLE}={kernels.forced()}")
    with kernels.using(request.param):
        yield request.param


@pytest.fixture(autouse=INTERPRETED)
def _several_programs(monkeypatch):
    """Small tiles on two multiprocessors, so that small inputs make several programs, with several tiles each."""
    from pn_fairseq.kernels import triton_ops

    for name, value in (("ELEMENTS", 2), ("MIN_TILES", 2), ("BLOCK_P", 2), ("_multiprocessors", lambda device: 2)):
        monkeypatch.setattr(triton_ops, name, value)
