"""--init-seed: which random numbers it decides, and which stay as they are; --attention-init:
which weights.
"""

import numpy as np
import pytest
import torch
from fairseq.models.transformer.transformer_legacy import TransformerModel

from pn_fairseq.models.transformer_pn import TransformerPNConfig, TransformerPNModel

from .helpers import arch_args, build, make_task

MODELS = ("transformer_pn_tiny", "transformer_lm_ln_tiny", "tensorized_lm_ln_tiny")


def weights(arch: str, seed: int, **flags) -> tuple[dict, torch.Tensor]:
    """The initial weights, and the random state after them."""
    torch.default_generator.manual_seed(seed)
    return build(arch, **flags).state_dict(), torch.get_rng_state()


def equal(one: dict, other: dict) -> bool:
    if one.keys() != other.keys():
        return False
    return all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("arch", MODELS)
def test_initial_weights_follow_a_seed_of_their_own(arch):
    plain, _ = weights(arch, 5)
    torch.default_generator.manual_seed(8)
    state = torch.get_rng_state()
    own, after = weights(arch, 8, init_seed=5)
    assert equal(own, plain)
    assert torch.equal(after, state)
    assert not equal(weights(arch, 8, init_seed=6)[0], own)
    assert equal(weights(arch, 9, init_seed=5)[0], own)


def test_without_it_nothing_changes():
    """As fairseq's own model builds it, which knows nothing of the flag."""
    args = arch_args("transformer_pn_tiny")
    torch.default_generator.manual_seed(5)
    original = TransformerModel.build_model.__func__
    theirs = original(TransformerPNModel, TransformerPNConfig.from_args(args), make_task())
    after = torch.get_rng_state()
    ours, state = weights("transformer_pn_tiny", 5)
    assert equal(ours, theirs.state_dict())
    assert torch.equal(after, state)


@pytest.mark.parametrize("arch", MODELS[:2])
def test_attention_like_torchs_linear_layers(arch):
    """Uniform with a bound of 1/sqrt(inputs): largest value and standard deviation.

    The default draws as before.
    """
    model = build(arch, attention_init="torch")
    drawn = {}
    for name, value in model.named_parameters():
        if "_attn.out_proj" in name or "q_proj" in name:
            drawn[name] = value
    expected = 2 * 2 * 9 if arch == MODELS[0] else 2 * 2 * 3
    assert len(drawn) == expected
    bound = 128**-0.5
    for name, value in drawn.items():
        least = 0.95 if value.dim() == 2 else 0.5
        assert least * bound < value.abs().max() <= bound, name
    joined = torch.cat([value.flatten() for value in drawn.values()])
    np.testing.assert_allclose(joined.std().item(), bound / 3**0.5, rtol=0.01)
    plain, state = weights(arch, 5)
    for name in drawn:
        if name.endswith("out_proj.weight"):
            assert plain[name].std() > 1.2 * joined.std()
    same, after = weights(arch, 5, attention_init="fairseq")
    assert equal(plain, same)
    assert torch.equal(state, after)
