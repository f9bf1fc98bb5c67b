"""Norms of each token by itself under SequenceParallel, on two ranks, against the same norms on
whole tensors.
"""

import pytest
import torch
from torch import nn

from pn_fairseq.norms import NORMS, RunningNorm, build_norm, convert_norms
from pn_fairseq.testing.ranks import run_ranks

B = 4
T = 6
C = 8

#: Norm -> options.
PER_TOKEN = {name: {} for name, entry in NORMS.items() if not issubclass(entry.cls, RunningNorm)}
PER_TOKEN |= {"rms, layer-scale": {"layer_scale_groups": 2}, "rms, release": {"variant": "release"}}


def norm_of(name):
    torch.manual_seed(1)
    options = {"groups": 2, **PER_TOKEN[name]}
    norm = build_norm(name.partition(",")[0], C, batch_first=True, **options)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return norm


def step(norm, x, dy):
    x = x.detach().requires_grad_()
    y = norm(x)
    y.backward(dy)
    return [y, x.grad, *(parameter.grad for parameter in norm.parameters())]


def on_a_rank(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    found = {}
    of_plain_tensors = norm_of("rms")(tensors()[0]).grad_fn.name()
    for name in PER_TOKEN:
        for dimension in (0, 1):
            x, dy = tensors()
            x = distribute_tensor(x, mesh, [Shard(dimension)])
            dy = distribute_tensor(dy, mesh, [Shard(dimension)])
            norm = parallelize_module(norm_of(name), mesh, SequenceParallel(sequence_dim=dimension))
            results = [tensor.full_tensor() for tensor in step(norm, x, dy)]
            found[name, dimension] = results
            y = norm.eval()(x).full_tensor()
            assert y.equal(results[0])
    assert norm_of("rms")(tensors()[0]).grad_fn.name() == of_plain_tensors
    model = convert_norms(nn.Sequential(nn.LayerNorm(C)), "batch")
    norm = parallelize_module(model, mesh, {"0": SequenceParallel()})
    with pytest.raises(
        ValueError,
        match="0: MaskedBatchNorm needs the statistics of all tokens, but its input is a D",
    ):
        norm(torch.randn(B, T, C))
    return found


def tensors():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, B, T, C, generator=generator)


def test_norms_of_each_token_are_sharded():
    """Sums over the 24 tokens in another order: five times 24 roundings."""
    close = 5 * 24 * 2**-24
    expected = {name: step(norm_of(name), *tensors()) for name in PER_TOKEN}
    for found in run_ranks(on_a_rank, 2):
        for (name, _), results in found.items():
            for one, two in zip(results, expected[name], strict=True):
                torch.testing.assert_close(one, two, rtol=close, atol=close)
