"""pn reproduce: which steps it takes, in which order, and what it does when one fails."""

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import only_writer, write_settings
from pn_fairseq.pipeline import steps, train
from pn_fairseq.pipeline.data.recipes import RECIPES
from pn_fairseq.pipeline.published import LM_TABLES, PAPER
from pn_fairseq.pipeline.training_settings import compose

from .. import scripts_helpers
from ..scripts_helpers import (
    ROOT,
    assert_refused,
    environment,
    locked_by_another,
    replace_steps,
    wait_for,
)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    """Results go below the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def unchecked(monkeypatch):
    """The settings of the runs are not checked, which takes a second for each model."""
    monkeypatch.setattr(train, "main", lambda argv: 0)


def in_process(name: str, *arguments, **environ) -> subprocess.CompletedProcess:
    """pn reproduce NAME in this process, as in a new one."""
    steps.check_training.cache_clear()
    return scripts_helpers.in_process("reproduce", name, *arguments, **environ, check=False)


def dry_run(name: str, *arguments, **environ) -> list[str]:
    result = in_process(name, "--dry-run", *arguments, **environ)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("name", ["verses", "iwslt14", "iwslt15_envi", "wmt14"])
def test_dry_run_prints_every_command(name, unchecked):
    experiment = steps.experiments()[name]
    config, few = experiment.config, "optimization.max_update=9"
    folders = []
    expected = [f"pn prepare {name} --dest runs/data/{config}"]
    for norm in ("bn", "pn"):
        for seed in (1, 7):
            run = f"runs/{config}/{norm}_seed{seed}"
            folders.append(run)
            settings = f"model._name=transformer_{norm}_{experiment.size} common.seed={seed} {few}"
            expected.append(f"pn train {config} --data runs/data/{config} --run {run} {settings}")
            expected += [f"pn {step} --run {run}" for step in ("average", "generate", "score")]
    expected.append(f"pn report {' '.join(folders)} --output runs/{config}/report")
    assert dry_run(name, few, "--norms", " bn  pn", "--seeds", "1 7") == expected
    assert (ROOT / f"configs/{config}.yaml").is_file()


def trained(lines: list[str]) -> dict[str, str]:
    """Folder of a run -> its settings, of the training commands of a dry run."""
    return dict(re.findall(r"(?m)^pn train .*--run (?:\S+/)?(\S+) (.*)$", "\n".join(lines)))


def test_rows_of_a_table(unchecked):
    lines = dry_run("iwslt14", "common.fp16=true", "--table", "powernorm-4", "--seeds", "1")
    expected = {}
    for norm in ("ln", "gn", "pnv"):
        expected[f"{norm}_seed1"] = f"model._name=transformer_{norm}_iwslt common.seed=1"
    release, one_group = "norm_variant=release", "layer_scale_groups=1"
    for norm, setting in (
        ("bn", release),
        ("brn", one_group),
        ("mabn", one_group),
        ("pn", release),
    ):
        settings = f"model._name=transformer_{norm}_iwslt common.seed=1 model.{setting}"
        expected[f"{norm}+{setting}_seed1"] = settings
    for run in expected:
        expected[run] += " common.fp16=true"
    assert trained(lines) == expected
    folder = "runs/iwslt14_de_en"
    assert lines[-1].startswith(f"pn report {folder}/bn+norm_variant=release_seed1 ")
    assert lines[-1].endswith(f" --output {folder}/report-powernorm-4 --paper powernorm-4")


@pytest.mark.parametrize("name", steps.experiments())
def test_help_lists_the_tables_and_each_is_planned(name, unchecked):
    """Its rows, with a configuration that exists; of every corpus that has prepared data. Of the
    options of the preparation it lists those of the corpus.
    """
    text = in_process(name, "--help").stdout
    assert ("--archive" in text) == ("--archive" in RECIPES[name].OPTIONS)
    listed = re.search(r"--table NAME(?s:.*?)NAME:(?s:(.*?))\n  --", text)
    config, tables = steps.experiments()[name].config, {**PAPER, **LM_TABLES}
    known = [table for table, rows in tables.items() if rows.config.startswith(config)]
    words = re.sub(r"-\n +", "-", listed[1]) if listed else ""
    assert re.findall(r"[^\s,]+", words) == known
    text = ("--corpus", "/texts") if "--corpus" in RECIPES[name].OPTIONS else ()
    for table in known:
        lines = dry_run(name, *text, "--table", table, "--seeds", "1")
        assert lines[0].startswith(f"pn prepare {name} --dest runs/data/{config}")
        assert (ROOT / f"configs/{tables[table].config}.yaml").is_file()
        (planned,) = {line.split(" --run")[0] for line in lines if line.startswith("pn train")}
        assert planned == f"pn train {tables[table].config} --data runs/data/{config}"
        assert len(trained(lines)) == len(tables[table].rows)
        paper = f" --paper {table}" if table in PAPER else ""
        assert lines[-1].endswith(f"--output runs/{tables[table].config}/report-{table}{paper}")


def test_the_settings_of_a_table_are_checked():
    """From the command line to the configuration and the norms; tests/test_configs.py has the
    rows of all tables.
    """
    dry_run("iwslt14", "--table", "adanorm-4-code", "--seeds", "1")


def test_tables_have_the_norms_and_options_of_the_papers(unchecked):
    one = ("--seeds", "1")
    rows = trained(dry_run("wmt14", "--table", "powernorm-1-wmt14", *one))
    bn = rows["bn+norm_variant=release+norm_sync=on_seed1"]
    assert bn.endswith("model.norm_variant=release model.norm_sync=on")
    rows = trained(dry_run("ptb", "--corpus", "/texts", *one))
    scaled = [name for name, settings in rows.items() if "layer_scale_groups=1" in settings]
    assert {name.split("+")[0] for name in scaled} == {"bn", "brn", "mabn"} and len(rows) == 7
    rows = trained(dry_run("iwslt14", "--table", "adanorm-3", *one))
    assert rows["dn+decoder_norm=detach+norm_options.detach=std_seed1"] == (
        "model._name=transformer_dn_iwslt common.seed=1 model.decoder_norm=detach "
        "model.norm_options.detach=std"
    )


def test_language_models_are_trained_for_every_model_and_norm(unchecked):
    few = "optimization.max_update=9"
    norms = ("--norms", "pn ln+layer_scale_groups=1", "--seeds", "3")
    lines = dry_run("verses_lm", few, *norms)
    expected, folders = ["pn prepare verses_lm --dest runs/data/verses_lm_en"], []
    command = "pn train verses_lm_en --data runs/data/verses_lm_en --run"
    for model in ("transformer_lm", "tensorized_lm"):
        for norm, setting in (("pn", ""), ("ln", "layer_scale_groups=1")):
            name = f"{norm}+{setting}" if setting else norm
            run = f"runs/verses_lm_en/{model}_{name}_seed3"
            settings = f"model._name={model}_{norm}_tiny common.seed=3"
            if setting:
                settings += f" model.{setting}"
            folders.append(run)
            expected.append(f"{command} {run} {settings} {few}")
            expected += [f"pn {step} --run {run}" for step in ("average", "evaluate-lm")]
    assert lines == [*expected, f"pn report {' '.join(folders)} --output runs/verses_lm_en/report"]
    one = ("--norms", "pn", "--seeds", "1")
    lines = dry_run("ptb", "--corpus", "/texts", "--size", "wt103", *one)
    assert lines[0] == "pn prepare ptb --dest runs/data/ptb_lm --corpus /texts"
    assert "--run runs/ptb_lm/pn_seed1 model._name=tensorized_lm_pn_wt103" in lines[1]
    assert len(dry_run("verses_lm", "--models", "tensorized_lm", *one)) == 5


def test_dry_run_can_be_pasted_into_a_shell(unchecked, tmp_path):
    places = ("--archive", "my talks.tgz", "--runs", tmp_path / "a b")
    lines = dry_run("iwslt14", *places, "--norms", "pn", "--seeds", "1")
    assert shlex.split(lines[0])[-2:] == ["--archive", "my talks.tgz"]
    assert "a b/pn_seed1" in shlex.split(lines[1])
    assert not (tmp_path / "a b").exists()


STUB = """#!/usr/bin/env bash
# Records its arguments; fails or hangs where FAIL or HANG matches.
echo "$*" >>"$CALLS"
case "$*" in
*"${FAIL:-nothing}"*)
    printf 'some words\\n\\n%s: error: it went wrong\\n\\n' "pn $1" >&2
    exit "${CODE:-2}"
    ;;
*"${HANG:-nothing}"*) exec sleep 600 ;;
esac
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The steps are a stub, which records its arguments in this file; the checks of the
    settings are recorded as well.
    """
    stub, file = tmp_path / "stub", tmp_path / "calls"
    stub.write_text(STUB)
    stub.chmod(0o755)
    monkeypatch.setenv("CALLS", str(file))

    def check(argv):
        with file.open("a") as lines:
            lines.write(f"train {' '.join(argv)}\n")
        if os.environ.get("FAIL") == "--check":
            raise UserError("unknown setting")

    monkeypatch.setattr(train, "main", check)
    replace_steps(monkeypatch, lambda step: [stub, *step])
    return file


def made(calls, *arguments, **environ) -> tuple[subprocess.CompletedProcess, list[str]]:
    calls.unlink(missing_ok=True)
    result = in_process("iwslt14", *TWO, *arguments, **environ)
    first, *lines = calls.read_text().splitlines()
    # The settings are checked before the data is prepared.
    check = "train iwslt14_de_en --check model._name=transformer_ln_iwslt"
    assert first == " ".join([check, *arguments])
    # "train iwslt14_de_en --data ... --run R ..." -> "train ln_seed1"
    found = []
    for line in lines:
        if "--check" not in line:
            run = line.split("--run ")[-1].split()[0]
            found.append(f"{line.split()[0]} {run.split('/')[-1]}")
    return result, found


TWO = ("--norms", "ln,pn", "--seeds", "1")
STEPS = ["train", "average", "generate", "score"]
ALL = [f"{step} ln_seed1" for step in STEPS] + [f"{step} pn_seed1" for step in STEPS]


RUNS = Path("runs/iwslt14_de_en")


def test_a_failed_run_is_named_and_the_others_continue(calls):
    result, made_of = made(calls, FAIL=f"average --run {RUNS.absolute()}/ln_seed1")
    assert result.returncode == 1 and "1 of 2 runs failed: ln_seed1" in result.stderr
    assert made_of[1:-1] == ALL[:2] + ALL[4:]
    assert made_of[-1].startswith("report")
    assert (RUNS / "ln_seed1/failed").read_text() == "average: pn average: error: it went wrong\n"
    assert not (RUNS / "pn_seed1/failed").exists()
    result, made_of = made(calls)
    assert result.returncode == 0 and made_of[1:-1] == ALL
    assert not (RUNS / "ln_seed1/failed").exists()
    # The steps' messages are kept outside the runs, so that a pattern finds runs only.
    assert (RUNS / "logs/ln_seed1/average.err").is_file()
    assert {path.name for path in RUNS.glob("*_seed*")} <= {"ln_seed1", "pn_seed1"}


def test_a_failed_training_is_noted_though_it_left_no_folder(calls):
    result, made_of = made(calls, FAIL="transformer_pn_iwslt", CODE="1")
    assert result.returncode == 1 and made_of[1:-1] == ALL[:5]
    assert (RUNS / "pn_seed1/failed").read_text() == "train: pn train: error: it went wrong\n"


def test_a_run_that_another_process_trains_is_no_failure(calls):
    """pn train beside it: the step is refused by the lock."""
    (RUNS / "pn_seed1").mkdir(parents=True)
    with locked_by_another(RUNS / "pn_seed1/.lock"):
        result, _ = made(calls, FAIL="transformer_pn_iwslt")
    assert result.returncode == 1
    assert "pn_seed1 is trained by another process now: run this command again" in result.stderr
    assert not (RUNS / "pn_seed1/failed").exists()


def test_each_norm_with_settings_is_checked_before_the_preparation(calls):
    norms = ("--norms", "ln,ln+encoder_layers=2,pn+dropout=0.1", "--seeds", "1,2")
    check = "train iwslt14_de_en --check model._name=transformer_"
    checks = [f"{check}ln_iwslt model.encoder_layers=2", f"{check}pn_iwslt model.dropout=0.1"]
    assert in_process("iwslt14", *norms).returncode == 0
    assert calls.read_text().splitlines()[:2] == checks
    calls.unlink()
    assert in_process("iwslt14", *norms, FAIL="--check").returncode == 2
    assert calls.read_text().splitlines() == checks[:1]


@pytest.fixture
def shell(monkeypatch):
    """A step is a line for the shell."""
    replace_steps(monkeypatch, lambda step: ["bash", "-c", *step])


def test_the_messages_of_a_step_are_complete(shell, tmp_path, capfdbinary):
    """Also where they come after its end, from a process that it has started.

    They are whole lines.
    """
    step = ["(sleep 0.5; printf fai >&2; sleep 0.1; printf led >&2) & exit 7"]
    assert steps.execute(step, tmp_path / "messages") == 7
    assert (tmp_path / "messages").read_bytes() == b"failed\n"
    assert capfdbinary.readouterr().err == b"failed\n"


def test_what_a_step_writes_is_read_to_its_end_though_nobody_takes_it(shell, tmp_path):
    """A closed stderr, as of `| head`, and a full disk: the step must be able to write more than
    a pipe holds.
    """
    step = ["head -c 300000 /dev/zero | tr '\\0' x >&2; exit 3"]
    full = io.TextIOWrapper(open("/dev/full", "wb", buffering=0))  # noqa: SIM115
    with full, contextlib.redirect_stderr(full):
        assert steps.execute(step, tmp_path / "messages") == 3
        assert (tmp_path / "messages").stat().st_size == 300001  # and a line feed
    assert steps.execute(step, Path("/dev/full")) == 3


@pytest.mark.parametrize(("number", "code"), [("TERM", 143), ("INT", 130), ("KILL", 1)])
def test_a_step_that_a_signal_ends(calls, monkeypatch, number, code):
    # A background job inherits that SIGINT is ignored.
    kill = ["env", "--default-signal", "bash", "-c", f"kill -{number} $$"]
    replace_steps(monkeypatch, lambda step: kill if step[0] == "average" else ["true"])
    result = in_process("iwslt14", *TWO)
    assert result.returncode == code
    failed = RUNS / "ln_seed1/failed"
    if number == "KILL":
        said = "average: killed by SIGKILL, as happens when memory runs out\n"
        assert failed.read_text() == said
    else:
        assert not failed.exists()


@pytest.mark.parametrize(("fails", "count"), [("prepare iwslt14", 1), ("report /", 10)])
def test_without_data_or_report_it_is_an_error(calls, fails, count):
    result, made_of = made(calls, FAIL=fails)
    assert result.returncode == 2 and len(made_of) == count


def test_a_second_one_in_the_same_folder_is_told_which_run_the_first_one_makes(unchecked, tmp_path):
    """Before the settings are checked, which takes seconds; and nothing of a killed one remains."""
    runs = tmp_path / "runs/iwslt14_de_en"
    ready, written = os.pipe()
    first = os.fork()
    if not first:
        with only_writer(runs) as note:
            note("pn_seed1: train")
            os.write(written, b"ready")
            time.sleep(60)
    os.read(ready, 5)
    before = set(tmp_path.rglob("*"))
    try:
        who = f"'{runs}' is being made by another process ({first}, pn_seed1: train)"
        assert_refused(in_process("iwslt14"), f"{who}: wait for it, or name another output")
        assert set(tmp_path.rglob("*")) == before
        assert dry_run("iwslt14", "--norms", "ln")
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
    steps.check_no_writer(runs)
    assert not list(runs.parent.iterdir())


# test_a_step_that_a_signal_ends has SIGINT, which the step gets as well, and test_train.py sends it
# to a process.
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_an_interruption_ends_it_all(calls, tmp_path, number):
    driver = f"""
import sys
import pytest
from pn_fairseq import __main__
from pn_fairseq.pipeline import train
from tests.scripts_helpers import replace_steps

train.main = lambda argv: 0
replace_steps(pytest.MonkeyPatch(), lambda step: ["{tmp_path}/stub", *step])
__main__.main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", driver, "reproduce", "iwslt14"],
        env=environment(HANG="generate", PYTHONPATH=str(ROOT)),
        **{"start_new_session": True, "stderr": subprocess.PIPE, "text": True},
    )
    wait_for(lambda: calls.exists() and "generate" in calls.read_text(), process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    last = stderr.splitlines()[-1]
    assert last == "pn reproduce: interrupted; run the same command again to resume"
    assert began(calls.read_text().splitlines()) == ["prepare", "train", "average", "generate"]


def began(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines]


# --- a configuration, with your own data ---


def own(data, *arguments, **environ):
    return in_process("verses_es_en", "--data", data, "--runs", "sweep", *arguments, **environ)


def test_a_configuration_with_own_data(data, calls):
    planned = own(data, "--dry-run", "--seeds", "5")
    assert planned.returncode == 0 and "pn prepare" not in planned.stdout
    settings = "model._name=transformer_pn_tiny common.seed=5"
    command = f"pn train verses_es_en --data {data} --run sweep/pn_seed5 {settings}"
    assert command in planned.stdout.splitlines()
    assert own(data, *TWO, "optimization.max_update=3").returncode == 0
    lines = [line for line in calls.read_text().splitlines() if "--check" not in line]
    assert began(lines) == [*STEPS, *STEPS, "report"]
    settings = "model._name=transformer_ln_tiny common.seed=1 optimization.max_update=3"
    assert lines[0].endswith(settings)


@pytest.mark.parametrize("option", [[], pytest.param(["--dry-run"], marks=pytest.mark.slow)])
def test_conflicts_are_found_before_anything_runs(data, tmp_path, monkeypatch, option):
    """And no message advises to remove the data."""
    replace_steps(monkeypatch, lambda step: ["false"])
    french = tmp_path / "french"
    (french / "bin").mkdir(parents=True)
    (french / "settings.txt").write_text("source=fr\ntarget=en\n")
    one = ("--norms", "pn", "--seeds", "1", *option)
    advice = "add task.source_lang=fr task.target_lang=en"
    assert_refused(own(french, *one), "fr-en", "es-en", advice)
    refused = in_process("verses", "--data", french, "task.source_lang=fr", *one)
    assert refused.returncode == 2
    assert "(source=fr, not es)" in refused.stderr and "another" in refused.stderr
    refused = in_process("verses", "--data", data, *one)
    assert refused.returncode == 2 and "(bpe=300, not 4000)" in refused.stderr
    assert_refused(own(tmp_path, *one), "--data '", "is not prepared data")
    run = tmp_path / "sweep/pn_seed1"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("model: {_name: transformer_pn_tiny, dropout: 0.5}\n")
    different = "pn_seed1' was started with different settings"
    assert_refused(own(data, *one), different, "use another --run")


@pytest.fixture
def begun(tmp_path) -> Path:
    """The folder of a run of :func:`own`, which has no model yet."""
    run = tmp_path / "sweep/pn_seed1"
    run.mkdir(parents=True)
    cfg, _ = compose(ROOT / "configs/verses_es_en.yaml", [], world_size=1, on_cpu=True)
    (run / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    return run


PLAN = ("--dry-run", "--norms", "pn", "--seeds", "1,2")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("limit", "named"),
    [
        pytest.param("optimization.max_update=60", "60 updates", marks=pytest.mark.slow),
        ("optimization.max_epoch=2", "2 epochs"),
    ],
)
def test_a_run_that_is_longer_than_the_others_is_named_at_once(limit, named, data, begun):
    planned = own(data, *PLAN, limit)
    assert planned.returncode == 0 and "note:" not in planned.stderr
    saved = "Saved checkpoint a (epoch 3 @ 150 updates, score 4.2) (writing took 1 seconds)\n"
    (begun / "train.log").write_text(saved)
    said = own(data, *PLAN, limit).stderr
    assert f"note: '{begun}' was trained for " in said
    assert f", more than {limit}: it stays as it is" in said
    assert f"is not comparable with runs of {named}" in said
    longer = own(data, *PLAN, limit.partition("=")[0] + "=150")
    assert "note:" not in longer.stderr


@pytest.mark.ci
def test_a_dry_run_says_what_is_done_and_what_would_be_made_again(data, begun):
    shutil.copy(data / "settings.txt", begun / "data.settings")
    cfg = OmegaConf.load(begun / "config.yaml")
    write_settings(begun / "made.txt", train.goal(cfg, data))
    (begun / "checkpoints").mkdir()
    (begun / "checkpoints/averaged.pt").touch()

    def marked(planned) -> list[str]:
        lines = planned.stdout.splitlines()
        return [line.split()[1] for line in lines if line.endswith("  # done")]

    planned = own(data, *PLAN)
    assert marked(planned) == ["train", "average"]
    assert planned.stderr == "[verses_es_en] the settings are valid\n"
    again = own(data, *PLAN, "generation.beam=2")
    assert marked(again) == []
    assert f"note: '{begun}' would be decoded again, with generation.beam=2\n" in again.stderr
    assert again.stderr.endswith("the settings are valid; notes above: 1\n")
    more = own(data, *PLAN, "optimization.max_update=99999")
    assert marked(more) == [] and f"'{begun}' would be trained on from update 0\n" in more.stderr


@pytest.mark.slow
def test_a_conflict_is_one_line_of_a_process(tmp_path):
    """Without what fairseq and hydra log when they are imported."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "settings.txt").write_text("source=fr\ntarget=en\n")
    words = ("-m", "pn_fairseq", "reproduce", "verses_es_en", "--data", tmp_path, "--dry-run")
    result = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == ""
    assert_refused(result, "pn reproduce: error: ")
    assert result.stderr.count("\n") == 1, result.stderr
