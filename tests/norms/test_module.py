"""Evaluation against the oracles."""

import pytest
import torch

from pn_fairseq.norms import NORMS, build_norm

from .helpers import (
    CHANNELS,
    affine_of,
    assert_close,
    oracle_step,
    random_batch,
    randomize_affine,
    rng,
    to_tensor,
    train_step,
)
from .oracle import make_oracle


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_evaluation_follows_the_oracle_with_and_without_mask(name, groups, affine):
    options = {"layer_scale_groups": groups, "affine": affine, "psi_warmup_updates": 2}
    norm = randomize_affine(build_norm(name, CHANNELS, **options)).train()
    oracle = make_oracle(name, CHANNELS, layer_scale_groups=groups, psi_warmup_updates=2, **affine_of(norm))
    generator = rng(1)
    for _ in range(4):
        batch = random_batch(generator)
        train_step(norm, *batch)
        oracle_step(oracle, *batch)
    norm.eval()
    for shape in ((5, 3, CHANNELS), (7, CHANNELS), (1, 1, CHANNELS)):
        x = to_tensor(random_batch(generator, shape, masked=False)[0])
        mask = torch.zeros(shape[-2::-1], dtype=torch.bool)
        mask.view(-1)[0] = True
        assert_close(norm(x), oracle.evaluate(x.double().numpy()))
        assert torch.equal(norm(x, mask), norm(x))
