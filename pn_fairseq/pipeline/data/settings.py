"""``DEST/settings.txt``: what prepared data was made with, one ``name=value`` a line, then the checksums of its text.

Every step reads the settings there, and a preparation with other settings or other text is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pn_fairseq.common.command import UserError, did_you_mean, say
from pn_fairseq.common.files import checksum, read_settings, recorded, write_settings
from pn_fairseq.pipeline.data import subwords, tokens
from pn_fairseq.pipeline.data.binarize import SPLITS

#: Name -> default. These are all settings of a translation corpus, in the order in which they are written.
DEFAULTS = {
    "source": "",  # language
    "target": "",  # language
    "lower": "0",  # 1: lower-case
    "bpe": "10000",  # merges; with segmentation=sentencepiece the size of the vocabulary
    "segmentation": "subword-nmt",  # or sentencepiece
    "tokenizer": tokens.SACREMOSES,  # or moses, its own Perl scripts
    "straighten": "",  # splits whose typographic apostrophes become plain ones: "test", "valid test"
    "normalize": "0",  # 1: normalize punctuation
    "nonprinting": "0",  # 1: characters that are not printed become spaces
    "aggressive": "0",  # 1: hyphens within words become tokens @-@
    "compound_split": "0",  # 1: pn score splits compounds at hyphens (##AT##-##AT##)
    "clean": "",  # "MIN MAX RATIO": remove pairs by their length
    "clean_stage": "tok",  # what is counted: tok, tokens (BPE is learned on what is kept), or bpe, subwords
    "clean_splits": "train",  # which splits are cleaned: train, or train,valid
    "separate_dictionaries": "0",  # 1: one for each language
    "valid_every": "0",  # N: each N-th training pair that is kept is for validation; 0: the text has a validation set
}
#: What older versions did without recording it.
UNRECORDED = {**DEFAULTS, "tokenizer": tokens.SACREMOSES_OLD}
#: Setting -> its values, and how a user gives it.
CHOICES = {"segmentation": (tuple(subwords.MODELS), "BPE"), "clean_stage": (("tok", "bpe"), "--clean-stage")}


def check(values: Mapping[str, object]) -> dict[str, str]:
    """All settings as text; those that are not among the ``values`` have their defaults.

    Raises:
        UserError: a name or a value is not known.
    """
    for name in values:
        if name not in DEFAULTS:
            raise UserError(f"there is no setting {name!r}{did_you_mean(name, DEFAULTS)}")
    settings = {**DEFAULTS, **{name: str(value) for name, value in values.items()}}
    if settings["source"] == settings["target"]:
        raise UserError(f"--source and --target are both '{settings['source']}'")
    if not re.fullmatch("[1-9][0-9]{0,8}", settings["bpe"]):
        raise UserError(f"--bpe must be a whole number from 1 to 999999999, not '{settings['bpe']}'")
    for name, (known, option) in CHOICES.items():
        if settings[name] not in known:
            raise UserError(f"{option} must be {' or '.join(known)}, not '{settings[name]}'")
    return settings


def splits(settings: Mapping[str, str]) -> tuple[str, ...]:
    """The splits that the text has; a missing validation set is taken from train."""
    return tuple(split for split in SPLITS if split != "valid" or settings.get("valid_every", "0") == "0")


def files(settings: Mapping[str, str], of: Iterable[str] = ()) -> list[str]:
    """Names of the files of these splits (default: of the splits that the text has), .txt for language models."""
    endings = [settings["source"], settings["target"]] if "source" in settings else ["txt"]
    return [f"{split}.{ending}" for split in of or splits(settings) for ending in endings]


def read(dest: Path) -> dict[str, str]:
    """The settings of prepared data, without the checksums; what is not recorded is what older versions did."""
    kept = read_settings(recorded(dest, "settings"))
    return {name: kept.get(name, value) for name, value in UNRECORDED.items()}


def keep(dest: Path, folder: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """Record the settings and the text in ``folder``, and return the settings that hold.

    Raises:
        UserError: ``dest`` was begun with other settings or other text. The subwords may change until they are learned.
    """
    file, sums = recorded(dest, "settings"), {name: checksum(folder / name) for name in files(settings)}
    old = read_settings(file) if file.exists() else {}
    before = {**UNRECORDED, **old}
    if old and (before["tokenizer"], settings["tokenizer"]) == (tokens.SACREMOSES_OLD, tokens.SACREMOSES):
        settings = {**settings, "tokenizer": tokens.SACREMOSES_OLD}  # a preparation that began is finished in its way
        say("prepare", f"note: {dest} has an older version's tokenizer; for current Moses' prepare another directory")
    new = {**settings, **sums}
    changed = [name for name in new if old and before.get(name) != new[name]]
    models = [dest / stage / model for stage in ("bpe", "stages/bpe") for model in subwords.MODELS.values()]
    may_change = () if any(map(Path.exists, models)) else ("bpe", "segmentation")
    for name in changed:
        if name not in may_change:
            what = "other text" if name in sums else f"other settings ({name}={before.get(name)}, not {new[name]})"
            raise UserError(f"{dest} was made with {what}, see {file}; remove it or name another directory")
    if changed or not old:
        write_settings(file, settings, sums)
    return settings
