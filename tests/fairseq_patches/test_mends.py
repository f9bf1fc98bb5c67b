"""Each patch against the behaviour of fairseq that it mends, and the switch that turns all of
them off.
"""

import argparse
import sys
import warnings
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fairseq import checkpoint_utils, options, utils
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.data import ConcatDataset, ListDataset, TokenBlockDataset
from fairseq.models.ema import EMA
from fairseq.modules.layer_drop import LayerDropModuleList
from fairseq.search import DiverseBeamSearch
from fairseq.sequence_generator import SequenceGenerator
from fairseq.trainer import Trainer
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.config_store import ConfigStore
from torch.testing import assert_close

from pn_fairseq.common.checkpoints import load_checkpoint
from pn_fairseq.common.files import CONFIGS
from pn_fairseq.fairseq_patches import ORDER, SWITCH, command_line, one_line_errors, patch, patches
from pn_fairseq.norms import running_norms
from pn_fairseq.pipeline.training_settings import compose

from ..models.helpers import (
    MODEL_NORMS,
    both_sides,
    build,
    make_dictionary,
    make_task,
    padded_batch,
    write_data,
)
from ..scripts_helpers import ROOT, run, verb

EMA_SETTINGS = {"ema_decay": 0.75, "ema_start_update": 0, "ema_update_freq": 1}
EMA_SETTINGS["ema_seed_model"] = None
SMALL = both_sides(layers=1, embed_dim=16, ffn_embed_dim=16)


@pytest.mark.parametrize(
    ("name", "variant", "half"),
    [
        *((name, "paper", False) for name in MODEL_NORMS),
        ("power", "release", False),
        ("power", "paper", True),
    ],
)
def test_moving_average_of_the_weights_is_the_one_computed_by_hand(name, variant, half):
    model = build("transformer_pn_tiny", encoder_norm=name, norm_variant=variant, **SMALL)
    if half:
        model.bfloat16()
    ema = EMA(model, SimpleNamespace(**EMA_SETTINGS, ema_fp32=half))
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
            if value.is_floating_point():
                value = 0.75 * expected[key] + 0.25 * value.double()
            expected[key] = value
    average = ema.get_model().state_dict()
    for key, value in expected.items():
        value = value.to(average[key].dtype)
        rtol = 1e-2 * half + 1e-5
        assert_close(average[key], value, rtol=rtol, atol=1e-6, msg=key)
    counters = [int(value) for key, value in average.items() if key.endswith("num_batches_tracked")]
    assert set(counters) == ({3} if running_norms(model) else set())


def test_blocks_that_end_with_a_sentence_under_numpy_2():
    sentences = [torch.arange(length) for length in (3, 1, 2)]
    sizes = np.array([3, 1, 2])
    blocks = TokenBlockDataset(
        ListDataset(sentences, sizes), sizes, None, pad=1, eos=2, break_mode="eos"
    )
    assert [block.tolist() for block in blocks] == [sentence.tolist() for sentence in sentences]


def test_the_adaptive_loss_is_the_one_of_the_words_probabilities():
    model = build("transformer_pn_tiny", **SMALL, adaptive_softmax_cutoff="6,9,44", dropout=0.0)
    task = make_task()
    source, target = padded_batch()
    # every band
    target = torch.where(target.ne(1), torch.arange(4, 4 + target.numel()).view_as(target), target)
    tokens = {"src_tokens": source, "src_lengths": None, "prev_output_tokens": target}
    sample = {"net_input": tokens, "target": target}
    criterion = AdaptiveLoss(task, sentence_avg=False)
    loss, size, logged = criterion(model.eval(), sample)
    words = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True, sample=sample)
    words = words.gather(-1, target.unsqueeze(-1)).squeeze(-1).masked_fill(target.eq(1), 0.0)
    assert size == logged["ntokens"] == target.ne(1).sum()
    assert logged["nsentences"] == len(target)
    assert AdaptiveLoss(task, sentence_avg=True)(model, sample)[1] == len(target)
    assert_close(loss, -words.sum()[None], rtol=1e-5, atol=1e-5)
    assert_close(criterion(model, sample, reduce=False)[0], -words.flatten(), rtol=1e-4, atol=1e-5)


def test_diverse_beam_search_of_any_sentences_is_that_of_the_first_ones():
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(3, 4, 12, generator=generator).log_softmax(-1) for _ in range(3)]
    # the groups of the first sentence overlap less than those of the others
    for probabilities in steps:
        probabilities[1:] = probabilities[1:, :1]

    def chosen(numbers, finished=1):
        search = DiverseBeamSearch(make_dictionary(12), num_groups=2, diversity_strength=0.01)
        scores = torch.zeros(3, 4, 3)
        found = []
        for step, probabilities in enumerate(steps):
            kept = slice(finished if step == 2 else 0, None)
            kept_numbers = torch.tensor(numbers)[kept]
            arguments = (probabilities[kept], scores[kept, :, :step], None, kept_numbers)
            found += search.step(step, *arguments)
        return found

    several = zip(chosen([0, 1, 2]), chosen([38, 2, 7]), chosen([0, 1, 2], 0), strict=True)
    for one, other, whole in several:
        assert torch.equal(one, other)
        assert torch.equal(one, whole[len(whole) - len(one) :])


def test_decoding_options():
    assert utils.load_align_dict("@@ ") == {}
    assert utils.load_align_dict(None) is None
    model = build("transformer_pn_tiny", **SMALL).eval()
    task = make_task()
    source, _ = padded_batch()
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(1)}}
    limits = {"beam_size": 2, "max_len_b": 4}
    generator = SequenceGenerator([model], task.target_dictionary, **limits)
    for beam in generator.generate([model], sample):
        for hypothesis in beam:
            assert hypothesis["steps"] == len(hypothesis["tokens"])


def test_several_sets_in_one_folder():
    for ratios, size in (([-1, 1], 7), ([2, 1], 10), (1, 7), (2, 14)):
        assert len(ConcatDataset([range(3), range(4)], ratios)) == size


@pytest.mark.parametrize(("side", "other"), [("encoder", "decoder"), ("decoder", "encoder")])
def test_a_model_that_keeps_layers_of_one_side(side, other):
    large = build("transformer_pn_tiny", **SMALL | both_sides(layers=2))
    settings = Namespace(arch="transformer_pn_tiny", **{f"{side}_layers_to_keep": "1"})
    pruned = checkpoint_utils.prune_state_dict(large.state_dict(), settings)
    small = build("transformer_pn_tiny", **{**SMALL, f"{side}_layers": 1, f"{other}_layers": 2})
    assert pruned.keys() == small.state_dict().keys()
    second = getattr(large, side).layers[1]
    assert torch.equal(pruned[f"{side}.layers.0.fc1.weight"], second.fc1.weight)


TORCHRUN = "-m torch.distributed.run --nproc-per-node=2 --master-port=29871 -m fairseq_cli.train"
FLAGS = """
--arch=transformer_pn_tiny --cpu --optimizer=adam --lr=0.01 --max-update=2 --max-tokens=30
--no-epoch-checkpoints --num-workers=0
""".split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "more"),
    [
        (["fairseq-train"], ["--distributed-world-size=2"]),
        ([sys.executable, *TORCHRUN.split()], []),
    ],
    ids=["spawned", "torchrun"],
)
def test_two_ranks_on_a_cpu(program, more, tmp_path):
    places = ("--user-dir", ROOT / "pn_fairseq", "--save-dir", tmp_path / "run")
    words = (write_data(tmp_path / "data"), *places, *FLAGS, *more)
    result = run(*program, *words, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert "training on 2 devices" in result.stdout + result.stderr
    state = load_checkpoint(tmp_path / "run/checkpoint_last.pt")
    assert state["cfg"]["distributed_training"]["distributed_world_size"] == 2
    assert state["model"]["encoder.layer_norm.num_batches_tracked"] == 2


def dropped_layers(rank: int) -> list[list[int]]:
    """The layers that a rank uses, in each of 8 updates in two stacks of 6 layers."""
    stacks = []
    for _ in range(2):
        layers = [torch.nn.Dropout(0.1) for _ in range(6)]
        stacks.append(LayerDropModuleList(0.5, layers))
    used = []
    for update in range(8):
        torch.manual_seed(1 + update)  # as fairseq does before each update
        for stack in stacks:
            indices = {module: index for index, module in enumerate(stack.children())}
            used.append([])
            for layer in stack:
                # draws from the CPU's generator, on rank 1 more than on rank 0
                layer(torch.ones(3 + rank))
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
    draws = torch.empty(8).uniform_()
    kept = [module for module, draw in zip(layers.children(), draws, strict=True) if draw > 0.5]
    torch.manual_seed(5)
    assert list(layers) == kept


def test_a_typo_in_an_architecture_gets_advice(capsys):
    parser = argparse.ArgumentParser()
    options.add_model_args(parser)
    assert parser.parse_args(["--arch", "transformer_pn_iwslt"]).arch == "transformer_pn_iwslt"
    with pytest.raises(SystemExit):
        parser.parse_args(["--arch", "transformer_pn_iwlst"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(
        "unknown architecture 'transformer_pn_iwlst', did you mean 'transformer_pn_iwslt'?"
    )


@pytest.mark.parametrize(("bf16", "tpu"), [(True, False), (False, True)])
def test_bf16_flag_does_not_ask_for_a_tpu(bf16, tpu):
    parse = command_line.parse_args_and_arch
    assert parse(lambda *_: Namespace(bf16=bf16, tpu=True), None, []).tpu is tpu
    with_unknown = (Namespace(bf16=bf16, tpu=True), ["--unknown"])
    assert parse(lambda *_: with_unknown, None, [])[0].tpu is tpu


def test_settings_that_a_model_refuses_are_an_error_outside_of_fairseqs_commands():
    """In them it is one line: test_training.py."""
    original = lambda *_: build("transformer_pn_tiny", **SMALL, layer_scale_groups=3)  # noqa: E731
    with pytest.raises(ValueError):
        one_line_errors.build_model(original, None, Namespace())


def test_a_function_with_other_parameters_is_left_alone():
    class Fairseq:
        def step(self, sample, more):
            return sample

    original = Fairseq.step
    message = r"test_mends is not applied: Fairseq.step .*\(self sample more\).*\(self s"
    with pytest.warns(UserWarning, match=message):
        patch(Fairseq, "step", "self sample")(lambda original, *args: None)
    assert Fairseq.step is original
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch(Fairseq, "step", "self sample more")(
            lambda original, self, sample, more: [original(self, sample, more)]
        )
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
                for method, function in vars(value).items():
                    if callable(function):
                        found[name, key, method] = id(function)
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


@pytest.mark.ci
def test_one_switch_turns_all_patches_off(monkeypatch, capsys):
    assert hasattr(Trainer.save_checkpoint, "__wrapped__")
    assert run(sys.executable, "-c", CHANGED, cwd=ROOT, **{SWITCH: "1"}).stdout == "set() 0\n"
    monkeypatch.setenv(SWITCH, "1")
    assert verb("info")([]) == 0
    assert "patches of fairseq: off" in capsys.readouterr().out


def test_settings_are_composed_as_by_hydra_and_are_copies(monkeypatch):
    def composed():
        return compose(
            CONFIGS / "verses_es_en.yaml", ["task.data=/data"], world_size=1, on_cpu=True
        )

    first, _ = composed()
    first.optimizer.adam_eps, first.task.left_pad_source = 3, None
    with monkeypatch.context() as uncopied:
        uncopied.setattr(ConfigStore, "__deepcopy__", None, raising=False)
        uncopied.setattr(ConfigStore, "__reduce_ex__", None)
        second, _ = composed()
    plain = CachingConfigRepository.__init__.__wrapped__
    monkeypatch.setattr(CachingConfigRepository, "__init__", plain)
    assert composed()[0] == second != first


def test_the_list_of_patches_says_what_each_mends(capsys):
    listed = patches()
    assert verb("info")([]) == 0
    printed = capsys.readouterr().out
    files = {file.stem for file in (ROOT / "pn_fairseq/fairseq_patches").glob("[a-z]*.py")}
    files -= {"diagnostics_log", "run_settings"}
    assert files == set(ORDER)
    assert tuple(listed) == ORDER
    assert all(name in printed for name in listed)
    assert all(sentence.endswith(".") and len(sentence) < 120 for sentence in listed.values())
