"""Which implementation the tests of the operators run with, how small Triton's tiles are, and a
stand-in for a GPU.
"""

import os
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from pn_fairseq import kernels
from pn_fairseq.kernels import first_use, reference, selection

INTERPRETED = kernels.FORCED == "triton" and os.environ.get("TRITON_INTERPRET", "0") not in (
    "",
    "0",
)


@pytest.fixture(params=kernels.available())
def implementation(request):
    if kernels.FORCED not in (None, request.param):
        pytest.skip(f"{kernels.VARIABLE}={kernels.FORCED}")
    with kernels.using(request.param):
        yield request.param


@pytest.fixture(autouse=INTERPRETED)
def _several_programs(monkeypatch):
    """Small tiles on two multiprocessors, so that small inputs make several programs, with
    several tiles each.
    """
    from pn_fairseq.kernels import triton_ops

    for name in ("ELEMENTS", "MIN_TILES", "BLOCK_P"):
        monkeypatch.setattr(triton_ops, name, 2)
    monkeypatch.setattr(triton_ops, "BLOCK_C", 4)
    monkeypatch.setattr(triton_ops, "_multiprocessors", lambda device: 2)
    triton_ops._tokens_of.cache_clear()


class Gpu:
    """A GPU whose implementation is the reference, and notes the operators that it computes.

    ``wrong`` is an operator that is off, ``fails`` what ``normalize`` raises.
    """

    def __init__(
        self,
        monkeypatch,
        wrong=None,
        fails=None,
        forced=None,
        name="GPU",
        version="3.7",
        capability=(9, 0),
    ):
        self.calls = []

        def implementation(operator):
            def compute(*arguments):
                self.calls.append(operator)
                if fails:
                    raise fails
                results = kernels.OPERATORS[operator](*arguments)
                if wrong != operator:
                    return results
                if results is None:
                    arguments[0].mul_(1.01)
                    return None
                return tuple(one * 1.01 if one.is_floating_point() else one for one in results)

            return compute

        module = SimpleNamespace(INTERPRETED=False, triton=SimpleNamespace(__version__=version))
        vars(module).update({operator: implementation(operator) for operator in kernels.OPERATORS})
        monkeypatch.setattr(selection, "_triton_operators", lambda: module)
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # the tensors are on the CPU
        monkeypatch.setattr(selection, "_compared", {})
        for function in (selection._no_triton_on, selection.warn_by_reference):
            monkeypatch.setattr(selection, function.__name__, cache(function.__wrapped__))
        monkeypatch.setattr(selection, "FORCED", forced)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def normalize(self, dtype=torch.float32):
        """Calls ``normalize`` as the dispatcher does; the operators that were computed by this
        GPU.
        """
        x = torch.tensor([[1.0, -2.0]], dtype=dtype)
        arguments = x, None, None, None, torch.full((2,), 4.0), None, None, 0, 0.0, False
        y, *_ = selection._by_triton("normalize")(*arguments)
        torch.testing.assert_close(y, reference.normalize(*arguments)[0], rtol=0, atol=0)
        calls = self.calls
        self.calls = []
        return calls


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(first_use, "driver", lambda: "550.1")
    return lambda **options: Gpu(monkeypatch, **options)
