"""pn train: one rank, in this process; from outside where a process is killed or gets a signal."""

import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import fairseq.file_io
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from omegaconf import OmegaConf

from pn_fairseq.common.checkpoints import load_checkpoint
from pn_fairseq.norms import running_norms
from pn_fairseq.pipeline.training_log import read_log

from ..models.helpers import both_sides
from ..scripts_helpers import (
    ROOT,
    SCRIPTS,
    assert_refused,
    environment,
    in_process,
    refused,
    verb,
    wait_for,
)
from ..tables import rows

#: A training of seconds. The psi warm-up ends at update 6, in the middle. Each of its three
#: checkpoints is the best so far.
SHORT = """
optimization.max_update=12 checkpoint.save_interval_updates=4 tokens_per_update=400
dataset.validate_interval_updates=100 lr_scheduler.warmup_updates=6 optimization.lr=[0.002]
common.log_interval=2
""".split()
train = verb("train")


@pytest.fixture(autouse=True)
def one_rank_on_the_cpu(monkeypatch):
    for name in ("NPROC", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def start(data: Path, run: Path, *overrides: str) -> int:
    return train(["verses_es_en", "--data", data, "--run", run, *SHORT, *overrides])


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "a run, with 'quotes'"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert start(data, run) == 0
    return run


def snapshot(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def same_end(one: Path, other: Path) -> None:
    """Same weights, statistics, optimizer and best loss, to the bit."""
    for name in ("last", "best"):
        ends = []
        for run in (one, other):
            state = load_checkpoint(run / f"checkpoints/checkpoint_{name}.pt")
            updates = state["optimizer_history"][-1]["num_updates"]
            optimizer = state["last_optimizer_state"]["state"]
            ends.append([updates, state["extra_state"]["best"], state["model"], optimizer])
        torch.testing.assert_close(*ends, rtol=0, atol=0)


@pytest.mark.ci
def test_what_a_run_holds(data, trained):
    last = load_checkpoint(trained / "checkpoints/checkpoint_last.pt")
    assert last["optimizer_history"][-1]["num_updates"] == 12
    curve = read_log(trained / "train.log")
    assert list(curve.train) == [2, 4, 6, 8, 10, 12] and list(curve.valid) == [4, 8, 12]
    assert curve.valid[4] > curve.valid[8] + 0.1 > curve.valid[12] + 0.2, (
        "the points where it can be killed differ"
    )
    text = (trained / "train.log").read_text("utf-8")
    for words in ("Saved checkpoint", "num. shared model params", "norm_psi_distance"):
        assert words in text
    assert (trained / "data").read_text() == f"{data}\n"
    assert (trained / "data.settings").read_bytes() == (data / "settings.txt").read_bytes()
    record = json.loads((trained / "starts.jsonl").read_text())
    assert record["world_size"] == record["ranks_of_this_machine"] == 1
    assert record["tokens_per_update"] == record["max_tokens"] == 400
    assert record["gpus"] == [] and record["torch"]
    assert record["command"] == ["verses_es_en", "--data", str(data), "--run", str(trained), *SHORT]
    assert any((trained / "tensorboard").rglob("events.*"))


@pytest.mark.slow
def test_a_seed_of_the_initial_weights(data, trained, tmp_path):
    """The same number as common.seed is the same training; another number starts elsewhere with
    the same batches.
    """
    expected = load_checkpoint(trained / "checkpoints/checkpoint_1_4.pt")["model"]
    logs = []
    for seed, same in ((1, True), (2, False)):
        run = tmp_path / f"{seed}"
        assert start(data, run, f"model.init_seed={seed}", "optimization.max_update=4") == 0
        state = load_checkpoint(run / "checkpoints/checkpoint_last.pt")
        assert state["cfg"]["model"]["init_seed"] == seed
        assert all(torch.equal(state["model"][key], expected[key]) for key in expected) == same
        logs.append(read_log(run / "train.log"))
    one, two = logs
    assert one.starts[0].tokens == two.starts[0].tokens and one.train != two.train


def test_norms_of_a_model_of_fairseq_are_converted(data, tmp_path, capsys):
    sizes = both_sides(embed_dim=16, ffn_embed_dim=16, layers=1, attention_heads=2)
    given = ["model._name=transformer_iwslt_de_en", "optimization.max_update=2"]
    given += [f"model.{name}={value}" for name, value in sizes.items()]
    given += ["model.convert_norms=['encoder.*=batch,alpha_fwd=0.5']"]
    assert start(data, tmp_path, *given) == 0
    path = tmp_path / "checkpoints/checkpoint_last.pt"
    state = load_checkpoint(path)
    converted = [name.rpartition(".")[0] for name in state["model"] if name.endswith("running_var")]
    assert converted == [f"encoder.layers.0.{name}_layer_norm" for name in ("self_attn", "final")]
    specification = ["encoder.*=batch,alpha_fwd=0.5"]
    assert state["cfg"]["model"]["convert_norms"] == specification
    assert OmegaConf.load(tmp_path / "config.yaml").model.convert_norms == specification
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert [norm.alpha_fwd for norm in running_norms(model)] == [0.5, 0.5]
    capsys.readouterr()
    code = start(data, tmp_path, *given, "model.convert_norms=['encoder.*=power']")
    refused(capsys, code, "model.convert_norms ['encoder.*=batch")


@pytest.mark.ci
def test_a_second_start_does_nothing(data, trained, capsys):
    before = snapshot(trained)
    longer = "was trained for 12 updates, more than optimization.max_update=10"
    for also in ((), ("common.log_interval=3",), ("optimization.max_update=10",)):
        assert start(data, trained, *also) == 0
        said = capsys.readouterr().err
        assert "already trained; nothing to do" in said
        assert (longer in said) == ("optimization.max_update=10" in also)
    refused(capsys, start(data, trained, "common.seed=2"), "common.seed 1 -> 2")
    code = start(data, trained, "model.decoder_layerdrop=0.5")
    refused(capsys, code, "model.decoder_layerdrop unset -> 0.5")
    assert snapshot(trained) == before


def test_a_finished_run_takes_other_settings_of_decoding(data, trained, tmp_path, capsys):
    """pn average and pn generate read them in its config.yaml."""
    run = shutil.copytree(trained, tmp_path / "run")
    expected = OmegaConf.load(run / "config.yaml")
    expected.generation.beam, expected.average_last = 1, 2
    said = "is already trained; now with generation.beam=1, average_last=2", "nothing to do"
    for words in said:
        assert start(data, run, "generation.beam=1", "average_last=2") == 0
        assert words in capsys.readouterr().err
        assert OmegaConf.load(run / "config.yaml") == expected


def test_a_run_that_was_killed_after_its_last_save_counts_as_finished(data, trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    (run / "made.txt").unlink()
    assert start(data, run) == 0
    assert (run / "made.txt").read_text() == (trained / "made.txt").read_text()


def test_languages_are_those_of_the_data_unless_they_are_named(data, tmp_path, capsys):
    words = ["own_text", "--data", data, "--run", tmp_path / "run", *SHORT]
    words += ["optimization.max_update=1"]
    assert train([*words, "task.target_lang=en"]) == 0
    task = OmegaConf.load(tmp_path / "run/config.yaml").task
    assert (task.source_lang, task.target_lang) == ("es", "en")
    capsys.readouterr()
    assert train([*words, "--check"]) == 0, "the same settings as in the run"
    advice = "the settings say es-de: add task.source_lang=es task.target_lang=en"
    code = train([*words, "task.target_lang=de"])
    refused(capsys, code, "prepared from es-en", advice)
    (tmp_path / "lm/bin").mkdir(parents=True)
    (tmp_path / "lm/settings.txt").write_text("task=language_modeling\n")
    code = train(["own_text", "--data", tmp_path / "lm"])
    refused(capsys, code, "settings.txt names no languages")


#: Settings, and what the line says; ``;`` stands between several.
REFUSED = """
task.source_lang=fr | prepared from es-en; the settings say fr-en: add task.source_lang=es
dataset.max_tokens=30 | error: dataset.max_tokens is too small: ; silently skip; \
train.es has 533 sentences of more than 27 subwords
tokens_per_update=60 --ranks 4 | train.es; 4 ranks x 15 tokens; fewer ranks
task.max_target_positions=20 | error: task.max_target_positions is too small
dataset.train_subset=tain | dataset.train_subset=tain: ; did you mean 'train'?
dataset.valid_subset='valid,dev' --check | dataset.valid_subset=valid,dev: ; 'dev'; \
there are test, train, valid
checkpoint.restore_file=other.pt | other.pt; checkpoint.finetune_from_model
checkpoint.finetune_from_model=/none.pt | /none.pt: cannot be read (No such file
"""


@pytest.mark.parametrize(("overrides", "needles"), rows(REFUSED))
def test_a_setting_that_does_not_fit_is_refused_before_anything_is_made(
    overrides, needles, data, tmp_path, capsys
):
    """Sentences that are too long for the settings among them: fairseq would silently skip them."""
    code = start(data, tmp_path / "run", *overrides.split())
    refused(capsys, code, *needles.split("; "))
    assert not (tmp_path / "run").exists()


def test_weights_and_biases_writes_into_the_run_and_has_to_be_installed(
    monkeypatch, tmp_path, capsys
):
    """As --check says, which needs no data where none is named."""
    words = ["verses_es_en", "--check", "--run", tmp_path]
    words += ["common.wandb_project=verses"]
    monkeypatch.setenv("WANDB_DIR", "")
    monkeypatch.delenv("WANDB_DIR")
    for missing in (None, ModuleType("wandb")):  # the latter is a folder of runs, ./wandb
        monkeypatch.setitem(sys.modules, "wandb", missing)
        refused(capsys, train(words), "pip install wandb")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=None))
    assert train(words) == 0 and os.environ["WANDB_DIR"] == str(tmp_path)
    assert capsys.readouterr().err == "[train] the settings are valid\n"


def test_an_error_in_the_training_is_one_line_with_the_traceback_in_the_log(
    data, tmp_path, capsys, monkeypatch
):
    def fail(cfg):
        raise RuntimeError("CUDA out of memory.\nmore")

    monkeypatch.setattr("fairseq_cli.train.main", fail)
    assert start(data, tmp_path / "run") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("pn train: error: RuntimeError: CUDA out of memory.")
    assert "resume" in line
    assert "Traceback" in (tmp_path / "run/train.log").read_text()
    code = start(data, tmp_path / "run", "model.dropout=0.2")
    assert code == 1, "the folder accepts another setting"


def test_a_training_that_begins_with_the_weights_of_another(data, trained, tmp_path, capsys):
    """It does not resume it: it counts updates from 0. The file has the name of a run's own."""
    weights = trained / "checkpoints/checkpoint_last.pt"
    setting = f"checkpoint.finetune_from_model={json.dumps(str(weights))}"
    assert start(data, tmp_path / "run", setting, "optimization.max_update=4") == 0
    printed = capsys.readouterr().err
    assert f"[train] begins with the weights of {weights}\n" in printed
    assert "resuming" not in printed and "update 4, validation" in printed


@pytest.mark.slow
def test_a_hint_is_the_only_line_of_a_process(tmp_path):
    """hydra, which reads the configuration for it, logs nothing."""
    words = [sys.executable, "-m", "pn_fairseq", "train", "verses_es_en", "--max-update", "100"]
    result = subprocess.run(words, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert_refused(result, "did you mean 'optimization.max_update=100'?")
    assert len(result.stderr.splitlines()) == 1


class Hostile:
    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.mark.ci
def test_checkpoints_that_cannot_be_resumed_or_started_from(
    data, trained, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(trained, tmp_path / "run")
    last = run / "checkpoints/checkpoint_last.pt"
    state = load_checkpoint(last)
    key = "encoder.embed_tokens.weight"
    weights = state["model"]
    missing = dict(weights)
    for name in weights:
        if name.startswith("decoder.layers.1."):
            del missing[name]
    vocabulary = (
        f"{key} is [373, 128] in the checkpoint and [376, 128] in the model; the checkpoint was "
        "trained with another vocabulary; use the data that it was trained on, or prepare other "
        "text with that data's vocabulary (pn prepare text --like DATA)"
    )
    damaged = last.read_bytes()[:-1000]
    for content, needle in (
        ({**state, "model": {**weights, key: weights[key][:-3]}}, vocabulary),
        ({**state, "model": missing}, "the checkpoint has no decoder.layers.1."),
        ({**state, "extra": Hostile()}, "system"),
        (damaged, "cut off or damaged"),
    ):
        if content is damaged:
            last.write_bytes(damaged)
        else:
            torch.save(content, last)
        resumed = start(data, run, "optimization.max_update=14")
        line = refused(capsys, resumed, str(last), needle)
        assert "weights_only" not in line, line
        begun = start(data, tmp_path / "new", f"checkpoint.finetune_from_model='{last}'")
        refused(capsys, begun, str(last), needle)
        assert not (tmp_path / "new").exists()
    assert not (tmp_path / "executed").exists()
    line = refused(capsys, start(data, run, "optimization.max_update=14"))
    command = shlex.split(line.partition("the newest other one: ")[2])
    assert command[0] == "cp" and command[-1] == str(last), line
    subprocess.run(command, check=True)
    assert start(data, run, "optimization.max_update=14") == 0


@pytest.mark.ci
def test_a_run_without_its_last_checkpoint_does_not_begin_again(data, trained, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    last = run / "checkpoints/checkpoint_last.pt"
    last.unlink()
    (newest,) = (run / "checkpoints").glob("checkpoint_*_12.pt")
    os.utime(newest, (2e9, 2e9))
    (run / "checkpoints/checkpoint_of_mine.pt").write_bytes(b"of the user")
    os.utime(run / "checkpoints/checkpoint_of_mine.pt", (3e9, 3e9))
    before = snapshot(run)
    assert start(data, run) == 0
    assert "is already trained; nothing to do" in capsys.readouterr().err
    line = refused(capsys, start(data, run, "optimization.max_update=14"))
    assert f"{run}/checkpoints has {newest.name} but no checkpoint_last.pt: cp " in line
    assert f"or remove {run} to begin again" in line and snapshot(run) == before
    (run / "made.txt").unlink()
    assert "but no checkpoint_last.pt" in refused(capsys, start(data, run, "--check"))
    copy = shlex.split(line.partition("checkpoint_last.pt: ")[2].partition(" to resume")[0])
    assert copy == ["cp", str(newest), str(last)]
    subprocess.run(copy, check=True)
    assert start(data, run, "optimization.max_update=14") == 0
    assert "resuming from checkpoint_last.pt, update 12" in capsys.readouterr().err


@pytest.mark.slow
def test_an_average_is_no_checkpoint_to_resume_from(data, trained, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    folder = run / "checkpoints"
    last = folder / "checkpoint_last.pt"
    before = snapshot(run)
    folded = ["fold", folder / "checkpoint_best.pt"]
    average = ["average", "--run", run, "--output"]
    files = ["average", "--inputs", folder / "checkpoint_best.pt", "--output"]
    for name in ("last", "best", "5_55", "9_99", "best-shard0"):
        output = folder / f"checkpoint_{name}.pt"
        words = folded if name == "9_99" else average
        assert_refused(
            in_process(*words, output, check=False), "choose another name, such as averaged.pt"
        )
    assert_refused(
        in_process(*files, folder / "checkpoint7.pt", check=False), "choose another name"
    )
    assert snapshot(run) == before
    # under another name, and then put in its place
    in_process(*average, folder / "checkpoint_of_mine.pt")
    shutil.copy(folder / "checkpoint_of_mine.pt", last)
    capsys.readouterr()
    line = refused(capsys, start(data, run, "optimization.max_update=14"))
    assert f"{last} has no optimizer state (pn average writes such files" in line
    assert f"cp {folder}/checkpoint_" in line and f"finetune_from_model={last}" in line
    shutil.copy(folder / "checkpoint_of_mine.pt.made.txt", f"{last}.made.txt")
    line = refused(capsys, start(data, run, "optimization.max_update=14"))
    assert f"{last} has no optimizer state (pn average wrote it)" in line
    assert (run / "made.txt").is_file()


@pytest.mark.ci
def test_an_interrupted_save_leaves_no_half_of_a_file(data, tmp_path, capsys):
    """Nor does a resumed training that of a killed one."""
    checkpoints = tmp_path / "run/checkpoints"

    def interrupted(state, file):
        file.write(b"PK half of a checkpoint")
        assert list(checkpoints.glob("*.tmp"))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_utils, "_torch_persistent_save", interrupted)
        assert start(data, tmp_path / "run") == 130
    assert not list(checkpoints.iterdir())
    (checkpoints / "checkpoint_9_99.pt.tmp").touch()
    assert start(data, tmp_path / "run") == 0
    assert not list(checkpoints.glob("*.tmp"))


@pytest.mark.parametrize(
    ("file", "change", "needle"),
    [
        ("valid*", None, "bin has no valid: prepare the data again (pn prepare)"),
        ("dict.en.txt", None, "bin has no dict.en.txt: prepare the data again (pn prepare)"),
        ("train.es-en.es.bin", None, "bin has no train.es-en.es: prepare the data again"),
        ("train.es-en.es.bin", lambda old: old[:-2], "bytes instead of"),
        ("train.es-en.es.idx", lambda old: old[:30], "cut off or damaged"),
        ("valid.es-en.en.idx", lambda old: old[:10], "cut off or damaged"),
        # of another version
        ("valid.es-en.en.idx", lambda old: old[:9] + b"\xff" + old[10:], "cut off or damaged"),
        # of no type
        ("valid.es-en.en.idx", lambda old: old[:17] + b"\xff" + old[18:], "cut off or damaged"),
        ("dict.es.txt", lambda old: b"\n".join(old.splitlines()[:50]), "subword number"),
    ],
)
def test_damaged_data_is_named(file, change, needle, data, tmp_path, capsys):
    copy = shutil.copytree(data, tmp_path / "data")
    for damaged in (copy / "bin").glob(file):
        if change:
            damaged.write_bytes(change(damaged.read_bytes()))
        else:
            damaged.unlink()
    also = ["model.share_all_embeddings=false"] if file.startswith("dict") else []
    refused(capsys, start(copy, tmp_path / "run", *also), needle)
    assert not (tmp_path / "run").exists()


def test_a_gradient_that_is_not_finite_says_so_and_where(data, tmp_path, capsys):
    huge = (
        "optimization.lr=[1e30]",
        "lr_scheduler.warmup_updates=1",
        "lr_scheduler.warmup_init_lr=1e30",
    )
    assert start(data, tmp_path / "run", *huge) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]
    beginning = "pn train: error: the loss or its gradients are not finite in update [23] "
    assert re.match(beginning, line), line
    assert re.search(r"\((NaN|Inf) first in the output of (en|de)coder\.", line)
    assert "learning rate" in line and "again" not in line


@pytest.mark.parametrize(
    "setting", ["common.bf16=true", pytest.param("common.fp16=true", marks=pytest.mark.slow)]
)
def test_half_precision_on_a_cpu(setting, data, tmp_path):
    few = ("optimization.max_update=3", "dataset.disable_validation=true", setting)
    assert start(data, tmp_path / "run", *few) == 0
    model = load_checkpoint(tmp_path / "run/checkpoints/checkpoint_last.pt")["model"]
    counted = [int(value) for key, value in model.items() if key.endswith("num_batches_tracked")]
    assert set(counted) == {3}
    for key, value in model.items():
        if key.endswith(("running_psi2", ".nu")):
            assert value.dtype == torch.float32, key
            assert not torch.equal(value, value.bfloat16().float()), key


# --- Interruptions ---


class Killed(BaseException):
    """Stands for SIGKILL, which leaves files as they are."""


def kill_at(point: int, patch: pytest.MonkeyPatch) -> None:
    """Raise Killed at a point of the saving of checkpoints: within the writing or copying of a
    file, before a renaming.

    After a renaming there is nothing but the next point without its cut-off file.
    """
    passed = 0
    save = checkpoint_utils._torch_persistent_save
    copy = shutil.copyfile
    rename = PathManager.rename

    def at(what=lambda: None):
        nonlocal passed
        passed += 1
        if passed == point:
            what()
            raise Killed

    def slow_save(state, file):
        at(lambda: file.write(b"PK half of a checkpoint"))
        return save(state, file)

    def slow_copy(src, dst):
        at(lambda: Path(dst).write_bytes(Path(src).read_bytes()[:10_000]))
        return copy(src, dst)

    def slow_rename(src, dst):
        at()
        rename(src, dst)

    patch.setattr(checkpoint_utils, "_torch_persistent_save", slow_save)
    patch.setattr(fairseq.file_io, "shutil", SimpleNamespace(copyfile=slow_copy))
    patch.setattr(PathManager, "rename", slow_rename)


@pytest.mark.slow
@pytest.mark.parametrize("point", range(1, 19))
def test_a_kill_at_any_point_of_saving_changes_no_bit(point, data, trained, tmp_path, capsys):
    """Each of the three checkpoints is written once and copied twice, to the best and the last one:

    6 points.
    """
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        kill_at(point, patch)
        with pytest.raises(Killed):
            code = start(data, run)
            pytest.fail(f"the training ended with exit code {code} before point {point}")
        logging.getLogger("fairseq_cli.train").handlers.clear()
    assert start(data, run) == 0
    printed = capsys.readouterr().err
    # The last copy of a save is checkpoint_last.pt.
    assert ("resuming from" in printed) is (point > 6)
    if point > 6:
        assert f"update {(point - 1) // 6 * 4}" in printed
    same_end(run, trained)
    names = [sorted(os.listdir(folder / "checkpoints")) for folder in (run, trained)]
    assert names[0] == names[1], "nothing is left of what was cut off"


def command(data: Path, run: Path, *overrides: str) -> list[str]:
    program = ("bash", SCRIPTS / "train.sh", "verses_es_en")
    words = (*program, "--data", data, "--run", run, *SHORT, *overrides)
    return list(map(str, words))


@pytest.mark.slow
def test_sigkill_in_the_middle_of_training_and_resuming_ends_in_the_same_bits(
    data, trained, tmp_path, capsys
):
    run = tmp_path / "run"
    with (tmp_path / "stderr").open("w") as errors:
        how = {"env": environment(), "stderr": errors, "start_new_session": True}
        process = subprocess.Popen(command(data, run), **how)
        last = run / "checkpoints/checkpoint_last.pt"
        wait_for(last.exists, process)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    # A line of progress, and nothing of what fairseq and hydra print.
    lines = (tmp_path / "stderr").read_text().splitlines()
    assert all(line.startswith("[train] ") for line in lines)
    assert start(data, run) == 0
    assert "resuming from checkpoint_last.pt, update" in capsys.readouterr().err
    same_end(run, trained)


DURING_TRAINING = "; run the same command again to resume"
DURING_IMPORTS = " before anything was saved; the same command begins again"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("number", "advice"),
    [(signal.SIGINT, DURING_TRAINING), (signal.SIGTERM, DURING_IMPORTS)],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_ends_it_with_one_line(number, advice, data, tmp_path):
    """Also where SIGINT was ignored, as in the background of a shell that is not interactive."""
    many = ("optimization.max_update=4000", "checkpoint.save_interval_updates=1")
    process = subprocess.Popen(
        command(data, tmp_path / "run", *many),
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    if advice is DURING_TRAINING:
        wait_for((tmp_path / "run/checkpoints/checkpoint_last.pt").exists, process)
    else:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_for(lambda: "libtorch" in maps.read_text(), process)
    process.send_signal(number)
    _, printed = process.communicate(timeout=120)
    lines = [line for line in printed.splitlines() if not line.startswith("[train] ")]
    assert lines == [f"pn train: interrupted{advice}"]
    assert process.returncode == 128 + number


@pytest.mark.slow
def test_a_disk_that_is_full_while_a_checkpoint_is_saved(data, trained, tmp_path):
    """A file system with room for one checkpoint and a half; the second one is the copy that
    fairseq calls best.
    """
    size = (trained / "checkpoints/checkpoint_last.pt").stat().st_size * 3 // 2
    inside = f'mount -t tmpfs -o size={size} tmpfs "$0" && exec "$@"'
    namespace = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
    words = [*namespace, inside, tmp_path, "true"]
    if not shutil.which("unshare") or subprocess.run(words).returncode:
        pytest.skip("this machine lets nobody mount a file system in a namespace")
    words = [*namespace, inside, tmp_path, *command(data, tmp_path / "run")]
    result = subprocess.run(words, env=environment(), capture_output=True, text=True)
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("[train] ")]
    assert result.returncode == 1
    assert line.startswith(f"pn train: error: {tmp_path / 'run/checkpoints'}/checkpoint_")
    assert ".pt: the disk is full" in line and line.endswith(DURING_TRAINING[2:])
