"""Names of earlier versions in settings (written before commit aaf4b80)."""

from pn_fairseq.common.old_settings import renamed


def test_settings_of_an_older_version():
    assert renamed({"model.norm_window": 4, "model.dropout": 0.1, "norm_window": 5}) == {
        "model.norm_options.window": 4,
        "model.dropout": 0.1,
        "norm_window": 5,
    }
