"""DEST/settings.txt, and what may still change."""

import errno
import os

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import read_settings, write_settings
from pn_fairseq.pipeline.data.settings import Settings, check, check_prepared, read


def keep(dest, text: str = "", **values: object) -> None:
    """What a preparation does with its settings."""
    made_with = Settings(source="de", target="en", **values).as_text()
    sums = {"train.de": f"{text:0>64}", "train.en": 64 * "1"}
    check(dest, made_with, sums)
    dest.mkdir(exist_ok=True)
    write_settings(dest / "settings.txt", made_with, sums)


WRITTEN = """\
source=de
target=en
lower=1
bpe=300
segmentation=subword-nmt
tokenizer=sacremoses+final-stop
straighten=valid test
normalize=0
nonprinting=0
aggressive=0
compound_split=0
clean=1 175 1.5
separate_dictionaries=0
valid_every=0
"""


def test_settings_are_kept_and_read(tmp_path):
    values = {"bpe": 300, "lower": True, "clean": (1, 175, 1.5), "straighten": ("valid", "test")}
    keep(tmp_path, **values)
    sums = f"{64 * '0'}  train.de\n{64 * '1'}  train.en\n"
    assert (tmp_path / "settings.txt").read_text() == WRITTEN + sums
    assert read(tmp_path / "settings.txt") == Settings(source="de", target="en", **values)
    keep(tmp_path / "tags", protect=[r"<2\w\w>", "a b"])
    written = (tmp_path / "tags/settings.txt").read_text()
    assert '\nprotect=["<2\\\\w\\\\w>", "a b"]\n' in written
    assert read(tmp_path / "tags/settings.txt").protect == [r"<2\w\w>", "a b"]


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("source=de\n", "does not name the target language: it is not of a translation corpus"),
        (WRITTEN.replace("bpe=300", "bpe=many"), "is damaged in bpe; prepare the data again"),
        (WRITTEN.replace("lower=1\n", ""), "is damaged in lower; prepare the data again"),
    ],
)
def test_settings_without_a_value_are_refused(text, needle, tmp_path):
    (tmp_path / "settings.txt").write_text(text)
    with pytest.raises(UserError, match=needle):
        read(tmp_path / "settings.txt")


def test_what_is_learned_is_not_mixed_with_other_settings_or_text(tmp_path):
    keep(tmp_path, bpe=300)
    (tmp_path / "bpe").mkdir()
    (tmp_path / "bpe/codes").touch()
    before = (tmp_path / "settings.txt").read_text()
    message = r"other settings \(bpe=300, not 400\).*name another directory"
    with pytest.raises(UserError, match=message):
        keep(tmp_path, bpe=400)
    with pytest.raises(UserError, match="other text"):
        keep(tmp_path, "2", bpe=300)
    keep(tmp_path, bpe=300)
    assert (tmp_path / "settings.txt").read_text() == before


def test_subwords_may_change_until_they_are_learned(tmp_path):
    keep(tmp_path, bpe=300)
    keep(tmp_path, bpe=400, segmentation="sentencepiece")
    assert read_settings(tmp_path / "settings.txt")["bpe"] == "400"
    with pytest.raises(UserError, match=r"other settings \(lower=0, not 1\)"):
        keep(tmp_path, bpe=400, lower=True)


def test_a_folder_that_may_not_be_read_is_no_advice(tmp_path, monkeypatch):
    """Such as /lost+found, where the data was looked for in /."""
    closed = tmp_path / "closed"
    closed.mkdir()
    stat = os.stat

    def refuse(path, *args, **options):
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(UserError, match="data' is not prepared data: there is no such folder"):
        check_prepared(tmp_path / "data", "--data")
