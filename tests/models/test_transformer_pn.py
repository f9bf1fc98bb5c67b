import copy

import pytest
import torch
import torch.nn.functional as F
from fairseq import utils

from pn_fairseq.norms import NORMS
from pn_fairseq.norms.base import running_norms

from .helpers import KINDS, assert_same_training, build, padded_batch

TINY = {name: f"transformer_{entry.short}_tiny" for name, entry in NORMS.items()}
#: For what one layer shows as well as three.
ONE_LAYER = {"encoder_layers": 1, "decoder_layers": 1}


def loss_of(model, src, prev, target):
    logits = model(src, None, prev)[0]
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=1)


@pytest.mark.parametrize(
    ("encoder_norm", "decoder_norm"),
    [
        *(pytest.param(name, "layer", marks=() if name in KINDS else pytest.mark.slow) for name in NORMS),
        *(("layer", "power"), ("power", "power")),
    ],
)
def test_loss_falls_within_20_updates(encoder_norm, decoder_norm):
    torch.manual_seed(1)
    model = build(TINY[encoder_norm], decoder_norm=decoder_norm, dropout=0.0, psi_warmup_updates=5, **ONE_LAYER)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = [padded_batch(seed, batch=8, source=9, target=6) for seed in range(2)]
    losses = []
    for update in range(20):
        src, prev = batches[update % 2]
        model.set_num_updates(update)
        loss = loss_of(model, src, prev, prev)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(torch.isfinite(torch.tensor(losses)))
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4]), losses


@pytest.mark.parametrize("name", KINDS)
def test_more_padding_changes_nothing_in_training(name, monkeypatch):
    """The loss, every gradient and every statistic are as without the extra columns: each norm has its padding mask."""
    # fairseq's attention rounds its softmax to float32, and how depends on the row's length and on the processor.
    monkeypatch.setattr(utils, "softmax", lambda x, dim, onnx_trace=False: F.softmax(x, dim))
    torch.manual_seed(1)
    narrow = build(TINY[name], decoder_norm=name, dropout=0.0, **ONE_LAYER).double()
    wide = copy.deepcopy(narrow)
    src, prev = padded_batch(batch=4)
    wider_src = F.pad(src, (4, 0), value=1)
    wider_prev = F.pad(prev, (0, 3), value=1)
    losses = []
    for model, inputs in ((narrow, (src, prev, prev)), (wide, (wider_src, wider_prev, wider_prev))):
        model.train()
        loss = loss_of(model, *inputs)
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=0)
    assert_same_training(narrow, wide, state=(1e-6, 1e-7), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_incremental_decoding_gives_what_the_whole_prefix_gives(name):
    """So nothing at a position depends on later ones."""
    torch.manual_seed(1)
    model = build(TINY[name], decoder_norm=name).double()
    src, prev = padded_batch()
    model(src, None, prev)  # statistics that are not the initial ones
    model.eval()
    prev = prev.where(prev.ne(1), 5)
    with torch.no_grad():
        encoder_out = model.encoder(src)
        whole = model.decoder(prev, encoder_out=encoder_out)[0]
        state = {}
        steps = [
            model.decoder(prev[:, : end + 1], encoder_out=encoder_out, incremental_state=state)[0]
            for end in range(prev.size(1))
        ]
    largest = max(1.0, float(whole.abs().max()))  # PRepBN's x + ... doubles the activations in every layer at first
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-4 * largest)


@pytest.mark.parametrize("name", KINDS)
def test_activation_checkpointing_gives_the_same_training(name):
    torch.manual_seed(1)
    flags = dict(decoder_norm=name, dropout=0.1, psi_warmup_updates=2, **ONE_LAYER)
    plain = build(TINY[name], **flags).double()
    checkpointed = build(TINY[name], **flags, checkpoint_activations=True).double()
    checkpointed.load_state_dict(plain.state_dict())
    src, prev = padded_batch(batch=4)
    for update in range(4):
        for model in (plain, checkpointed):
            torch.manual_seed(update)
            model.train()
            model.zero_grad()
            model.set_num_updates(update)
            loss_of(model, src, prev, prev).backward()
        # Not to the bit: the gradients of the shared embedding are added in another order.
        assert_same_training(plain, checkpointed, rtol=1e-9, atol=1e-12)
    checkpointed.state_dict()  # takes the last step into the state
    counts = [norm.num_batches_tracked for norm in running_norms(checkpointed)]
    assert all(int(count) == 4 for count in counts)


def test_all_hidden_states_are_returned_when_asked_for():
    model = build(TINY["power"]).eval()
    src, _ = padded_batch()
    out = model.encoder(src, return_all_hiddens=True)
    assert len(out["encoder_states"]) == 4 and len(out["fc_results"]) == 3
    assert out["encoder_out"][0].shape == (7, 3, 128)
    assert out["src_lengths"][0].flatten().tolist() == [7, 4, 7]


@pytest.mark.parametrize("variant", ["paper", "release"])
def test_embeddings_at_padding_are_zeroed_but_not_in_the_release(variant):
    """fairseq 0.8, which the release is a fork of, leaves them; the release's nu takes in what stands at padding."""
    model = build(TINY["power"], norm_variant=variant, dropout=0.0)
    with torch.no_grad():
        model.encoder.embed_tokens.weight[1] = 0.3  # the row of padding is trained where embeddings are shared
    seen = []
    model.encoder.layers[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    src, prev = padded_batch()
    model(src, None, prev)
    embedded = 128**0.5 * model.encoder.embed_tokens(src) + model.encoder.embed_positions(src)
    expected = embedded if variant == "release" else embedded * src.ne(1).unsqueeze(-1)
    torch.testing.assert_close(seen[0].transpose(0, 1), expected)
    assert (expected[1, 0] != 0).all() == (variant == "release"), "source 1 begins with padding"


@pytest.mark.parametrize("name", ["power", pytest.param("batch", marks=pytest.mark.slow)])
def test_compiled_model_trains_and_evaluates_like_the_plain_one(name):
    torch.manual_seed(1)
    plain = build(TINY[name], dropout=0.0, attention_dropout=0.0, psi_warmup_updates=1, **ONE_LAYER).double()
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, backend="eager")
    src, prev = padded_batch(batch=4)
    for update in range(3):
        for model, call in ((plain, plain), (other, compiled)):
            model.zero_grad()
            model.set_num_updates(update)
            loss_of(call, src, prev, prev).backward()
        assert_same_training(plain, other, rtol=1e-9, atol=1e-12)
    plain.eval()
    compiled.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(src, None, prev)[0], plain(src, None, prev)[0], rtol=1e-9, atol=1e-12)
