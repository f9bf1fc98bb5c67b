"""DEST/settings.txt, and what may still change."""

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import read_settings, write_settings
from pn_fairseq.pipeline.data import settings


def keep(dest, text: str = "", **values: str) -> None:
    """What a preparation does with its settings."""
    made_with = {**settings.DEFAULTS, "source": "de", "target": "en", **values}
    sums = {"train.de": f"{text:0>64}", "train.en": 64 * "1"}
    settings.check(dest, made_with, sums)
    write_settings(dest / "settings.txt", made_with, sums)


def test_settings_are_kept_and_read(tmp_path):
    keep(tmp_path, bpe="300")
    made_with = {**settings.DEFAULTS, "source": "de", "target": "en", "bpe": "300"}
    assert read_settings(tmp_path / "settings.txt") == {**made_with, "train.de": 64 * "0", "train.en": 64 * "1"}
    recorded = (tmp_path / "settings.txt").read_text().splitlines()
    assert recorded[3] == "bpe=300" and recorded[-1] == 64 * "1" + "  train.en"


def test_what_is_learned_is_not_mixed_with_other_settings_or_text(tmp_path):
    keep(tmp_path, bpe="300")
    (tmp_path / "bpe").mkdir()
    (tmp_path / "bpe/codes").touch()
    before = (tmp_path / "settings.txt").read_text()
    with pytest.raises(UserError, match=r"other settings \(bpe=300, not 400\).*name another directory"):
        keep(tmp_path, bpe="400")
    with pytest.raises(UserError, match="other text"):
        keep(tmp_path, "2", bpe="300")
    keep(tmp_path, bpe="300")
    assert (tmp_path / "settings.txt").read_text() == before


def test_subwords_may_change_until_they_are_learned(tmp_path):
    keep(tmp_path, bpe="300")
    keep(tmp_path, bpe="400", segmentation="sentencepiece")
    assert read_settings(tmp_path / "settings.txt")["bpe"] == "400"
    with pytest.raises(UserError, match=r"other settings \(lower=0, not 1\)"):
        keep(tmp_path, bpe="400", lower="1")
