"""scripts/reproduce_*.sh: which steps they take, in which order, and what they do when one fails."""

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from pn_fairseq.common.published import PAPER
from pn_fairseq.pipeline import reproduce

from ..scripts_helpers import ROOT, SCRIPTS, assert_refused, environment, script

CORPORA = {
    "iwslt14": ("iwslt14_de_en", "iwslt"),
    "wmt14": ("wmt14_en_de_big", "wmt_en_de_big"),
    "verses": ("verses_es_en", "tiny"),
}


def in_process(name: str, *arguments, **environ) -> subprocess.CompletedProcess:
    """scripts/reproduce_NAME.sh in this process."""
    out, err = io.StringIO(), io.TextIOWrapper(io.BytesIO(), write_through=True)
    with mock.patch.dict(os.environ, environ), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = reproduce.main([name, *map(str, arguments)])
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(name, code, out.getvalue(), err.buffer.getvalue().decode())


def dry_run(name: str, *arguments, **environ) -> list[str]:
    result = in_process(name, "--dry-run", *arguments, **environ)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_every_corpus_has_its_script():
    scripts = {path.stem.removeprefix("reproduce_"): path.read_text("utf-8") for path in SCRIPTS.glob("reproduce_*")}
    assert scripts.keys() == reproduce.CORPORA.keys()
    for name, text in scripts.items():
        assert text.endswith(f'run_verb reproduce {name} "$@"\n')
        assert (SCRIPTS / f"prepare_{name}.sh").is_file()


def test_from_outside(tmp_path):
    result = script("reproduce_verses.sh", "--dry-run", "--runs", tmp_path, NORMS="pn", SEEDS="1")
    assert result.stdout.splitlines() == dry_run("verses", "--runs", tmp_path, NORMS="pn", SEEDS="1")


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
    assert (ROOT / f"configs/{config}.yaml").is_file()


def trained(lines: list[str]) -> dict[str, str]:
    """Folder of a run -> its settings, of the training commands of a dry run."""
    return dict(re.search(r"--run \S+/(\S+) (.*)$", line).groups() for line in lines if "train.sh" in line)


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
            ("dn", "detach model.norm_options.detach=mean"),
            ("dn", "detach model.norm_options.detach=std"),
        )
        for seed in (1, 2)
    }


@pytest.mark.parametrize(("name", "corpus"), [("iwslt14", "iwslt14_de_en"), ("wmt14", "wmt14_en_de"), ("verses", None)])
def test_help_lists_the_tables(name, corpus):
    text = in_process(name, "--help").stdout
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
    assert "model._name=tensorized_lm_pn_wt103" in dry_run("ptb", NORMS="pn", SEEDS="1", SIZE="wt103")[1]
    assert len(dry_run("verses_lm", MODELS="tensorized_lm", NORMS="pn", SEEDS="1")) == 5
    refused = in_process("verses_lm", "--dry-run", MODELS="lstm")
    assert_refused(refused, "MODELS", "'lstm'", "transformer_lm tensorized_lm")


def test_dry_run_can_be_pasted_into_a_shell(tmp_path):
    lines = dry_run("iwslt14", "--archive", "my talks.tgz", "--runs", tmp_path / "a b", NORMS="pn", SEEDS="1")
    assert shlex.split(lines[0])[-2:] == ["--archive", "my talks.tgz"]
    assert f"{tmp_path}/a b/pn_seed1" in shlex.split(lines[1])
    assert not (tmp_path / "a b").exists()


@pytest.mark.parametrize(
    ("environ", "needles"),
    [
        ({"NORMS": "ln pnw"}, ("NORMS", "'pnw'", "did you mean", "ln bn pnv pn")),
        ({"NORMS": ""}, ("NORMS", "at least one")),
        ({"TABLE": "powernorm-5"}, ("TABLE", "'powernorm-5'", "did you mean 'powernorm-4'", "adanorm-1")),
        ({"TABLE": "powernorm-1", "NORMS": "pn"}, ("TABLE and NORMS", "one of them")),
        ({"TABLE": "powernorm-1", "SIZE": "tiny"}, ("TABLE and SIZE", "one of them")),
        ({"SEEDS": "1 x"}, ("SEEDS", "'x'")),
        ({"SEEDS": "2 1 2", "NORMS": "pn"}, ("pn_seed2", "twice")),
    ],
)
def test_mistakes_in_the_lists(environ, needles):
    assert_refused(in_process("iwslt14", "--dry-run", **environ), *needles)


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
def checkout(tmp_path, monkeypatch):
    """A checkout whose steps are stubs, which record their arguments in a file."""
    folder = tmp_path / "checkout"
    steps = [f"scripts/{name}.sh" for name in ("prepare_iwslt14", "train", "average", "generate", "score")]
    for stub in [*steps, "bin/pn-report", "bin/srun"]:
        (folder / stub).parent.mkdir(parents=True, exist_ok=True)
        (folder / stub).write_text(STUB)
        (folder / stub).chmod(0o755)
    (folder / "bin/srun").write_text('#!/bin/sh\necho "srun $*" >>"$CALLS"\nshift 2\nexec "$@"\n')
    variables = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "CALLS": f"{folder}/calls"}
    for name, value in {**variables, "SEEDS": "1", "NORMS": "ln pn", "START_TIMEOUT": "60"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(reproduce, "ROOT", folder)
    return folder


def made(checkout, *arguments, **environ) -> tuple[subprocess.CompletedProcess, list[str]]:
    (checkout / "calls").unlink(missing_ok=True)
    result = in_process("iwslt14", *arguments, **environ)
    calls = (checkout / "calls").read_text().splitlines()
    # The settings are checked before the data is prepared.
    assert calls.pop(0) == " ".join(["train iwslt14_de_en --check model._name=transformer_ln_iwslt", *arguments])
    # "train iwslt14_de_en --data ... --run R ..." -> "train ln_seed1"
    return result, [f"{call.split()[0]} {call.split('--run ')[-1].split()[0].split('/')[-1]}" for call in calls]


ALL = [f"{step} {run}" for run in ("ln_seed1", "pn_seed1") for step in ("train", "average", "generate", "score")]


def test_a_failed_run_is_named_and_the_others_continue(checkout):
    runs = checkout / "runs/iwslt14_de_en"
    result, calls = made(checkout, FAIL="average --run " + str(runs / "ln_seed1"))
    assert result.returncode == 1 and "1 of 2 runs failed: ln_seed1" in result.stderr
    assert calls[1:-1] == ALL[:2] + ALL[4:]
    assert calls[-1].startswith("pn-report")
    assert (runs / "ln_seed1/failed").read_text() == "average: average.sh: error: it went wrong\n"
    assert not (runs / "pn_seed1/failed").exists()
    result, calls = made(checkout)
    assert result.returncode == 0 and calls[1:-1] == ALL
    assert not (runs / "ln_seed1/failed").exists()
    # The steps' messages are kept outside the runs, so that a pattern finds runs alone.
    assert (runs / "logs/ln_seed1/average.err").is_file()
    assert {path.name for path in runs.glob("*_seed*")} <= {"ln_seed1", "pn_seed1"}


def test_a_failed_training_is_noted_though_it_left_no_folder(checkout):
    result, calls = made(checkout, FAIL="transformer_pn_iwslt", CODE="1")
    assert result.returncode == 1 and calls[1:-1] == ALL[:5]
    noted = (checkout / "runs/iwslt14_de_en/pn_seed1/failed").read_text()
    assert noted == "train: train.sh: error: it went wrong\n"


def test_a_mistake_in_the_settings_ends_it_before_the_preparation(checkout):
    """Here the stub of train.sh refuses them; what it refuses is tested with train.sh."""
    result, calls = made(checkout, "model.encoder_nrom=1", FAIL="--check")
    assert result.returncode == 2 and not calls


def test_each_norm_with_settings_is_checked_before_the_preparation(checkout):
    norms = {"NORMS": "ln ln+encoder_layers=2 pn+dropout=0.1", "SEEDS": "1 2"}
    checks = [f"train iwslt14_de_en --check model._name=transformer_{words}" for words in
              ("ln_iwslt model.encoder_layers=2", "pn_iwslt model.dropout=0.1")]  # fmt: skip
    assert in_process("iwslt14", **norms).returncode == 0
    assert (checkout / "calls").read_text().splitlines()[:2] == checks
    (checkout / "calls").unlink()
    assert in_process("iwslt14", **norms, FAIL="--check").returncode == 2
    assert (checkout / "calls").read_text().splitlines() == checks[:1]


def test_only_options_of_the_preparation_are_offered():
    for name, option, offered in (("verses", "--archive", False), ("iwslt14", "--archive", True)):
        result = in_process(name, "--dry-run", option, "/x", NORMS="pn", SEEDS="1")
        assert (result.returncode == 0) is offered
        assert (option in in_process(name, "--help").stdout) is offered
        if offered:
            assert result.stdout.splitlines()[0].endswith(f"{option} /x")
        else:
            assert_refused(result, "unrecognized arguments: --archive")


def test_the_messages_of_a_step_are_complete(tmp_path, capfdbinary):
    """Also where they come after its end, from a process that it has started."""
    code = reproduce.execute(["bash", "-c", "(sleep 0.5; echo failed >&2) & exit 7"], tmp_path / "said")
    assert code == 7 and (tmp_path / "said").read_bytes() == capfdbinary.readouterr().err == b"failed\n"


def test_what_a_step_writes_is_read_to_its_end_though_nobody_takes_it(tmp_path):
    """A closed stderr, as of `| head`, and a full disk: the step must be able to write more than a pipe holds."""
    command = ["bash", "-c", "head -c 300000 /dev/zero | tr '\\0' x >&2; exit 3"]
    full = io.TextIOWrapper(open("/dev/full", "wb", buffering=0))  # noqa: SIM115
    with full, contextlib.redirect_stderr(full):
        assert reproduce.execute(command, tmp_path / "said") == 3
        assert (tmp_path / "said").stat().st_size == 300000
    assert reproduce.execute(command, tmp_path.__class__("/dev/full")) == 3


@pytest.mark.parametrize(("number", "code"), [("TERM", 143), ("INT", 130), ("KILL", 137)])
def test_a_step_that_a_signal_ends(checkout, number, code):
    (checkout / "scripts/average.sh").write_text(f"#!/bin/bash\nkill -{number} $$\n")
    result = in_process("iwslt14")
    assert result.returncode == (1 if number == "KILL" else code)
    assert (checkout / "runs/iwslt14_de_en/ln_seed1/failed").exists() is (number == "KILL")
    if number == "KILL":
        failed = (checkout / "runs/iwslt14_de_en/ln_seed1/failed").read_text()
        assert failed == "average: killed by SIGKILL, as happens when memory runs out\n"


def test_without_data_nothing_is_trained(checkout):
    result, calls = made(checkout, FAIL="prepare_iwslt14")
    assert result.returncode == 2 and len(calls) == 1


def test_a_report_that_fails_is_an_error(checkout):
    result, _ = made(checkout, FAIL="pn-report")
    assert result.returncode == 2


def test_several_machines(checkout):
    """The first does everything; another one waits for the data, trains, and leaves the rest alone."""
    machines = {"NNODES": "2", "MASTER_ADDR": "localhost"}
    result, calls = made(checkout, **machines, NODE_RANK="0")
    assert result.returncode == 0 and calls[1:-1] == ALL
    (checkout / "calls").unlink()
    data = checkout / "runs/data/iwslt14_de_en/bin"
    with mock.patch.object(time, "sleep", lambda _: data.mkdir(parents=True)):
        waited, _ = made(checkout, **machines, NODE_RANK="1")
    assert waited.returncode == 0 and f"waiting for the first machine to prepare {data.parent}" in waited.stderr
    calls = (checkout / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["train", "train", "train"]


def test_a_slurm_job_of_several_machines_trains_by_srun(checkout):
    slurm = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "3"}
    result, calls = made(checkout, **slurm)
    assert result.returncode == 0
    train = [call for call in calls if call.startswith("srun")]
    assert len(train) == 2 and [call for call in calls[1:-1] if call not in train] == ALL
    assert "--ntasks-per-node=1" in (checkout / "calls").read_text()
    refused = in_process("iwslt14", **slurm, SLURM_STEP_NUM_TASKS="3")
    assert_refused(refused, "srun", "once")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_it_all(checkout, number):
    driver = "from pn_fairseq import __main__; from pn_fairseq.pipeline import reproduce; from pathlib import Path; "
    driver += f"reproduce.ROOT = Path('{checkout}'); __main__.sys.exit(__main__.main())"
    process = subprocess.Popen(
        [sys.executable, "-c", driver, "reproduce", "iwslt14"],
        env=environment(HANG="generate", PATH=os.environ["PATH"]),
        **{"start_new_session": True, "stderr": subprocess.PIPE, "text": True},
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
