import pytest

from pn_fairseq.cli.plot_curves import main
from pn_fairseq.training_log import read_log

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
