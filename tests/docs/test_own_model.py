"""The code of docs/own_model.md runs, and its norms see the padding mask."""

from functools import partial

import pytest
import torch
from torch import nn

from .pages import ROOT, blocks

T, B, C, HEADS = 7, 3, 16, 2


@pytest.fixture(scope="module")
def page() -> dict:
    """What the page defines."""
    names: dict = {}
    for block in blocks(ROOT / "docs/own_model.md", "python"):
        exec(block, names)
    return names


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([7, 4, 2])
    return torch.randn(T, B, C), torch.arange(T) >= lengths[:, None]


class TorchEncoder(nn.TransformerEncoder):
    """torch's encoder, called as the page's own encoder is."""

    def forward(self, x, padding_mask):
        return super().forward(x, src_key_padding_mask=padding_mask)


def encoders(page) -> dict[str, nn.Module]:
    layer = nn.TransformerEncoderLayer(C, HEADS, 32, norm_first=True)
    torch_encoder = TorchEncoder(layer, 2, enable_nested_tensor=False)
    return {
        "own layers": page["Encoder"](2, C, HEADS, 32, psi_warmup_updates=2),
        "nn.TransformerEncoder": page["convert_norms"](
            torch_encoder, "power", mask_from="src_key_padding_mask", psi_warmup_updates=2
        ),
    }


@pytest.mark.parametrize("name", ["own layers", "nn.TransformerEncoder"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_content_of_padding_changes_no_real_token(page, name, training):
    x, mask = batch()
    changed = torch.where(mask.T[..., None], 100.0, x)
    outputs = []
    for content in (x, changed):
        torch.manual_seed(1)
        encoder = encoders(page)[name].train(training)
        torch.manual_seed(2)  # dropout
        outputs.append(encoder(content, mask)[~mask.T])
    assert torch.allclose(*outputs, atol=1e-5)
    assert outputs[0].abs().max() > 0.1


def test_without_a_mask_padding_changes_real_tokens(page):
    """What the page warns of."""
    x, mask = batch()
    changed = torch.where(mask.T[..., None], 100.0, x)
    encoder = page["Encoder"](2, C, HEADS, 32, psi_warmup_updates=2)
    norm = encoder.layers[0].attention_norm
    assert (norm(x) - norm(changed))[~mask.T].abs().max() > 0.1


def test_checkpointed_layers_have_the_mask_of_the_block(page):
    layer = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.Linear(C, C))
    page["with_masked_batch_norm"](layer)
    x, mask = batch()
    gradients = []
    for forward in (layer, partial(page["checkpointed"], layer)):
        layer.zero_grad()
        with page["padding"](mask):
            y = forward(x)[~mask.T]
        y.square().sum().backward()
        gradients.append([parameter.grad for parameter in layer.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["own layers", "nn.TransformerEncoder"])
def test_training_loop_learns_and_ends_the_warmup(page, name):
    model = encoders(page)[name]
    x, mask = batch()
    target = torch.randn(T, B, C)
    losses = []

    def loss_fn(y, target):
        loss = (y - target)[~mask.T].square().mean()
        losses.append(loss.item())
        return loss

    page["train"](model, [(x, mask, target)] * 30, torch.optim.Adam(model.parameters(), lr=0.01), loss_fn)
    assert losses[-1] < 0.7 * losses[0]
    norms = [module for module in model.modules() if isinstance(module, page["PowerNorm"])]
    model.eval()
    assert len(norms) >= 4 and all(norm.num_batches_tracked == 30 for norm in norms)
