"""Each patch against the behaviour of fairseq that it mends, and the switch that turns all of them off."""

import argparse
import warnings
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fairseq import options
from fairseq.data import ListDataset, TokenBlockDataset
from fairseq.models.ema import EMA
from fairseq.modules.layer_drop import LayerDropModuleList
from fairseq.trainer import Trainer

from pn_fairseq.common.environment import SWITCH
from pn_fairseq.common.errors import FoldedModelError
from pn_fairseq.fairseq_patches import ORDER, command_line, one_line_errors, patch, patches
from pn_fairseq.norms import running_norms

from ..common.test_errors import call_in
from ..models.helpers import KINDS, build, padded_batch
from ..scripts_helpers import ROOT, run, verb

EMA_SETTINGS = SimpleNamespace(
    ema_decay=0.75, ema_start_update=0, ema_update_freq=1, ema_seed_model=None, ema_fp32=False
)
SMALL = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 1), ("embed_dim", 16), ("ffn_embed_dim", 16))
}


@pytest.mark.parametrize(
    ("name", "variant", "half"),
    [*((name, "paper", False) for name in KINDS), ("power", "release", False), ("power", "paper", True)],
)
def test_moving_average_of_the_weights_is_the_one_computed_by_hand(name, variant, half):
    model = build("transformer_pn_tiny", encoder_norm=name, norm_variant=variant, **SMALL)
    if half:
        model.bfloat16()
    ema = EMA(model, SimpleNamespace(**{**vars(EMA_SETTINGS), "ema_fp32": half}))
    expected = {key: value.double() for key, value in model.state_dict().items()}
    for update in range(3):
        src, prev = padded_batch(update)
        model.set_num_updates(update)
        model.zero_grad()
        model(src, None, prev)[0].square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        ema.step(model, update)
        for key, value in model.state_dict().items():
            expected[key] = 0.75 * expected[key] + 0.25 * value.double() if value.is_floating_point() else value
    average = ema.get_model().state_dict()
    for key, value in expected.items():
        torch.testing.assert_close(
            average[key], value.to(average[key].dtype), rtol=1e-2 * half + 1e-5, atol=1e-6, msg=key
        )
    counters = [int(value) for key, value in average.items() if key.endswith("num_batches_tracked")]
    assert set(counters) == ({3} if running_norms(model) else set())


def test_blocks_that_end_with_a_sentence_under_numpy_2():
    sentences = [torch.arange(length) for length in (3, 1, 2)]
    sizes = np.array([3, 1, 2])
    blocks = TokenBlockDataset(ListDataset(sentences, sizes), sizes, None, pad=1, eos=2, break_mode="eos")
    assert [block.tolist() for block in blocks] == [sentence.tolist() for sentence in sentences]


def dropped_layers(rank: int) -> list[list[int]]:
    """The layers that a rank uses, in each of 8 updates in two stacks of 6 layers."""
    stacks = [LayerDropModuleList(0.5, [torch.nn.Dropout(0.1) for _ in range(6)]) for _ in range(2)]
    used = []
    for update in range(8):
        torch.manual_seed(1 + update)  # as fairseq does before each update
        for stack in stacks:
            indices = {module: index for index, module in enumerate(stack.children())}
            used.append([])
            for layer in stack:
                layer(torch.ones(3 + rank))  # draws from the CPU's generator, on rank 1 more than on rank 0
                used[-1].append(indices[layer])
    assert [len(list(stack.eval())) for stack in stacks] == [6, 6], "evaluation drops none"
    return used


def test_all_ranks_drop_the_same_layers(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    used = [dropped_layers(rank) for rank in range(2)]
    assert used[0] == used[1]
    assert len(set(map(tuple, used[0]))) > 8, "each update and each stack draws again"
    assert 0.3 < sum(map(len, used[0])) / (16 * 6) < 0.7
    monkeypatch.setattr(LayerDropModuleList, "__iter__", LayerDropModuleList.__iter__.__wrapped__)
    assert dropped_layers(0) != dropped_layers(1), "fairseq's own draw"


def test_one_rank_drops_the_layers_that_fairseq_drops():
    layers = LayerDropModuleList(0.5, [torch.nn.Identity() for _ in range(8)])
    torch.manual_seed(5)
    kept = [module for module, draw in zip(layers.children(), torch.empty(8).uniform_(), strict=True) if draw > 0.5]
    torch.manual_seed(5)
    assert list(layers) == kept


def test_a_typo_in_an_architecture_gets_advice(capsys):
    parser = argparse.ArgumentParser()
    options.add_model_args(parser)
    assert parser.parse_args(["--arch", "transformer_pn_iwslt"]).arch == "transformer_pn_iwslt"
    with pytest.raises(SystemExit):
        parser.parse_args(["--arch", "transformer_pn_iwlst"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("unknown architecture 'transformer_pn_iwlst', did you mean 'transformer_pn_iwslt'?")


@pytest.mark.parametrize(("bf16", "tpu"), [(True, False), (False, True)])
def test_bf16_flag_does_not_ask_for_a_tpu(bf16, tpu):
    parsed = Namespace(bf16=bf16, tpu=True)
    assert command_line.parse_args_and_arch(lambda *_: parsed, None, []).tpu is tpu
    assert command_line.parse_args_and_arch(lambda *_: (parsed, ["--unknown"]), None, [])[0].tpu is tpu


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"layer_scale_groups": 3}, ["num_features=16 is not divisible by groups=3"]),
        ({"cross_self_attention": True}, ["--cross-self-attention"]),
        ({"encoder_normalize_before": False}, ["pre-norm"]),
        ({"encoder_norm": "layre"}, ["layre", "layer"]),
    ],
    ids=str,
)
def test_settings_that_a_model_refuses_end_fairseq_with_one_line(flags, words, capsys):
    def build_model():
        return one_line_errors.build_model(lambda: build("transformer_pn_tiny", **SMALL, **flags))

    with pytest.raises(ValueError):
        build_model()
    with pytest.raises(SystemExit) as stop:
        call_in("fairseq_cli", "/site-packages/fairseq_cli/train.py", build_model)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("fairseq-train: error: ") and error.count("\n") == 1
    assert all(word in error for word in words), error


def test_a_folded_checkpoint_is_named():
    assert str(FoldedModelError("x.pt")).startswith("x.pt was folded by pn fold")


def test_a_function_with_other_parameters_is_left_alone():
    class Fairseq:
        def step(self, sample, more):
            return sample

    original = Fairseq.step
    with pytest.warns(UserWarning, match=r"test_mends is not applied: Fairseq.step .*\(self sample more\).*\(self s"):
        patch(Fairseq, "step", "self sample")(lambda original, *args: None)
    assert Fairseq.step is original
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch(Fairseq, "step", "self sample more")(lambda original, self, sample, more: [original(self, sample, more)])
        assert Fairseq().step(1, 2) == [1]
    with pytest.raises(RuntimeError, match="Fairseq.step is patched by .*test_mends, and again by"):
        patch(Fairseq, "step", "self sample more")(lambda original, self, sample, more: None)


CHANGED = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
import torch, fairseq.models, fairseq.trainer, fairseq.options, fairseq_cli.train
from fairseq.data import language_pair_dataset, token_block_dataset
from fairseq.models import distributed_fairseq_model, ema
def functions():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "fairseq":
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                found.update({(name, key, each): id(what) for each, what in vars(value).items() if callable(what)})
            elif callable(value) or key == "np":
                found[name, key] = id(value)
    return found
before, safe = functions(), len(torch.serialization.get_safe_globals())
import pn_fairseq
assert "transformer_pn" in fairseq.models.MODEL_REGISTRY
after = functions()
changed = {key for key in before if before[key] != after[key]}
print(changed, len(torch.serialization.get_safe_globals()) - safe)
"""


def test_one_switch_turns_all_patches_off(monkeypatch, capsys):
    assert hasattr(Trainer.save_checkpoint, "__wrapped__")
    assert run("warm-python", "-c", CHANGED, cwd=ROOT, **{SWITCH: "1"}).stdout == "set() 0\n"
    monkeypatch.setenv(SWITCH, "1")
    assert verb("info")([]) == 0 and "patches of fairseq: off" in capsys.readouterr().out


def test_the_list_of_patches_says_what_each_mends(capsys):
    listed = patches()
    assert verb("info")([]) == 0
    printed = capsys.readouterr().out
    files = {file.stem for file in (ROOT / "pn_fairseq/fairseq_patches").glob("[a-z]*.py")}
    assert files == set(ORDER) and tuple(listed) == ORDER and all(name in printed for name in listed)
    assert all(sentence.endswith(".") and len(sentence) < 120 for sentence in listed.values())
