"""Tokens in any layout: results have the strides of torch's LayerNorm, and the values of
contiguous tokens.
"""

from copy import deepcopy

import pytest
import torch

from pn_fairseq.norms import NORMS, build_norm
from pn_fairseq.testing.helpers import first_of_each_kind

from ..pairwise import in_pairs
from .conftest import IMPLEMENTATION_NAMES
from .helpers import CHANNELS, assert_close, assert_states_close, randomize_affine

C = CHANNELS
#: Layout -> tokens in it, from normally distributed numbers of a shape.
LAYOUTS = {
    "contiguous": lambda randn: randn(5, 3, C),
    "transposed": lambda randn: randn(3, 5, C).transpose(0, 1),
    "(N, C)": lambda randn: randn(7, C),
    "(N, C) of a wider matrix": lambda randn: randn(7, C + 5)[:, 2 : C + 2],
    "every second token": lambda randn: randn(9, 6, C)[::2, 1::2],
    "a part of the channels": lambda randn: randn(3, 5, 2 * C).transpose(0, 1)[..., C:],
    "every second channel": lambda randn: randn(5, 3, 2 * C)[..., ::2],
    "channels first": lambda randn: randn(3, C, 5).permute(2, 0, 1),
    "expanded": lambda randn: randn(1, 3, C).expand(5, 3, C),
    "one token": lambda randn: randn(C, 1, 1).permute(1, 2, 0),
}


@pytest.fixture
def randn():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)


def steps(norm, x, dy, mask):
    """y, dx and the gradients of parameters of a training step, and y and dx of evaluation after
    it.
    """
    norm.zero_grad()
    results = []
    for training in (True, False):
        leaf = x.detach().requires_grad_()
        y = norm.train(training)(leaf, mask)
        leaves = [leaf]
        if training:
            leaves += norm.parameters()
        results += [y, *torch.autograd.grad(y, leaves, dy)]
    return results


def strides(values):
    """The strides of axes with more than one element; the others say nothing."""
    return [stride for size, stride in zip(values.shape, values.stride(), strict=True) if size > 1]


#: To one norm of each kind the gradient also comes in every layout, and to ``group``, which has an
#: operator of its own.
EVERY_GRADIENT = (*first_of_each_kind().values(), "group")


@in_pairs(
    indirect=["implementation"],
    name=list(NORMS),
    layout=list(LAYOUTS),
    groups=[0, 4],
    batch_first=[False, True],
    implementation=IMPLEMENTATION_NAMES,
)
def test_layouts(name, layout, groups, batch_first, randn):
    options = {"layer_scale_groups": groups, "batch_first": batch_first}
    norm = randomize_affine(build_norm(name, C, **options))
    reference = deepcopy(norm)
    x = LAYOUTS[layout](randn)
    mask = randn(*x.shape[:-1]) < -0.5
    mask.view(-1)[0] = False
    mask = mask if x.dim() == 2 or batch_first else mask.t()
    layer_norm = torch.nn.LayerNorm(C)
    gradients = LAYOUTS if name in EVERY_GRADIENT else (layout, "expanded")
    for of_gradient in gradients:
        dy = LAYOUTS[of_gradient](randn)
        if dy.shape != x.shape:  # the gradient that sum() sends back
            dy = torch.ones(()).expand(x.shape)
        found = steps(norm, x, dy, mask)
        of_contiguous = steps(reference, x.contiguous(), dy.contiguous(), mask)
        for one, expected in zip(found, of_contiguous, strict=True):
            assert_close(one, expected, 5e-6, terms=1.0)
        if name == "none" and groups == 0:
            continue  # it gives back its argument
        leaf = x.detach().requires_grad_()
        y = layer_norm(leaf)
        expected = [strides(y), strides(torch.autograd.grad(y, leaf, dy)[0])]
        assert [strides(one) for one in found if one.shape == x.shape] == 2 * expected
    assert_states_close(norm, reference, 5e-6)
