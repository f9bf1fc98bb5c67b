"""What a decoder says about a position does not depend on later ones, with every norm."""

import pytest
import torch

from pn_fairseq.norms import NORMS, running_norms

from .helpers import build, padded_batch


@pytest.mark.parametrize("name", NORMS)
def test_evaluation_sees_no_later_position(name):
    torch.manual_seed(1)
    model = build("transformer_ln_tiny", encoder_norm=name, decoder_norm=name, encoder_layers=1, decoder_layers=2)
    src, prev = padded_batch(target=6)
    for _ in range(2):  # statistics that are not the initial ones
        model(src, None, prev)[0].logsumexp(-1).sum().backward()
    assert all(norm.num_batches_tracked == 2 for norm in running_norms(model))
    model.eval()
    other = prev.clone()
    other[:, 4:] = 7
    with torch.no_grad():
        before, after = model(src, None, prev)[0], model(src, None, other)[0]
    torch.testing.assert_close(after[1:, :4], before[1:, :4], rtol=0, atol=1e-5)
    assert (after[1:, 4:] - before[1:, 4:]).abs().max() > 1e-3
