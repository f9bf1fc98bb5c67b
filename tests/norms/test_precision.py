"""Devices without float64, such as Apple's GPUs: no step needs it for float32 activations."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pn_fairseq import kernels
from pn_fairseq.testing.helpers import cases, rng, tensors


class WithoutFloat64(TorchDispatchMode):
    """Refuses operators that make a tensor of float64, as the device does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
                raise TypeError(f"{function}: Cannot convert a MPS Tensor to float64 dtype")
        return results


@pytest.mark.parametrize("case", cases(), ids=str)
@pytest.mark.parametrize("counted", [False, True])
def test_no_step_needs_float64(case, counted):
    norm = case.build(4, psi_warmup_updates=2)
    norm.collecting = True
    batches = [tensors(rng(update)) for update in range(5)]
    with kernels.using("reference"), WithoutFloat64():
        for update, (x, mask, dy) in enumerate(batches):
            if counted:
                norm.set_num_updates(update)
            norm(x.requires_grad_(), mask).backward(dy)
        norm.eval()(x, mask)
        if hasattr(norm, "diagnostics"):
            norm.diagnostics()
