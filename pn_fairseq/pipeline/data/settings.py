"""How text is prepared, as a recipe states it, and ``DEST/settings.txt``, which records that for
every later step.

settings.txt contains one ``name=value`` per line, then the checksums of the text. A preparation
with other settings or other text is refused.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from pn_fairseq.common.command import UserError, did_you_mean
from pn_fairseq.common.files import read_settings
from pn_fairseq.pipeline import stamp
from pn_fairseq.pipeline.data import subwords

#: Values of the setting ``tokenizer``: sacremoses with the rule for the last full stop (the full
#: stop at the end of a line is a token, even after an abbreviation), which Moses has contained
#: since November 2018 (commit 9fc964da7); and without the rule, for text that was tokenized and
#: published earlier. sacremoses is a port of Moses before that commit.
SACREMOSES, WITHOUT_FINAL_STOP = "sacremoses+final-stop", "sacremoses"
#: Moses' own Perl scripts; and text that already consists of tokens.
MOSES, NONE = "moses", "none"


class _Recorded:
    def as_text(self) -> dict[str, str]:
        """As in settings.txt, in the order of the fields; an empty list is left out."""
        texts = {}
        for name, value in vars(self).items():
            if isinstance(value, tuple):
                texts[name] = " ".join(
                    part if isinstance(part, str) else f"{part:g}" for part in value
                )
            elif isinstance(value, list):
                texts |= {name: json.dumps(value)} if value else {}
            else:
                texts[name] = str(int(value) if isinstance(value, bool) else value)
        return texts


@dataclass(frozen=True, kw_only=True)
class Settings(_Recorded):
    """All settings of a translation corpus."""

    source: str  # language
    target: str  # language
    lower: bool = False  # lower-case
    bpe: int = 10000  # merges; with segmentation=sentencepiece the size of the vocabulary
    segmentation: str = "subword-nmt"  # or sentencepiece
    tokenizer: str = SACREMOSES
    straighten: tuple[str, ...] = ()  # splits whose typographic apostrophes become plain ones
    normalize: bool = False  # normalize punctuation
    nonprinting: bool = False  # characters that are not printed become spaces
    aggressive: bool = False  # hyphens within words become tokens @-@
    compound_split: bool = False  # pn score splits compounds at hyphens (##AT##-##AT##)
    # MIN, MAX, RATIO: remove training pairs by their numbers of tokens
    clean: tuple[float, ...] = ()
    separate_dictionaries: bool = False  # one for each language
    # N: each N-th training pair that is kept is for validation; 0: the text has a validation set
    valid_every: int = 0
    # regular expressions of text that no step changes
    protect: list[str] = field(default_factory=list)

    @property
    def endings(self) -> tuple[str, ...]:
        """The endings of the files of a split."""
        return self.source, self.target


@dataclass(frozen=True, kw_only=True)
class LanguageModelSettings(_Recorded):
    """All settings of a language model's text."""

    task: str = "language_modeling"
    corpus: str  # its name, for reports
    unit: str = "word"  # what a token is: word, or byte, which leaves the text unchanged
    language: str = ""  # for Moses' tokenizer; "": the text consists of tokens
    tokenizer: str = NONE
    lower: bool = False  # lower-case
    min_count: int = 1  # words that are rarer in train become <unk>

    endings = ("txt",)


#: Name of a setting, or type of its default -> how its text is read.
_READ = {
    "straighten": lambda text: tuple(text.split()),
    "clean": lambda text: tuple(map(float, text.split())),
    "protect": json.loads,
    bool: lambda text: text == "1",
    int: int,
}


def read(file: Path) -> Settings:
    """The settings in a settings.txt.

    Raises:
        UserError: the file is missing or damaged, or names no languages.
    """
    texts = {"protect": "[]"} | read_settings(file)  # an empty list is left out
    for name in ("source", "target"):
        if not texts.get(name):
            raise UserError(
                f"{file} does not name the {name} language: it is not of a translation corpus"
            )
    values = {}
    for setting in fields(Settings):
        parse = _READ.get(setting.name) or _READ.get(type(setting.default), str)
        try:
            values[setting.name] = parse(texts[setting.name])
        except (KeyError, ValueError) as error:
            raise UserError(
                f"{file} is damaged in {setting.name}; prepare the data again (pn prepare)"
            ) from error
    return Settings(**values)


#: How prepared data is named -> what to do if it was not named.
TO_NAME = {"--data": "name yours by --data DIR", "data:": "add data: DIR to the part of the study"}
#: The folders in prepared data.
FOLDERS = ("text", "raw", "tok", "bpe", "bin")


def is_prepared(data: Path) -> bool:
    """Whether ``data`` is a readable folder of prepared data."""
    return os.path.isdir(data / "bin") and os.path.isfile(data / "settings.txt")


def check_prepared(data: Path, option: str, is_default: bool = False) -> None:
    """Refuse a folder that is not prepared data.

    Args:
        option: the option that names the folder, or ``data:`` of a study.
        is_default: whether the option was not given.

    Raises:
        UserError: what is missing, and which folders of prepared data are beside it.
    """
    check_not_inside(data, option)
    if is_prepared(data):
        return
    missing = [name for name in ("settings.txt", "bin") if not (data / name).exists()]
    reason = f"it has no {' and no '.join(missing)}" if data.is_dir() else "there is no such folder"
    beside = [folder.name for folder in sorted(data.parent.glob("*")) if is_prepared(folder)]
    advice = "pn prepare makes it"
    if beside:
        meant = "" if data.is_dir() else did_you_mean(data.name, beside)
        advice = f"prepared data in '{data.parent}': {', '.join(beside)}{meant}"
    if is_default:
        option, advice = f"the default of {option}", f"{advice}; {TO_NAME[option]}"
    raise UserError(f"{option} '{data}' is not prepared data: {reason} ({advice})")


def check_not_inside(data: Path, option: str) -> None:
    """Refuse a file or folder inside prepared data instead of the data, which may be absent."""
    for place in (data, *data.parents):
        is_part = place.name in FOLDERS or place.is_file()
        if is_part and is_prepared(place.parent):
            raise UserError(
                f"{option} '{data}' is inside of prepared data, did you mean '{place.parent}'?"
            )


def check(dest: Path, settings: Mapping[str, str], sums: Mapping[str, str]) -> None:
    """Refuse a folder that was begun with other settings or other text. Subwords may change until
    they are learned.

    Args:
        sums: name of a file of text -> its checksum.
    """
    file, new = dest / "settings.txt", {**settings, **sums}
    if not file.exists():
        return
    learned = any((dest / "bpe" / model).exists() for model in subwords.MODELS.values())
    for name in stamp.differences(file, new):
        if learned or name not in ("bpe", "segmentation"):
            old = read_settings(file).get(name)
            split = name.partition(".")[0]
            if old is None and name in sums and split.startswith("test"):
                raise UserError(
                    f"{dest} was made without {name}: add this test set with --test {split}"
                )
            what = (
                "other text" if name in sums else f"other settings ({name}={old}, not {new[name]})"
            )
            raise UserError(f"{dest} was made with {what}, see {file}; name another directory")
