import pytest

from pn_fairseq.cli.plot_curves import main
from pn_fairseq.report.curves import mean_curve, plot
from pn_fairseq.training_log import LearningCurve, read_log, read_training_log

LOG = """\
TransformerPNModel( {not json} )
begin training epoch 1
{"epoch": 1, "update": 0.1, "loss": "12.169", "nll_loss": "12.0", "num_updates": "20", "lr": "0.1"}
2026-01-01 00:00:00 | INFO | train_inner | {"epoch": 1, "loss": "11.5", "num_updates": "40"}
[2026-01-01][valid][INFO] - {"epoch": 1, "valid_loss": "9.2", "valid_nll_loss": "8.83", "valid_num_updates": "40"}
{"epoch": 1, "train_loss": "10.8", "train_nll_loss": "10.6", "train_num_updates": "40"}
"""


def test_both_log_formats_are_read(tmp_path):
    (tmp_path / "train.log").write_text(LOG)
    curve = read_log(tmp_path / "train.log")
    assert curve.train == {20: 12.169, 40: 11.5}
    assert curve.valid == {40: 8.83}


def test_what_a_resumed_run_did_again_counts_once_and_a_cut_off_line_not_at_all(tmp_path):
    (tmp_path / "train.log").write_text(LOG + '{"loss": "11.4", "num_updates": "40"}\n{"loss": "1", "num_up')
    assert read_log(tmp_path / "train.log").train == {20: 12.169, 40: 11.4}


def test_log_without_records_is_an_error(tmp_path):
    (tmp_path / "train.log").write_text("nothing\n")
    with pytest.raises(ValueError, match="holds no training record"):
        read_log(tmp_path / "train.log")


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg"])
def test_picture(suffix, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text(LOG)
    output = tmp_path / f"curves{suffix}"
    assert main([str(tmp_path / "a"), str(tmp_path / "b/train.log"), "--output", str(output)]) == 0
    assert output.stat().st_size > 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", output.name]


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["RUN", "--output", "curves.txt"], "curves.txt"),
        (["RUN", "--output", "/nowhere/curves.png"], "/nowhere"),
        (["/nowhere", "--output", "curves.png"], "/nowhere"),
        (["RUN", "RUN", "--output", "curves.png"], "--labels"),
        (["RUN", "--labels", "a", "b", "--output", "curves.png"], "--labels"),
        (["RUN"], "--output"),
    ],
)
def test_mistakes_get_one_line(arguments, needle, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/train.log").write_text(LOG)
    assert main([argument.replace("RUN", "run") for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and needle in error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


TWO_STARTS = """\
num. shared model params: 1,508,352 (num. trained: 1,508,352)
training on 1 devices (GPUs/TPUs)
{"loss": "12", "num_updates": "10", "wps": "500", "wpb": "100.5", "wall": "7", "norm_nu_rms": "0.25"}
{"loss": "11", "num_updates": "20", "wps": "250", "wpb": "100", "wall": "11", "norm_nu_rms": null}
{"valid_nll_loss": "9.2", "valid_num_updates": "20"}
{"loss": "10", "num_updates": "30", "wps": "inf", "wpb": "100", "wall": "15"}
{"loss": null, "num_updates": "35"}
{"loss": "10", "num_up
[2026-01-01][fairseq_cli.train][INFO] - training on 4 devices (GPUs/TPUs)
{"loss": "9", "num_updates": "30", "wps": "1000", "wpb": "200", "wall": "0"}
WARNING: NaN detected in output of encoder.layers.0, shape: torch.Size([1]), forward
early stop since valid performance hasn't improved for last 5 runs
done training in 6.5 seconds
"""


def test_starts_of_a_run(tmp_path):
    (tmp_path / "train.log").write_text(TWO_STARTS)
    log = read_training_log(tmp_path / "train.log")
    first, second = log.starts
    assert (first.workers, second.workers) == (1, 4)
    assert (first.reason, second.reason) == (None, "patience")
    assert first.seconds == 15 and second.seconds == 6.5
    assert first.tokens == 1005 + 1000 + 1000
    assert first.interval_seconds == pytest.approx(1005 / 500 + 1000 / 250)
    assert second.tokens == 2000 and second.interval_seconds == 2  # from update 20, where the first start had a record
    assert log.curve.train == {10: 12, 20: 11, 30: 9} and log.updates == 30 and log.ended
    assert log.tokens_per_second == {10: 500, 20: 250, 30: 1000}
    assert log.diagnostics == {"norm_nu_rms": {10: 0.25}}
    assert log.parameters == 1508352 and log.unreadable == 2 and log.faults == 1


def test_a_start_that_resumed_and_was_cut_off_is_as_long_as_its_records(tmp_path):
    # Without a line on devices it is told by its updates, which begin again; fairseq's own clock stands at 0 there.
    record = '{{"loss": "9", "num_updates": "{}", "wps": "100", "wpb": "50", "wall": "{}"}}\n'
    text = "".join(record.format(*numbers) for numbers in ((10, 8), (20, 13), (20, 0), (30, 0)))
    (tmp_path / "train.log").write_text(text)
    log = read_training_log(tmp_path / "train.log")
    assert [start.updates for start in log.starts] == [[10, 20], [20, 30]]
    assert [start.seconds for start in log.starts] == [13, 10] and not log.ended


def test_mean_of_curves():
    assert mean_curve([]) == mean_curve([{}]) == {}
    assert mean_curve([{1: 2.0, 2: 3.0}, {1: 4.0, 2: 7.0}]) == {1: 3.0, 2: 5.0}
    # Update 10 lies before the second curve, 40 behind it; at 20 it is a third of the way from 6 to 9.
    assert mean_curve([{10: 1.0, 20: 1.0, 30: 1.0, 40: 1.0}, {18: 6.0, 24: 9.0, 30: 3.0}]) == {20: 4.0, 30: 2.0}


def test_what_was_left_out_of_a_picture_is_told(tmp_path):
    full = LearningCurve({10: 9.0, 100: 5.0, 200: 4.0}, {100: 4.0, 200: 3.0})
    faulty = LearningCurve({10: 9.0, 100: float("nan"), 200: 4.0}, {})
    drawn = plot({"_a $b$": [full, full], "c": [faulty]}, tmp_path / "x.png")
    assert drawn.cut and drawn.nonfinite == ("c",) and drawn.missing == ("c",)
    flat = LearningCurve({10: 3.0, 100: 5.0}, {100: 4.0, 200: 4.0})
    assert plot({"a": [flat]}, tmp_path / "x.png") == type(drawn)(False, (), ())
