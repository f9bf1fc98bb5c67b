import pytest

from pn_fairseq.pipeline.training_log import read_log

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
    assert (first.world_size, second.world_size) == (1, 4)
    assert (first.reason, second.reason) == (None, "patience")
    assert first.seconds == 15 and second.seconds == 6.5
    assert first.tokens == 1005 + 1000 + 1000
    assert first.interval_seconds == pytest.approx(1005 / 500 + 1000 / 250)
    assert second.tokens == 2000 and second.interval_seconds == 2  # from update 20, where the first start had a record
    assert log.train == {10: 12, 20: 11, 30: 9} and log.updates == 30 and log.ended
    assert log.tokens_per_second == {10: 500, 20: 250, 30: 1000}
    assert log.parameters == 1508352 and log.unreadable == 2 and log.faults == 1


def test_a_start_that_resumed_and_was_cut_off_is_as_long_as_its_records(tmp_path):
    # Without a line on devices, a start is recognized by its updates, which begin again; fairseq's clock is 0 there.
    record = '{{"loss": "9", "num_updates": "{}", "wps": "100", "wpb": "50", "wall": "{}"}}\n'
    text = "".join(record.format(*numbers) for numbers in ((10, 8), (20, 13), (20, 0), (30, 0)))
    (tmp_path / "train.log").write_text(text)
    log = read_log(tmp_path / "train.log")
    assert [start.updates for start in log.starts] == [[10, 20], [20, 30]]
    assert [start.seconds for start in log.starts] == [13, 10] and not log.ended
