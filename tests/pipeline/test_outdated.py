"""What was made before a run was trained on is named wherever it is read."""

import pytest
import torch

from pn_fairseq.common.files import read_settings
from pn_fairseq.pipeline import outdated, stamp

from ..fixtures import reports
from ..fixtures.runs import small_run
from ..scripts_helpers import in_process

KEPT = "average_last: 2\ncheckpoint: {keep_interval_updates: 10}\n"


def save(folder, name: str, value: float) -> None:
    """What pn average reads of a checkpoint."""
    history = [{"optimizer_name": "FairseqAdam", "num_updates": int(value)}]
    state = {"model": {"w": torch.tensor([value])}, "optimizer_history": history}
    torch.save(state, folder / name)


@pytest.fixture
def run(tmp_path):
    """A run of 30 updates that was averaged."""
    folder = small_run(tmp_path, 3)
    (folder / "config.yaml").write_text(KEPT)
    for update in (20, 30):
        save(folder / "checkpoints", f"checkpoint_1_{update}.pt", update)
    in_process("average", "--run", folder)
    return folder


def test_an_average_is_outdated_once_the_run_has_newer_checkpoints(run):
    averaged = run / "checkpoints/averaged.pt"
    assert outdated.of_average(averaged) == ""
    (run / "checkpoints/checkpoint_1_30.pt").unlink()  # removing files is no training
    assert outdated.of_average(averaged) == ""
    save(run / "checkpoints", "checkpoint_2_100.pt", 100)
    text = outdated.of_average(averaged)
    assert "the average up to update 30, and the run was trained on to update 100" in text
    assert f"(pn average --run {run} makes it again)" in text
    # checkpoint_last.pt may be newer than the last save by updates
    log = "Saved checkpoint checkpoint_{} (epoch 2 @ {} updates, score 3.0) (writing took 1 s)\n"
    (run / "train.log").write_text(log.format("2_100.pt", 100) + log.format("last.pt", 103))
    assert "was trained on to update 103 (" in outdated.of_average(averaged)
    in_process("average", "--run", run)
    assert outdated.of_average(averaged) == ""


LOG = "Saved checkpoint checkpoint_{} (epoch 2 @ {} updates, score 3.0) (writing took 1 s)\n"


def test_an_average_is_outdated_once_the_run_was_trained_on_without_a_save_by_updates(run):
    averaged = run / "checkpoints/averaged.pt"
    last = "checkpoint_last.pt"
    (run / "train.log").write_text(LOG.format("1_30.pt", 30) + LOG.format("last.pt", 32))
    save(run / "checkpoints", last, 32)
    averaged.unlink()
    in_process("average", "--run", run)
    assert outdated.of_average(averaged) == "", "it was said when the average was made"
    with (run / "train.log").open("a") as log:
        log.write(LOG.format("last.pt", 36))
    save(run / "checkpoints", last, 36)
    text = outdated.of_average(averaged)
    assert (
        "the average up to update 30, and the run was trained on to update 36, which only" in text
    )
    said = in_process("average", "--run", run).stderr
    assert "already exists" in said
    assert f"{last} (update 36) is newer than all of these (up to update 30)" in said
    assert f"pn average --inputs {run}" in said


def test_of_checkpoint_last_only(tmp_path):
    """Of a run that is shorter than the interval of saving."""
    folder = small_run(tmp_path, 3)
    (folder / "config.yaml").write_text(KEPT)
    save(folder / "checkpoints", "checkpoint_last.pt", 30)
    in_process("average", "--run", folder)
    assert outdated.of_average(folder / "checkpoints/averaged.pt") == ""
    save(folder / "checkpoints", "checkpoint_last.pt", 48)
    text = outdated.of_average(folder / "checkpoints/averaged.pt")
    assert "was made before checkpoint_last.pt: the run was trained on" in text


@pytest.mark.parametrize("verb", ["generate", "translate", "fold", "export"])
def test_every_command_that_reads_it_says_so(run, verb, tmp_path):
    averaged = run / "checkpoints/averaged.pt"
    words = {
        "generate": ["--run", run],
        "translate": ["--run", run, "--input", "/dev/null"],
        "fold": [averaged, tmp_path / "folded.pt"],
        "export": [averaged, "--pt2", tmp_path / "exported"],
    }
    expected = f"[{verb}] note: {averaged} is the average up to update 30"
    # the model of one number cannot be decoded, which shows after the note
    assert expected not in in_process(verb, *words[verb], check=False).stderr
    save(run / "checkpoints", "checkpoint_1_40.pt", 40)
    assert expected in in_process(verb, *words[verb], check=False).stderr


def reported(folder, *options) -> list[str]:
    """The lines of a report about what failed in a run."""
    page = reports.report(folder, options=("--resamples", "10", *options))
    return page.text.partition("## What failed")[2].partition("\n## ")[0].splitlines()


def test_a_report_lists_averages_and_hypotheses_of_earlier_weights(tmp_path):
    folder = reports.make_run(tmp_path / "run")
    checkpoints, made = folder / "checkpoints", folder / "generate/test/made.txt"
    (tmp_path / "data/bin").mkdir(parents=True)
    (folder / "data").write_text(f"{tmp_path / 'data'}\n")
    save(checkpoints, "checkpoint_1_30.pt", 30)
    average = ("average", "--run", folder, "--last", 1)
    in_process(*average)
    # as pn generate records it
    decoded = stamp.made_from({"beam": 5}, {"checkpoint": [checkpoints / "averaged.pt"]})
    decoded |= outdated.record_of_result([checkpoints / "averaged.pt"], checkpoints)
    made.write_text("".join(f"{name}={value}\n" for name, value in decoded.items()))
    assert not any("averaged.pt" in line for line in reported(folder))
    save(checkpoints, "checkpoint_1_48.pt", 48)
    lines = "\n".join(reported(folder))
    assert "checkpoints/averaged.pt is the average up to update 30" in lines
    assert "made from an earlier" not in lines
    in_process(*average)
    lines = "\n".join(reported(folder))
    assert "generate/test/hyp.tok was made from an earlier averaged.pt" in lines
    assert "is the average up to" not in lines
    # hypotheses of another checkpoint are not older
    made.write_text(made.read_text().replace("averaged.pt", "checkpoint_best.pt"))
    assert not any("earlier" in line for line in reported(folder))


def test_pn_score_names_hypotheses_of_earlier_weights(run):
    result = run / "generate/test"
    result.mkdir(parents=True)
    for name in ("hyp.tok", "ref.tok"):
        (result / name).write_text("a b c d\n")
    raw = run.parent / "data/raw"
    raw.mkdir()
    (raw / "test.en").write_text("a b c d\n")
    checkpoints = run / "checkpoints"
    decoded = stamp.made_from({}, {"checkpoint": [checkpoints / "averaged.pt"]})
    decoded |= outdated.record_of_result([checkpoints / "averaged.pt"], checkpoints)
    (result / "made.txt").write_text("".join(f"{n}={v}\n" for n, v in decoded.items()))
    assert "note:" not in in_process("score", "--run", run).stderr
    save(checkpoints, "checkpoint_1_40.pt", 40)
    assert "[score] note: " in in_process("score", "--run", run).stderr
    in_process("average", "--run", run)
    said = in_process("score", "--run", run).stderr
    assert f"{result}/hyp.tok was made from an earlier averaged.pt" in said
    assert read_settings(checkpoints / "averaged.pt.made.txt")["up_to"] == "40"
