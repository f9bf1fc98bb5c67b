"""DEST/settings.txt, and what may still change."""

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data import settings


def check(**values: object) -> dict[str, str]:
    return settings.check({"source": "de", "target": "en", **values})


@pytest.mark.parametrize(
    ("name", "value", "needle"),
    [
        ("lowwer", 1, "'lowwer', did you mean 'lower'?"),
        ("bpe", "many", "--bpe must be a whole number from 1 to 999999999, not 'many'"),
        ("bpe", "99999999999999999999", "--bpe must be a whole number"),
        ("bpe", 0, "--bpe"),
        ("segmentation", "unigram", "BPE must be subword-nmt or sentencepiece, not 'unigram'"),
        ("clean_stage", "words", "--clean-stage must be tok or bpe"),
        ("source", "en", "--source and --target are both 'en'"),
    ],
)
def test_values_that_cannot_be_used(name, value, needle):
    with pytest.raises(UserError) as error:
        check(**{name: value})
    assert needle in str(error.value)


def test_a_validation_set_that_is_taken_from_train_has_no_text():
    assert settings.files(check()) == ["train.de", "train.en", "valid.de", "valid.en", "test.de", "test.en"]
    assert settings.files(check(valid_every=23)) == ["train.de", "train.en", "test.de", "test.en"]
    assert settings.files({"task": "language_modeling"}) == ["train.txt", "valid.txt", "test.txt"]


@pytest.fixture
def dest(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for name in settings.files(check()):
        (text / name).write_text(f"{name}\n")
    for name in ("tok", "bpe", "raw"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_settings_are_kept_and_read(dest):
    settings.keep(dest, dest / "text", check(bpe=300))
    assert settings.read(dest) == {**settings.DEFAULTS, "source": "de", "target": "en", "bpe": "300"}
    recorded = (dest / "settings.txt").read_text().splitlines()
    assert recorded[3] == "bpe=300" and recorded[-1].endswith("  test.en")
    recorded.remove("clean_splits=train")
    (dest / "settings.txt").write_text("".join(f"{line}\n" for line in recorded))
    settings.keep(dest, dest / "text", check(bpe=300))
    assert (dest / "settings.txt").read_text().splitlines() == recorded, (
        "runs that were trained on it compare the bytes"
    )


def test_what_is_learned_is_not_mixed_with_other_settings_or_text(dest):
    settings.keep(dest, dest / "text", check(bpe=300))
    (dest / "bpe/codes").touch()
    before = (dest / "settings.txt").read_text()
    with pytest.raises(UserError, match=r"other settings \(bpe=300, not 400\).*remove it"):
        settings.keep(dest, dest / "text", check(bpe=400))
    (dest / "text/train.de").write_text("other\n")
    with pytest.raises(UserError, match="other text"):
        settings.keep(dest, dest / "text", check(bpe=300))
    assert (dest / "settings.txt").read_text() == before and (dest / "tok").exists()


def test_subwords_may_change_until_they_are_learned(dest):
    settings.keep(dest, dest / "text", check(bpe=300))
    settings.keep(dest, dest / "text", check(bpe=400, segmentation="sentencepiece"))
    assert settings.read(dest)["bpe"] == "400" and (dest / "tok").exists()
    with pytest.raises(UserError, match=r"other settings \(lower=0, not 1\)"):
        settings.keep(dest, dest / "text", check(bpe=400, lower=1))


def test_data_of_an_older_version_is_finished_in_its_way(dest, capsys):
    """It records nothing of what could not be set then, its tokenizer had no rule for the last full stop, and its files
    had no endings."""
    settings.keep(dest, dest / "text", check())
    lines = (dest / "settings.txt").read_text().splitlines(keepends=True)
    (dest / "settings.txt").unlink()
    (dest / "settings").write_text("".join(lines[:4] + lines[-6:]))
    settings.keep(dest, dest / "text", check())
    assert settings.read(dest)["tokenizer"] == "sacremoses"
    assert "older version" in capsys.readouterr().err
    assert not (dest / "settings.txt").exists(), "one record only"
    with pytest.raises(UserError, match="other text"):
        (dest / "bpe/codes").touch()
        (dest / "text/train.de").write_text("other\n")
        settings.keep(dest, dest / "text", check())
