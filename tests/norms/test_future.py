"""Whether a training forward depends on other tokens, later ones included: what a language model has to know."""

import pytest
import torch

from pn_fairseq.norms import NORMS, RunningNorm, build_norm

#: Norm -> options, training steps before, and whether the output of a token depends on other tokens then.
READS_THE_BATCH = {
    "batch": ({}, 3, True),
    "power-v": ({}, 3, True),
    "power in the warm-up": ({"psi_warmup_updates": 5}, 3, True),
    "power": ({}, 3, False),
    "unified": ({}, 3, True),
    "batch-reg": ({}, 3, True),
    "mabn at first": ({}, 3, True),
    "batch-renorm at first": ({}, 3, True),
}


def depends(norm, steps: int) -> bool:
    for step in range(steps):
        norm.set_num_updates(step)
        norm(torch.randn(5, 3, 8, requires_grad=True)).square().sum().backward()
    norm.set_num_updates(steps)
    x = torch.randn(5, 3, 8)
    other = x.clone()
    other[1:] = torch.randn(4, 3, 8)
    return not torch.equal(norm(x)[0], norm(other)[0])


@pytest.mark.parametrize("case", READS_THE_BATCH)
def test_training(case):
    options, steps, expected = READS_THE_BATCH[case]
    if (name := case.split()[0]) not in NORMS:
        pytest.skip("not registered")
    assert depends(build_norm(name, 8, **options).train(), steps) == expected


@pytest.mark.parametrize("name", [name for name, entry in NORMS.items() if not issubclass(entry.cls, RunningNorm)])
def test_norms_without_statistics_do_not(name):
    assert not depends(build_norm(name, 8, groups=2).train(), 2)


@pytest.mark.parametrize("name", list(NORMS))
def test_evaluation_does_not(name):
    norm = build_norm(name, 8, groups=2, layer_scale_groups=2).train()
    depends(norm, 3)
    assert not depends(norm.eval(), 0)
