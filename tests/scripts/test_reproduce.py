"""scripts/reproduce_*.sh: which steps they take, in which order, and what they do when one fails."""

import re
import shutil
import signal
import subprocess
import time

import pytest

from pn_fairseq.report.paper import PAPER

from .. import warm
from ..scripts_helpers import ROOT, SCRIPTS, assert_refused, environment, run, script

CORPORA = {
    "iwslt14": ("iwslt14_de_en", "iwslt"),
    "wmt14": ("wmt14_en_de_big", "wmt_en_de_big"),
    "verses": ("verses_es_en", "tiny"),
}


def dry_run(name: str, *arguments, **environ) -> list[str]:
    return script(f"reproduce_{name}.sh", "--dry-run", *arguments, **environ).stdout.splitlines()


@pytest.mark.parametrize("name", CORPORA)
def test_dry_run_prints_every_command(name, tmp_path):
    config, size = CORPORA[name]
    runs = f"runs/{config}"
    expected = [f"scripts/prepare_{name}.sh --dest runs/data/{config}"]
    for norm in ("bn", "pn"):
        for seed in (1, 7):
            run = f"{runs}/{norm}_seed{seed}"
            settings = f"model._name=transformer_{norm}_{size} common.seed={seed} optimization.max_update=9"
            expected.append(f"scripts/train.sh {config} --data runs/data/{config} --run {run} {settings}")
            expected += [f"scripts/{step}.sh --run {run}" for step in ("average", "generate", "score")]
    folders = " ".join(f"{runs}/{norm}_seed{seed}" for norm in ("bn", "pn") for seed in (1, 7))
    expected.append(f"pn-report {folders} --output {runs}/report")
    assert dry_run(name, "optimization.max_update=9", NORMS=" bn  pn", SEEDS="1 7") == expected
    assert (ROOT / f"configs/{config}.yaml").is_file() and (SCRIPTS / f"prepare_{name}.sh").is_file()


def trained(lines: list[str]) -> dict[str, str]:
    """Folder of a run -> its settings, of the training commands of a dry run."""
    return dict(re.search(r"--run \S+/(\S+) (.*)$", line).groups() for line in lines if "train.sh" in line)


@pytest.mark.slow
def test_rows_of_a_table(tmp_path):
    lines = dry_run("iwslt14", TABLE="powernorm-4", SEEDS="1")
    assert all(line.startswith("scripts/train.sh iwslt14_de_en ") for line in lines if "train.sh" in line)
    release, one_group = "norm_variant=release", "layer_scale_groups=1"
    rows = {"bn": release, "brn": one_group, "mabn": one_group, "ln": "", "gn": "", "pnv": "", "pn": release}
    assert trained(lines) == {
        f"{name}+{setting}_seed1" if setting else f"{name}_seed1": f"model._name=transformer_{name}_iwslt common.seed=1"
        + (f" model.{setting}" if setting else "")
        for name, setting in rows.items()
    }
    folder = "runs/iwslt14_de_en"
    assert lines[-1].startswith(f"pn-report {folder}/bn+norm_variant=release_seed1 ")
    assert lines[-1].endswith(f" --output {folder}/report-powernorm-4 --paper powernorm-4")


def test_a_table_with_settings_of_its_own(tmp_path):
    lines = dry_run("iwslt14", "--runs", tmp_path, "common.fp16=true", TABLE="adanorm-3", SEEDS="1 2")
    assert lines[0] == "scripts/prepare_iwslt14.sh --dest runs/data/iwslt14_de_en"
    assert lines[1].startswith("scripts/train.sh iwslt14_de_en_adanorm --data runs/data/iwslt14_de_en ")
    assert trained(lines) == {
        f"{norm}+decoder_norm={settings.replace(' model.', '+')}_seed{seed}": f"model._name=transformer_{norm}_iwslt "
        f"common.seed={seed} model.decoder_norm={settings} common.fp16=true"
        for norm, settings in (
            ("lns", "layer-simple"),
            ("dn", "detach model.norm_detach=mean"),
            ("dn", "detach model.norm_detach=std"),
        )
        for seed in (1, 2)
    }


@pytest.mark.parametrize(("name", "corpus"), [("iwslt14", "iwslt14_de_en"), ("wmt14", "wmt14_en_de"), ("verses", None)])
def test_help_lists_the_tables(name, corpus):
    text = script(f"reproduce_{name}.sh", "--help").stdout
    found = re.search(r"TABLE=NAME(?s:.*)NAME is one of\n +(.*)$", text, re.M)
    known = [table for table, rows in PAPER.items() if corpus and rows.config.startswith(corpus)]
    assert (found[1].split() if found else []) == known


def test_language_models_are_trained_for_every_model_and_norm():
    environ = {"NORMS": "pn ln+layer_scale_groups=1", "SEEDS": "3"}
    lines = dry_run("verses_lm", "optimization.max_update=9", **environ)
    expected, folders = ["scripts/prepare_verses_lm.sh --dest runs/data/verses_lm_en"], []
    for model in ("transformer_lm", "tensorized_lm"):
        for norm, short, setting in (
            ("pn", "pn", ""),
            ("ln+layer_scale_groups=1", "ln", "model.layer_scale_groups=1 "),
        ):
            folders.append(f"runs/verses_lm_en/{model}_{norm}_seed3")
            settings = f"model._name={model}_{short}_tiny common.seed=3 {setting}optimization.max_update=9"
            data = "--data runs/data/verses_lm_en"
            expected.append(f"scripts/train.sh verses_lm_en {data} --run {folders[-1]} {settings}")
            expected += [f"scripts/{step}.sh --run {folders[-1]}" for step in ("average", "evaluate_lm")]
    expected.append(f"pn-report {' '.join(folders)} --output runs/verses_lm_en/report")
    assert lines == expected
    lines = dry_run("ptb", "--corpus", "/texts", NORMS="pn", SEEDS="1")
    assert lines[0] == "scripts/prepare_ptb.sh --dest runs/data/ptb_lm --corpus /texts"
    assert "--run runs/ptb_lm/pn_seed1 model._name=tensorized_lm_pn_ptb" in lines[1]
    assert len(dry_run("verses_lm", MODELS="tensorized_lm", NORMS="pn", SEEDS="1")) == 5
    refused = script("reproduce_verses_lm.sh", "--dry-run", check=False, MODELS="lstm")
    assert_refused(refused, "MODELS", "'lstm'", "transformer_lm tensorized_lm")


def test_dry_run_can_be_pasted_into_a_shell(tmp_path):
    lines = dry_run("iwslt14", "--archive", "my talks.tgz", "--runs", tmp_path / "a b", NORMS="pn", SEEDS="1")
    assert lines[0].endswith(r"--archive my\ talks.tgz")
    assert rf"--run {tmp_path}/a\ b/pn_seed1" in lines[1]
    assert not (tmp_path / "a b").exists()


@pytest.mark.parametrize(
    ("environ", "needles"),
    [
        ({"NORMS": "ln pnw"}, ("NORMS", "'pnw'", "did you mean", "ln bn pnv pn")),
        ({"NORMS": ""}, ("NORMS", "at least one")),
        ({"TABLE": "powernorm-5"}, ("TABLE", "'powernorm-5'", "did you mean 'powernorm-4'", "adanorm-1")),
        ({"TABLE": "powernorm-1", "NORMS": "pn"}, ("TABLE and NORMS", "one of them")),
        ({"SEEDS": "1 x"}, ("SEEDS", "'x'")),
        ({"SEEDS": "2 1 2", "NORMS": "pn"}, ("pn_seed2", "twice")),
    ],
)
def test_mistakes_in_the_lists(environ, needles):
    assert_refused(script("reproduce_iwslt14.sh", "--dry-run", check=False, **environ), *needles)


STUB = """#!/usr/bin/env bash
# Records its arguments; fails or hangs where FAIL or HANG matches.
[[ $* != --help ]] || exit 0
echo "$(basename "$0" .sh) $*" >>"$CALLS"
case "$(basename "$0" .sh) $*" in
*"${FAIL:-nothing}"*)
    printf 'some words\\n\\n%s: error: it went wrong\\n\\n' "$(basename "$0")" >&2
    exit "${CODE:-2}"
    ;;
*"${HANG:-nothing}"*) exec sleep 600 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose steps are stubs, which record their arguments in a file."""
    folder = tmp_path / "checkout"
    shutil.copytree(SCRIPTS, folder / "scripts")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "pn_fairseq").symlink_to(ROOT / "pn_fairseq")
    for step in ("prepare_iwslt14", "train", "average", "generate", "score"):
        stub = folder / f"scripts/{step}.sh"
        stub.unlink(missing_ok=True)
        stub.write_text(STUB)
        stub.chmod(0o755)
    tools = folder / "venv/bin"
    tools.mkdir(parents=True)
    (tools / "pn-report").write_text(STUB)
    (tools / "srun").write_text('#!/bin/sh\necho "srun $*" >>"$CALLS"\nshift 2\nexec "$@"\n')
    (tools / "python").symlink_to(warm.programs() / "python")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return folder


def environ_of(checkout, **changes):
    return environment(VENV=str(checkout / "venv"), CALLS=str(checkout / "calls"), SEEDS="1", NORMS="ln pn", **changes)


def reproduce(checkout, **changes) -> tuple[subprocess.CompletedProcess, list[str]]:
    (checkout / "calls").unlink(missing_ok=True)
    command = ["bash", checkout / "scripts/reproduce_iwslt14.sh"]
    result = subprocess.run(command, env=environ_of(checkout, **changes), capture_output=True, text=True)
    calls = (checkout / "calls").read_text().splitlines()
    # The settings are checked before the data is prepared.
    assert calls.pop(0) == "train iwslt14_de_en --check model._name=transformer_ln_iwslt"
    # "train iwslt14_de_en --data ... --run R ..." -> "train ln_seed1"
    return result, [f"{call.split()[0]} {call.split('--run ')[-1].split()[0].split('/')[-1]}" for call in calls]


ALL = [f"{step} {run}" for run in ("ln_seed1", "pn_seed1") for step in ("train", "average", "generate", "score")]


def test_a_failed_run_is_named_and_the_others_continue(checkout):
    runs = checkout / "runs/iwslt14_de_en"
    result, calls = reproduce(checkout, FAIL="average --run " + str(runs / "ln_seed1"))
    assert result.returncode == 1 and "1 of 2 runs failed: ln_seed1" in result.stderr
    assert calls[1:-1] == ALL[:2] + ALL[4:]
    assert calls[-1].startswith("pn-report")
    assert (runs / "ln_seed1/failed").read_text() == "average: average.sh: error: it went wrong\n"
    assert not (runs / "pn_seed1/failed").exists()
    result, calls = reproduce(checkout)
    assert result.returncode == 0 and calls[1:-1] == ALL
    assert not (runs / "ln_seed1/failed").exists()
    # The steps' messages are kept outside the runs, so that a pattern finds runs alone.
    assert (runs / "logs/ln_seed1/average.err").is_file()
    assert {path.name for path in runs.glob("*_seed*")} <= {"ln_seed1", "pn_seed1"}


def test_a_failed_training_is_noted_though_it_left_no_folder(checkout):
    result, calls = reproduce(checkout, FAIL="transformer_pn_iwslt", CODE="1")
    assert result.returncode == 1 and calls[1:-1] == ALL[:5]
    noted = (checkout / "runs/iwslt14_de_en/pn_seed1/failed").read_text()
    assert noted == "train: train.sh: error: it went wrong\n"


def test_a_mistake_in_the_settings_ends_it_before_the_preparation(checkout):
    """Here the stub of train.sh refuses them; what it refuses is tested with train.sh."""
    result = subprocess.run(
        ["bash", checkout / "scripts/reproduce_iwslt14.sh", "model.encoder_nrom=1"],
        env=environ_of(checkout, FAIL="--check"),
        **{"capture_output": True, "text": True},
    )
    assert result.returncode == 2 and "it went wrong" in result.stderr
    assert len((checkout / "calls").read_text().splitlines()) == 1


def test_only_options_of_the_preparation_are_offered():
    for name, option, offered in (("verses", "--archive", False), ("iwslt14", "--archive", True)):
        result = script(f"reproduce_{name}.sh", "--dry-run", option, "/x", check=False, NORMS="pn", SEEDS="1")
        assert (result.returncode == 0) is offered
        assert (option in script(f"reproduce_{name}.sh", "--help").stdout) is offered
        if offered:
            assert result.stdout.splitlines()[0].endswith(f"{option} /x")
        else:
            assert_refused(result, "unknown option '--archive'")


def test_the_messages_of_a_step_are_complete(tmp_path):
    """Also where they are written slowly."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "tee").write_text('#!/bin/sh\nsleep 0.5\nPATH=${PATH#*:}\nexec tee "$@"\n')
    (tools / "tee").chmod(0o755)
    attempt = (SCRIPTS / "lib/reproduce.sh").read_text().partition("# attempt FILE")[2].partition("# `interrupted`")[0]
    code = f"set -euo pipefail\n#{attempt}\nattempt {tmp_path}/said bash -c 'echo failed >&2; exit 7' || echo $?"
    result = run("bash", "-c", code, PATH=f"{tools}:{environment()['PATH']}")
    assert result.stdout == "7\n" and (tmp_path / "said").read_text() == "failed\n"


def test_without_data_nothing_is_trained(checkout):
    result, calls = reproduce(checkout, FAIL="prepare_iwslt14")
    assert result.returncode == 2 and len(calls) == 1
    assert "it went wrong" in result.stderr


def test_a_report_that_fails_is_an_error(checkout):
    result, _ = reproduce(checkout, FAIL="pn-report")
    assert result.returncode == 2 and "pn-report: error: it went wrong" in result.stderr


def test_several_machines(checkout):
    """The first does everything; another one waits for the data, trains, and leaves the rest alone."""
    machines = {"NNODES": "2", "MASTER_ADDR": "localhost"}
    result, calls = reproduce(checkout, **machines, NODE_RANK="0")
    assert result.returncode == 0 and calls[1:-1] == ALL
    (checkout / "calls").unlink()
    waiting = subprocess.Popen(
        ["bash", checkout / "scripts/reproduce_iwslt14.sh"],
        env=environ_of(checkout, **machines, NODE_RANK="1"),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "waiting" in waiting.stderr.readline()
    assert len((checkout / "calls").read_text().splitlines()) == 1  # the check of the settings
    (checkout / "runs/data/iwslt14_de_en/bin").mkdir(parents=True)
    assert waiting.wait(timeout=60) == 0
    waiting.stderr.close()
    calls = (checkout / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["train", "train", "train"]


def test_a_slurm_job_of_several_machines_trains_by_srun(checkout):
    slurm = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "3"}
    result, calls = reproduce(checkout, **slurm)
    assert result.returncode == 0
    train = [call for call in calls if call.startswith("srun")]
    assert len(train) == 2 and [call for call in calls[1:-1] if call not in train] == ALL
    assert "--ntasks-per-node=1" in (checkout / "calls").read_text()
    refused = subprocess.run(
        ["bash", checkout / "scripts/reproduce_iwslt14.sh"],
        env=environ_of(checkout, **slurm, SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="3"),
        capture_output=True,
        text=True,
    )
    assert_refused(refused, "srun", "once")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_it_all(checkout, number):
    command = ["bash", checkout / "scripts/reproduce_iwslt14.sh"]
    environ = environ_of(checkout, HANG="generate")
    process = subprocess.Popen(
        command,
        **{"env": environ, "start_new_session": True, "stderr": subprocess.PIPE, "text": True},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as in the background of a shell
    )
    deadline = time.time() + 60
    while "generate" not in ((checkout / "calls").read_text() if (checkout / "calls").exists() else ""):
        assert time.time() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert said.splitlines()[-1] == "reproduce_iwslt14.sh: interrupted; run the same command again to resume"
    calls = (checkout / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["train", "prepare_iwslt14", "train", "average", "generate"]
