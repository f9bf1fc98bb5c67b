"""Folders of runs and their logs, of ``pn train`` and of fairseq-train; what pn train says
beside its training.
"""

import argparse
import json
import logging
import os
import signal
import sys
import time

import pytest
import torch
from omegaconf import OmegaConf

from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import lock, only_writer, write_settings
from pn_fairseq.pipeline import train
from pn_fairseq.pipeline.runs import open_run
from pn_fairseq.pipeline.train import Progress
from pn_fairseq.pipeline.training_log import read_log
from pn_fairseq.report.runs import read_run, read_runs


def test_a_folder_that_is_not_a_run_or_is_damaged(tmp_path):
    with pytest.raises(UserError, match="is not a training run"):
        open_run(tmp_path)
    for text, reason in (("", "holds no settings"), ("a: [1", "cannot be read as settings")):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=f"config.yaml {reason}"):
            open_run(tmp_path)


@pytest.mark.parametrize(
    ("made", "wanted", "listed"),
    [
        ("update 3", 10, True),
        ("update 10", 10, False),
        ("update 3", None, False),
        (None, 10, False),
        ("", 10, False),
    ],
)
def test_an_average_of_fewer_checkpoints_than_asked_for_is_a_problem(
    made, wanted, listed, tmp_path
):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "generate/test").mkdir(parents=True)
    (tmp_path / "generate/test/hyp.tok").write_text("a\n")
    (tmp_path / "config.yaml").write_text("{}" if wanted is None else f"average_last: {wanted}\n")
    if made is not None:
        (tmp_path / "checkpoints/averaged.pt.made.txt").write_text(f"averaged={made}\n")
    problem = "averaged.pt is the average of 3, not of average_last=10 checkpoints"
    assert (problem in read_run(tmp_path, "run").problems) == listed


def checkpoint(file, update, train, valid):
    """As fairseq-train saves it: settings, with a Namespace of all flags as the model, and the
    sums of its meters.
    """
    name = "transformer_pn_tiny"
    cfg = {
        "_name": None,
        "common": {"seed": 3},
        "optimization": {"max_update": 40},
        "task": {"_name": "translation", "data": f"{file.parent}/bin:y"},
        "model": argparse.Namespace(arch=name, _name=name, seed=3, dropout=0.3, data="x"),
    }
    metrics = {}
    for group, nll in (("train", train), ("valid", valid)):
        metrics[group] = []
        for meter, loss in (("loss", nll + 1), ("nll_loss", nll)):
            sums = {"sum": torch.tensor(loss * 50.0), "count": torch.tensor(50), "round": 3}
            metrics[group].append((0, meter, "AverageMeter", sums))
    state = {
        "cfg": cfg,
        "model": {"w": torch.zeros(1)},
        "optimizer_history": [{"num_updates": update}],
        "extra_state": {"metrics": metrics},
    }
    torch.save(state, file)


def test_a_folder_of_fairseq_train_without_a_log(tmp_path):
    """Settings and losses are read from the checkpoints, and the report says so; also if the log
    is not JSON.
    """
    for name, update in (("1", 20), ("_last", 40), ("_best", 40)):
        file = tmp_path / f"checkpoint{name}.pt"
        checkpoint(file, update, 8 - update / 20, 7 - update / 20)
    checkpoint(tmp_path / "averaged.pt", 0, 1, 1)  # no checkpoint of the training
    (tmp_path / "bin").mkdir()
    opened = open_run(tmp_path)
    assert not opened.ours and opened.data is None and opened.log is None
    assert opened.checkpoints == tmp_path and opened.bin == tmp_path / "bin"
    assert "model.seed" not in opened.settings_by_name
    for text in (None, "num. shared model params: 5\nepoch 001:  10 / 20 loss=3, num_updates=10\n"):
        if text:
            (tmp_path / "saved.txt").write_text(text)
        (run,) = read_runs([tmp_path])
        assert run.log.train_nll == {20: 7.0, 40: 6.0} and run.log.train == {20: 8.0, 40: 7.0}
        assert run.log.valid == {20: 6.0, 40: 5.0} and run.seed == 3
        assert run.get("model.dropout") == 0.3 and run.get("model._name") == "transformer_pn_tiny"
        problems = "\n".join(run.problems)
        assert "no log in JSON: settings and losses are from 3 checkpoints" in problems
        assert "not finished" not in problems


LOG = """\
TransformerPNModel( {not json} )
2026-01-01 00:00:00 | INFO | fairseq_cli.train | {'task': {'eval_bleu_args': '{"beam": 5}'}, 'model': None}
begin training epoch 1
{"epoch": 1, "update": 0.1, "loss": "12.169", "nll_loss": "12.0", "num_updates": "20", "lr": "0.1"}
2026-01-01 00:00:00 | INFO | train_inner | {"epoch": 1, "loss": "11.5", "num_updates": "40"}
[2026-01-01][valid][INFO] - {"epoch": 1, "valid_loss": "9.2", "valid_nll_loss": "8.83", "valid_num_updates": "40"}
{"epoch": 1, "train_loss": "10.8", "train_nll_loss": "10.6", "train_num_updates": "40"}
"""


def test_records_are_read_with_any_prefix(tmp_path):
    (tmp_path / "train.log").write_text(LOG)
    curve = read_log(tmp_path / "train.log")
    assert curve.train == {20: 12.169, 40: 11.5}
    assert curve.valid == {40: 8.83}
    assert read_log(tmp_path / "train.log").unreadable == 0, "a setting is no record"


def test_a_criterion_without_label_smoothing_logs_one_loss(tmp_path):
    text = '{"loss": "9", "num_updates": "10"}\n{"valid_loss": "8", "valid_num_updates": "10"}\n'
    (tmp_path / "train.log").write_text(text)
    log = read_log(tmp_path / "train.log")
    assert log.train == log.train_nll == {10: 9} and log.valid == {10: 8}


TWO_STARTS = """\
num. shared model params: 1,508,352 (num. trained: 1,508,352)
training on 1 devices (GPUs/TPUs)
{"loss": "12", "num_updates": "10", "wps": "500", "wpb": "100.5", "wall": "7"}
{"loss": "11", "num_updates": "20", "wps": "250", "wpb": "100", "wall": "11"}
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
    log = read_log(tmp_path / "train.log")
    first, second = log.starts
    assert first.world_size == 1 and second.world_size == 4
    assert first.reason is None and second.reason == "patience"
    assert first.seconds == 15 and second.seconds == 6.5
    assert first.tokens == 1005 + 1000 + 1000
    assert first.interval_seconds == pytest.approx(1005 / 500 + 1000 / 250)
    # from update 20, where the first start had a record
    assert second.tokens == 2000 and second.interval_seconds == 2
    assert log.train == {10: 12, 20: 11, 30: 9} and log.updates == 30 and log.ended
    assert log.tokens_per_second == {10: 500, 20: 250, 30: 1000}
    assert log.parameters == 1508352 and log.unreadable == 2 and log.faults == 1


def test_a_start_that_resumed_and_was_cut_off_is_as_long_as_its_records(tmp_path):
    # Without a line on devices, a start is recognized by its updates, which begin again; fairseq's
    # clock is 0 there.
    with (tmp_path / "train.log").open("w") as file:
        for update, wall in (("10", "8"), ("20", "13"), ("20", "0"), ("30", "0")):
            record = {"loss": "9", "num_updates": update, "wps": "100", "wpb": "50", "wall": wall}
            file.write(f"{json.dumps(record)}\n")
    log = read_log(tmp_path / "train.log")
    assert [start.updates for start in log.starts] == [[10, 20], [20, 30]]
    assert [start.seconds for start in log.starts] == [13, 10] and not log.ended


# --- What pn train says, when it is done, and that it is alone ---


FULL = OSError(28, "No space left on device", "/x/checkpoint_last.pt")


@pytest.mark.parametrize(
    ("error", "needles", "helps"),
    [
        (FULL, ("/x/checkpoint_last.pt: the disk",), True),
        (
            OSError(28, "No space left on device"),
            ("/checkpoints/checkpoint_best.pt: the disk is full",),
            True,
        ),
        (
            OSError(27, "File too large"),
            ("/checkpoints/checkpoint_best.pt: there is no space", "a limit of file size"),
            True,
        ),
        (ConnectionResetError("Connection reset by peer"), ("Connection reset",), True),
        (AttributeError("it has no x"), ("AttributeError: it has no x", "bug", "train.log"), False),
        # fairseq raises it when it saves the first checkpoint.
        (KeyError("bleu"), ("best_checkpoint_metric=bleu", "task.eval_bleu=true"), False),
    ],
)
def test_only_a_fault_of_the_machine_says_that_the_same_command_helps(
    error, needles, helps, tmp_path
):
    cfg = OmegaConf.create({"checkpoint": {"best_checkpoint_metric": "bleu"}})
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/checkpoint_best.pt.tmp").touch()
    line = str(train.explained(error, cfg, tmp_path))
    for needle in needles:
        assert needle in line
    assert ("run the same command again" in line) is helps, line


def test_a_run_is_finished_where_it_ended_with_the_same_limits(tmp_path):
    limits = {"optimization": {"max_update": 10, "max_epoch": 0}, "checkpoint": {"patience": 2}}
    cfg, data = OmegaConf.create(limits), tmp_path / "data"
    data.mkdir()
    (data / "settings.txt").write_text("source=es\n")
    assert not train.is_finished(cfg, 5, tmp_path, data), "without a stamp"
    assert train.is_finished(cfg, 10, tmp_path, data)
    more = OmegaConf.merge(cfg, {"checkpoint": {"patience": 3}})
    write_settings(tmp_path / "made.txt", train.goal(cfg, data))
    assert train.is_finished(cfg, 5, tmp_path, data)
    assert not train.is_finished(more, 5, tmp_path, data)
    assert train.is_finished(more, 10, tmp_path, data)


def test_two_training_processes_in_one_run_are_refused(tmp_path):
    """For as long as the training exists, and not the processes that load its data, which may
    outlive it a little.
    """
    ready, written = os.pipe()
    training = os.fork()
    if not training:
        try:
            lock(tmp_path / ".lock", "by another process")
            loader = os.fork()
            if loader:
                os.write(written, str(loader).encode())
            time.sleep(60)
        finally:
            os._exit(0)
    os.close(written)
    loader = int(os.read(ready, 20))
    with pytest.raises(UserError, match="another process"):
        lock(tmp_path / ".lock", "by another process")
    os.kill(training, signal.SIGKILL)
    os.waitpid(training, 0)
    try:
        os.kill(loader, 0)
        lock(tmp_path / ".lock", "by another process")
    finally:
        os.kill(loader, signal.SIGKILL)


def test_a_lock_is_removed_at_the_end(tmp_path):
    """Also after an error."""
    output = tmp_path / "folder/out"
    with pytest.raises(ZeroDivisionError), only_writer(output):
        assert [path.name for path in output.parent.iterdir()] == [".out.lock"]
        1 / 0  # noqa: B018
    assert list(output.parent.iterdir()) == []


RECORD = {"epoch": 1, "loss": "7.123", "wps": "8123.4", "ups": "2", "num_updates": "50"}
VALID = {"epoch": 1, "valid_loss": "7", "valid_nll_loss": "6.5412", "valid_num_updates": "60"}


def log(handler: Progress, message: str | dict) -> None:
    text = json.dumps(message) if isinstance(message, dict) else message
    handler.emit(logging.LogRecord("train_inner", logging.INFO, "", 0, text, None, None))


def test_progress_in_a_log_is_a_line_every_so_often(capsys, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(train.time, "monotonic", lambda: clock[0])
    handler = Progress(1600)
    for seconds in (0, 5, 31):
        clock[0] += seconds
        log(handler, RECORD)
    log(handler, VALID)
    log(handler, "Loaded checkpoint /a/b/checkpoint_last.pt (epoch 3 @ 40 updates)")
    log(handler, "loading pretrained model from /a/b.pt: optimizer, lr scheduler, meters will")
    log(handler, "Loaded checkpoint /a/b.pt (epoch 3 @ 0 updates)")
    log(handler, "{'cfg': 1}")
    log(handler, "Stopping training due to num_updates: 60 >= max_update: 60")
    handler.close()
    line = "[train] update 50 of 1600, loss 7.123, 8123 tokens/s, 12.9 minutes left"
    assert capsys.readouterr().err.splitlines() == [
        line,
        line,
        "[train] update 60, validation 6.541 bits per token",
        "[train] resuming from checkpoint_last.pt, update 40",
        "[train] begins with the weights of /a/b.pt",
        "[train] Stopping training due to num_updates: 60 >= max_update: 60",
    ]


def test_progress_on_a_terminal_is_one_line_that_changes(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    handler = Progress(0)
    log(handler, RECORD)
    log(handler, RECORD)
    handler.close()
    line = "\r\x1b[K[train] update 50, loss 7.123, 8123 tokens/s"
    assert capsys.readouterr().err == f"{line}{line}\n"
