"""Names of earlier versions, in settings and in records of starts.jsonl (written before commit aaf4b80)."""

from pn_fairseq.common.old_settings import renamed, renamed_record


def test_settings_of_an_older_version():
    assert renamed({"model.norm_window": 4, "model.dropout": 0.1, "norm_window": 5}) == {
        "model.norm_options.window": 4,
        "model.dropout": 0.1,
        "norm_window": 5,
    }


def test_records_of_an_older_version():
    old = {"workers": 4, "cpu": "x", "machines": [{"workers": 2, "gpus": []}] * 2}
    new = {"world_size": 4, "cpu": "x", "machines": [{"ranks": 2, "gpus": []}] * 2}
    assert renamed_record(old) == new == renamed_record(new)
    assert "workers" in old and renamed_record({"cpu": "x"}) == {"cpu": "x"}
