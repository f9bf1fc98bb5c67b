"""The code of README.md and of pages in docs/ runs, and padding changes nothing."""

import copy
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from pn_fairseq.norms import norm_report, running_norms

from ..fixtures.hugging_face import hugging_face
from .pages import ROOT, blocks

README = (ROOT / "README.md").read_text("utf-8")


def test_fits_on_a_few_screens():
    """The first of them shows a picture, the snippet and the demo."""
    assert len(README.split()) <= 1600
    first = " ".join(README.split()[:200])
    assert "![" in first and "convert_norms(" in first and "make demo" in first


def test_named_files_exist():
    named = set(
        re.findall(
            r"(?<![\w/])((?:scripts|configs|data|benchmarks|docs|examples)/[\w./-]+\w)", README
        )
    )
    named |= set(re.findall(r"\]\((?!http)([^)#]+)\)", README))
    assert len(named) > 15
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    assert not re.search(r"(?<![\w.])(/home|/root|/tmp)/", README), (
        "a path outside of the repository"
    )


def test_the_snippet_of_the_readme():
    """The content of padding changes no real token."""
    x, lengths = torch.randn(3, 7, 8), torch.tensor([7, 4, 2])
    mask = torch.arange(7) >= lengths[:, None]
    (block,) = blocks(ROOT / "README.md", "python")
    assert block in (ROOT / "docs/index.md").read_text("utf-8")
    found = []
    for content in (0.0, 100.0):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        model[0].load_state_dict({"weight": torch.eye(8), "bias": torch.zeros(8)})
        names = {"model": model, "x": torch.where(mask[..., None], content, x), "lengths": lengths}
        exec(block, names)
        assert len(norm_report(names["model"])) == 1
        found.append(names["y"][~mask])
    assert_close(*found)


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


def encoder_of(page, name: str) -> nn.Module:
    if name == "own layers":
        return page["Encoder"](2, C, HEADS, 32, psi_warmup_updates=2)
    layer = nn.TransformerEncoderLayer(C, HEADS, 32, norm_first=True)
    encoder = TorchEncoder(layer, 2, enable_nested_tensor=False)
    return page["convert_norms"](
        encoder, "power", mask_from="src_key_padding_mask", psi_warmup_updates=2
    )


@pytest.mark.parametrize("name", ["own layers", "nn.TransformerEncoder"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_content_of_padding_changes_no_real_token(page, name, training):
    x, mask = batch()
    changed = torch.where(mask.T[..., None], 100.0, x)
    outputs = []
    for content in (x, changed):
        torch.manual_seed(1)
        encoder = encoder_of(page, name).train(training)
        torch.manual_seed(2)  # dropout
        outputs.append(encoder(content, mask)[~mask.T])
    assert torch.allclose(*outputs, atol=1e-5)
    assert outputs[0].abs().max() > 0.1


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
    assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["own layers", "nn.TransformerEncoder"])
def test_training_loop_learns_and_ends_the_warmup(page, name):
    model = encoder_of(page, name)
    x, mask = batch()
    target = torch.randn(T, B, C)
    losses = []

    def loss_fn(y, target):
        loss = (y - target)[~mask.T].square().mean()
        losses.append(loss.item())
        return loss

    page["train"](
        model, [(x, mask, target)] * 30, torch.optim.Adam(model.parameters(), lr=0.01), loss_fn
    )
    assert losses[-1] < 0.7 * losses[0]
    norms = [module for module in model.modules() if isinstance(module, page["PowerNorm"])]
    model.eval()
    assert len(norms) >= 4 and all(norm.num_batches_tracked == 30 for norm in norms)


def test_sentences_of_a_data_loader_have_their_lengths(page):
    model = page["with_masked_batch_norm"](
        nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.Linear(C, C))
    )
    sentences = [torch.randn(length, C) for length in (7, 4, 2, 5)]
    features, lengths = page["collate"](sentences)
    is_padding = torch.arange(7) >= lengths[:, None]
    losses = []
    for content in (0.0, 50.0):
        filled = features.masked_fill(is_padding[..., None], content)
        losses.append(page["loss_of"](copy.deepcopy(model), filled, lengths))
    assert_close(*losses)
    optimizer, before = page["optimizer_of"](model), model[1].weight.clone()
    page["train_epoch"](model, sentences, optimizer)
    model.eval()
    assert model[1].num_batches_tracked == 1 and not model[1].weight.equal(before)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = set()
    for group in optimizer.param_groups:
        if group["weight_decay"]:
            decayed |= {names[id(parameter)] for parameter in group["params"]}
    assert decayed == {"0.weight", "2.weight"}


def test_each_side_of_a_translation_has_its_mask(page):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C))
            self.decoder = copy.deepcopy(self.encoder)

        def forward(self, source, target):
            return self.decoder(target + self.encoder(source).mean(1, keepdim=True))

    model = page["convert_norms"](Model(), "batch", layout="BTC")
    (x, mask), target = batch(), torch.randn(B, T, C)
    other = mask.flip(0)
    outputs = []
    for content in (target, target.masked_fill(other[..., None], 9.0)):
        y = page["translate"](model, x.transpose(0, 1), content, mask, other)
        outputs.append(y[~other])
    assert outputs[0].equal(outputs[1])


def test_the_code_for_hugging_face(tmp_path, monkeypatch, capsys):
    hugging_face()  # or skips
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks(ROOT / "docs/hugging_face.md", "python"):
        exec(block, names)
    assert names["loss"].isfinite() and "attention_mask" in capsys.readouterr().out
    model, again, mask = names["model"].eval(), names["again"].eval(), names["attention_mask"]
    assert len(norm_report(again)) == len(norm_report(model)) >= 6
    assert names["with_mask"] < 1e-5 < 0.01 < names["without_mask"]
    trainer = names["NormTrainer"].__new__(names["NormTrainer"])
    plain = type(model)(names["config"])
    assert trainer.get_decay_parameter_names(model) == trainer.get_decay_parameter_names(plain)
    for key, tensor in model.state_dict().items():
        assert_close(names["from_folder"].state_dict()[key], tensor)
    assert all(norm.running_mean.abs().max() > 0 for norm in running_norms(names["pretrained"]))
    names["CountUpdates"]().on_step_begin(None, SimpleNamespace(global_step=5), None, model=model)
    assert all(norm._num_updates == 5 for norm in running_norms(model))
    logs = {"loss": 1.0}
    for _ in range(2):
        names["LogNorms"]().on_log(None, None, None, model=model.train(), logs=logs)
        for _ in range(2):  # the second forward takes in the step of the first
            model(input_ids=names["tokens"], attention_mask=mask).logits.sum().backward()
    model.eval()
    names["LogNorms"]().on_log(None, None, None, model=model, logs=logs)
    assert logs["bert.embeddings.LayerNorm/psi_distance"] > 0
    assert logs["bert.embeddings.LayerNorm/nonfinite_steps"] == 0
    of_evaluation = {"eval_loss": 1.0}
    names["LogNorms"]().on_log(None, None, None, model=model, logs=of_evaluation)
    assert of_evaluation == {"eval_loss": 1.0}
    again.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="running_mean"):
        names["BertForMaskedLM"](names["config"]).load_state_dict(model.state_dict())
    outputs = []
    for model_of_two, content in ((model, 7), (again, 9)):
        tokens = names["tokens"].masked_fill(mask == 0, content)
        result = model_of_two(input_ids=tokens, attention_mask=mask)
        outputs.append(result.logits[mask == 1])
    assert_close(*outputs, rtol=1e-4, atol=1e-4)
    check_that_marian_is_loaded(names)


def check_that_marian_is_loaded(names):
    """``save_pretrained`` leaves its fixed positions out."""
    hf = hugging_face()
    sizes = {"vocab_size": 40, "d_model": C, "pad_token_id": 1, "decoder_start_token_id": 1}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_{key}": 2 for key in ("layers", "attention_heads", "ffn_dim")}
    config = hf.MarianConfig(**sizes)

    def make():
        return names["convert_norms"](hf.MarianMTModel(config), "batch", only="*encoder.*")

    marian, loaded = make(), make()
    for norm in running_norms(marian):
        norm.running_mean.fill_(0.5)
    marian.save_pretrained("marian")
    names["load_folder"](loaded, "marian")
    for key, tensor in marian.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    from safetensors.torch import load_file, save_file

    state = load_file("marian/model.safetensors")
    lost = next(key for key in state if key.endswith("running_mean"))
    del state[lost]
    save_file(state, "marian/model.safetensors")
    with pytest.raises(RuntimeError, match=f"marian: missing .'{lost}'., unexpected "):
        names["load_folder"](make(), "marian")
    plain = hf.MarianMTModel(config)
    with pytest.raises(RuntimeError, match="missing .*unexpected .*running_mean"):
        names["load_folder"](plain, "marian")


def test_demonstration_of_the_leak(capsys):
    page = (ROOT / "docs/language_modeling.md").read_text("utf-8")
    code, printed = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", page, re.S).groups()
    exec(code, {})
    assert capsys.readouterr().out == printed
