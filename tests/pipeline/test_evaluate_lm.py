"""From text to perplexity and to the report, by the scripts, and fairseq's own commands on the
same model.
"""

import json
import math
import re
import shutil
from dataclasses import replace

import pytest
import torch

from pn_fairseq.common.checkpoints import load_checkpoint
from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import write_settings
from pn_fairseq.pipeline import outdated, stamp
from pn_fairseq.pipeline.evaluate_lm import Perplexity, read_perplexity, result_file, unit_of
from pn_fairseq.pipeline.published import LM_PAPER

from ..scripts_helpers import ROOT, assert_refused, in_process, verb
from ..tables import rows

WORDS = "the king sent a servant to the house of david and he said to him go up".split()
SMALL = """
model.decoder_embed_dim=16 model.decoder_ffn_embed_dim=24 model.decoder_layers=2
common.log_interval=1 task.tokens_per_sample=8 dataset.max_tokens=64
dataset.validate_interval_updates=4 checkpoint.save_interval_updates=2
optimization.max_update=6 common.cpu=true
""".split()
ADAPTIVE_SETTINGS = """
criterion._name=adaptive_loss model.adaptive_softmax_cutoff='8,12' task.sample_break_mode=eos
distributed_training.ddp_backend=legacy_ddp
"""
#: Folder -> settings
MODELS = {
    "transformer_lm_pn_seed1": "model._name=transformer_lm_pn_tiny",
    "tensorized_lm_bn_seed1": "model._name=tensorized_lm_bn_tiny model.core_rank=4",
    "tensorized_lm_ln_seed1": "model._name=tensorized_lm_ln_tiny model.core_rank=4 "
    "model.tensorized_unmasked=true",
    "adaptive": f"model._name=tensorized_lm_pn_tiny model.core_rank=4 {ADAPTIVE_SETTINGS}",
}


def text(lines: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    result = ""
    for length in torch.randint(1, 8, (lines,), generator=generator).tolist():
        drawn = torch.randint(len(WORDS), (length,), generator=generator).tolist()
        result += " ".join(WORDS[word] for word in drawn) + "\n"
    return result


def prepare(corpus, dest):
    in_process("prepare", "text_lm", "--corpus", corpus, "--dest", dest, "--workers", 1)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with data/ and, for each of MODELS, a run that was trained, averaged and
    evaluated.
    """
    folder = tmp_path_factory.mktemp("evaluate_lm")
    (folder / "text").mkdir()
    for seed, (split, lines) in enumerate({"train": 80, "valid": 9, "test": 21}.items()):
        (folder / f"text/{split}.txt").write_text(text(lines, seed))
    prepare(folder / "text", folder / "data")
    for name, settings in MODELS.items():
        flags = ("--data", folder / "data", "--run", folder / name, *SMALL)
        call("train", "verses_lm_en", *flags, *settings.split())
        call("average", "--run", folder / name)
        call("evaluate-lm", "--run", folder / name)
    return folder


def call(name, *arguments):
    """A command of the pipeline, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert verb(name)(arguments) == 0


def fairseq(program, work, *arguments, **options):
    """A program of fairseq on the data of the models."""
    words = (work / "data/bin", "--user-dir", ROOT / "pn_fairseq", "--cpu", *arguments)
    return in_process(f"fairseq-{program}", *words, **options)


@pytest.mark.parametrize("name", MODELS)
def test_all_tokens_are_counted(work, name):
    found = read_perplexity(work / name)
    assert found.tokens == sum(len(line.split()) + 1 for line in (work / "text/test.txt").open())
    assert found.unit == "word" and found.block == 8
    assert found.unknown == found.context == 0
    assert 2 < found.perplexity < 60 and found.bits == pytest.approx(math.log2(found.perplexity))
    unmasked = name == "tensorized_lm_ln_seed1"
    assert found.causal != unmasked
    assert (found.batch_nll is None) == unmasked
    if name == "tensorized_lm_bn_seed1":
        # With the batch's own statistics; PN has none after its warm-up.
        assert found.batch_nll != pytest.approx(found.nll, rel=1e-4)
    assert ("blocks:eos" in found.signature) == (name == "adaptive")
    assert "tokens:" in found.signature
    assert ("|causal:NO|" if unmasked else "|causal:yes|") in found.signature


@pytest.mark.parametrize(
    ("name", "context"),
    [pytest.param("adaptive", 0, marks=pytest.mark.slow), ("transformer_lm_pn_seed1", 3)],
)
def test_perplexity_is_that_of_fairseq_eval_lm(work, name, context, capsys):
    checkpoint = work / name / "checkpoints/averaged.pt"
    call("evaluate-lm", "--run", work / name, "--context-window", context)
    printed, mine = capsys.readouterr().out, read_perplexity(work / name, context=context)
    assert f"perplexity:     {mine.perplexity:.2f}" in printed
    assert f"context:{context}|stride:{8 - context}" in printed
    flags = "--gen-subset test --tokens-per-sample 8 --max-tokens 64".split()
    flags += ["--sample-break-mode", "eos" if name == "adaptive" else "none"]
    theirs = fairseq("eval-lm", work, "--path", checkpoint, *flags, "--context-window", context)
    loss = re.search(r"Loss \(base 2\): ([\d.]+)", theirs.stdout + theirs.stderr)[1]
    assert float(loss) == pytest.approx(mine.bits, abs=1e-3)
    # The perplexity without context has its own file, which reports read.
    without = read_perplexity(work / name)
    assert without.context == 0
    assert (without.nll == mine.nll) == (context == 0)


@pytest.mark.ci
def test_fairseqs_own_commands_end_on_mistakes_with_one_line(work, tmp_path):
    """fairseq-eval-lm would skip blocks that are too long, here all, and print a perplexity of
    1.00.
    """
    arch = ("--arch", "transformer_lm_pn_tiny")
    tiny = ("train", work, *LANGUAGE_MODEL, *arch, "--save-dir", tmp_path)
    checkpoint = work / "transformer_lm_pn_seed1/checkpoints/averaged.pt"
    evaluated = ("eval-lm", work, "--path", checkpoint, "--gen-subset", "test")
    for command, needle in (
        ((*evaluated, "--tokens-per-sample", 12), "the model takes 8: give --tokens"),
        ((*tiny, "--layer-scale-groups", 3), "not divisible by groups=3"),
        ((*tiny, "--adaptive-softmax-cutoff", "8,12"), "needs criterion adaptive_loss"),
    ):
        ended = fairseq(*command, check=False)
        assert ended.returncode == 2, ended.stderr
        (line,) = re.findall(f"(?m)^fairseq-{command[0]}: error: .*", ended.stderr)
        assert needle in line and "Traceback" not in ended.stderr
    # Blocks of the default length, 1,024 tokens, are shortened.
    perplexities = []
    shortened = "blocks of 8 tokens instead of 1024: the model takes no more"
    for options in ((), ("--tokens-per-sample", 8), ("--context-window", 3)):
        ended = fairseq(*evaluated, *options)
        output = ended.stdout + ended.stderr
        perplexities.append(float(re.search(r"Perplexity: ([\d.]+)", output)[1]))
        assert (shortened in output) == (8 not in options)
    assert perplexities[0] == perplexities[1] > 1 and perplexities[2] > 1


LANGUAGE_MODEL = (
    "--task language_modeling --tokens-per-sample 8 --max-tokens 64 --optimizer adam".split()
)
ADAPTIVE = "--criterion adaptive_loss --ddp-backend legacy_ddp --adaptive-softmax-cutoff 8,12"
INPUT = "--adaptive-input --adaptive-input-cutoff 8,12 --tie-adaptive-weights --tie-adaptive-proj"


@pytest.mark.parametrize(
    ("arch", "flags"),
    [
        (
            "tensorized_lm_bn_tiny",
            "--core-rank 4 --cores 2 --no-core-softmax --post-norm --layer-scale-groups 2",
        ),
        ("tensorized_lm_pn_wt103", f"--core-rank 4 {ADAPTIVE} --sample-break-mode eos"),
        (
            "transformer_lm_pn_wiki103",
            f"{ADAPTIVE} {INPUT} --decoder-attention-heads 2 --sample-break-mode complete",
        ),
    ],
)
def test_fairseq_train_honours_the_flags(work, tmp_path, arch, flags):
    flags = (
        f"--arch {arch} --decoder-embed-dim 16 --decoder-ffn-embed-dim 24 --decoder-layers 2 "
        f"--decoder-norm layer --max-update 2 --lr 0.001 --no-epoch-checkpoints {flags} "
        "--required-batch-size-multiple 1"
    )
    fairseq("train", work, *LANGUAGE_MODEL, *flags.split(), "--save-dir", tmp_path)
    state = load_checkpoint(tmp_path / "checkpoint_last.pt")
    weights = {}
    for name, value in state["model"].items():
        weights[name.removeprefix("decoder.")] = tuple(value.shape)
    assert state["optimizer_history"][-1]["num_updates"] == 2
    if "transformer" in arch:
        assert any(name.startswith("adaptive_softmax.") for name in weights)
        assert weights["layers.1.fc1.weight"] == (24, 16) and "layers.2.fc1.weight" not in weights
        return
    assert weights["layers.1.attention.core"] == ((2, 4) if "--cores" in flags else (1, 4))
    assert weights["layers.1.attention.out_proj"] == (8, 8, 16)
    assert ("adaptive_softmax.clusters.weight" in weights) == ("adaptive" in flags)
    assert "layers.1.final_layer_norm.running_psi2" not in weights, "--decoder-norm layer"


def test_language_models_generate_by_fairseq_interactive(work, tmp_path):
    (tmp_path / "prefixes").write_text("the king\nhe said to\n")
    flags = (
        "--task language_modeling --beam 2 --buffer-size 2 --max-len-b 6 --tokens-per-sample 8 "
        "--input"
    )
    for name in ("transformer_lm_pn_seed1", "tensorized_lm_bn_seed1"):
        model = ("--path", work / name / "checkpoints/averaged.pt")
        words = (*model, *flags.split(), tmp_path / "prefixes")
        made = fairseq("interactive", work, *words).stdout
        first, second = re.findall(r"(?m)^H-.*?\t.*?\t(.*)", made)
        assert first.startswith("the king") and second.startswith("he said to")


def test_what_is_done_is_skipped_and_other_weights_are_evaluated_anew(work):
    name = work / "transformer_lm_pn_seed1"
    result, averaged = result_file(name, "test"), name / "checkpoints/averaged.pt"
    made = stamp.stamp_of(result)
    before = result.stat().st_mtime_ns
    call("evaluate-lm", "--run", name)
    assert result.stat().st_mtime_ns == before
    call("evaluate-lm", "--run", name, "--checkpoint", name / "checkpoints/checkpoint_best.pt")
    assert result.stat().st_mtime_ns != before
    assert stamp.read(made)["checkpoint_file"] == "checkpoint_best.pt"
    assert outdated.of_result("test.json", made, averaged) == []  # it was asked for
    call("evaluate-lm", "--run", name)
    assert outdated.of_result("test.json", made, averaged) == []
    write_settings(made, stamp.read(made) | {"checkpoint": "of an earlier one"})
    (text,) = outdated.of_result("test.json", made, averaged)
    assert text == "test.json was made from an earlier averaged.pt: make it again"
    call("evaluate-lm", "--run", name)


#: Settings of pn train.
MISTAKES = """
dataset.max_tokens=4 | blocks of 8 tokens, and a rank takes 4 at once
task.max_target_positions=6 | blocks of 8 tokens, the model takes 6
criterion._name=adaptive_loss | ddp-backend=legacy_ddp
model.core_rnk=3 | did you mean 'model.core_rank'
task.tokens_per_sample=0 | task.tokens_per_sample=0 is outside of its range: it must be at least 1
model.adaptive_softmax_cutoff='8,12' | needs criterion adaptive_loss
model._name=transformer_lm_pn_wiki103 | --adaptive-softmax-cutoff 20000,60000 must be
model._name=transformer_ln_tiny | not a model for task._name=language_modeling
model._name=tensorized_lm_pn_tny | did you mean 'tensorized_lm_pn_tiny'
"""


@pytest.mark.ci
def test_mistakes_get_one_line(work, tmp_path):
    name = work / "transformer_lm_pn_seed1"
    adaptive = ("--run", work / "adaptive", "--context-window", 4)
    assert_refused(in_process("evaluate-lm", *adaptive, check=False), "sample_break_mode=eos")
    for flags, needle in (
        (("--subset", "dev"), "no 'dev'"),
        (("--context-window", 8), "--context-window 8"),
        (("--checkpoint", tmp_path / "x.pt"), "no checkpoint"),
    ):
        assert_refused(in_process("evaluate-lm", "--run", name, *flags, check=False), needle)
    settings = ("--data", work / "data", "--run", tmp_path / "run", *SMALL)
    for setting, needle in rows(MISTAKES):
        arch = () if "_name" in setting else ("model._name=tensorized_lm_pn_tiny",)
        assert_refused(
            in_process("train", "verses_lm_en", *settings, *arch, setting, check=False), needle
        )
    assert not (tmp_path / "run").exists()


def test_a_sentence_that_is_longer_than_the_blocks_is_refused(work, tmp_path):
    shutil.copytree(work / "text", tmp_path / "text")
    (tmp_path / "text/test.txt").write_text("the king\n" + "go up " * 5 + "\n")
    prepare(tmp_path / "text", tmp_path / "data")
    shutil.copytree(work / "adaptive", tmp_path / "run")
    (tmp_path / "run/data").write_text(f"{tmp_path / 'data'}\n")
    (tmp_path / "run/data.settings").unlink()
    needle = "test: there are blocks of 11 tokens, and the model takes 8"
    assert_refused(in_process("evaluate-lm", "--run", tmp_path / "run", check=False), needle)


PLAIN = Perplexity(5.0, "test", 100, "word", 50, 3, 8, 0, True)


def test_results_that_are_read(tmp_path):
    assert "not causal" in replace(PLAIN, causal=False).text()
    with pytest.raises(UserError, match="pn evaluate-lm writes it"):
        read_perplexity(tmp_path)
    (tmp_path / "evaluate_lm").mkdir()
    result_file(tmp_path, "test").write_text(json.dumps(PLAIN.__dict__))
    assert read_perplexity(tmp_path) == PLAIN


def test_report(work, tmp_path):
    runs = [work / name for name in MODELS if name != "adaptive"]
    call("report", *runs, "--output", tmp_path)
    page = (tmp_path / "report.md").read_text("utf-8")
    assert "(PN after its warm-up), both numbers are the same" in page
    assert "**Not causal: LN (" in page
    found = [read_perplexity(name) for name in runs]
    assert f"{found[2].perplexity:.2f}" in page
    for perplexity in found:
        assert f"{perplexity.bits:.3f}" in page and perplexity.signature in page
    assert "Nothing: every run was trained to its end" in page
    assert (tmp_path / "report-curves-1.png").stat().st_size > 10_000
    call("report", *runs, "--output", tmp_path, "--paper", "ptb")
    page = (tmp_path / "report.md").read_text("utf-8")
    assert page.count(LM_PAPER["ptb"]["note"]) == 1 and "core-1 + PN" in page and "47.6" in page
    sizes = f"their test set has {found[0].tokens} tokens, that of PTB 82430. "
    assert f"{sizes}The perplexities cannot be compared." in page


def test_bytes(work, tmp_path):
    for second, unit in (("ff", "byte"), ("the", "word"), ("f@@", "subword")):
        assert unit_of(["0a", second]) == unit
    shutil.copytree(work / "transformer_lm_pn_seed1", tmp_path / "run")
    of_bytes = replace(read_perplexity(tmp_path / "run"), unit="byte")
    assert f"bits per byte:  {of_bytes.bits:.4f}\n" in of_bytes.text()
    assert "|unit:byte|" in of_bytes.signature
    result_file(tmp_path / "run", "test").write_text(json.dumps(of_bytes.__dict__))
    call("report", tmp_path / "run", "--output", tmp_path, "--paper", "enwik8")
    page = (tmp_path / "report.md").read_text("utf-8")
    assert "bits per byte |" in page and "bits per token |" not in page
    assert "### What is published for enwik8 (bits per byte)" in page
    assert re.search(r"\| DetachNorm +\| \*–\* +\| +1.12 \|", page) and "Transformer-XL" in page


def test_a_model_of_fairseq_train_is_not_called_causal_without_its_mask(work, tmp_path, capsys):
    """Its folder has no settings; the model says it."""
    made = work / "tensorized_lm_ln_seed1/checkpoints/averaged.pt"
    shutil.copyfile(made, tmp_path / "checkpoint_last.pt")
    call("evaluate-lm", "--run", tmp_path, "--checkpoint", tmp_path / "checkpoint_last.pt")
    assert "not causal" in capsys.readouterr().out and not read_perplexity(tmp_path).causal
