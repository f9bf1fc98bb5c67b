"""``DEST/settings.txt``: what prepared data was made with, one ``name=value`` a line, then the checksums of its text.

Every step reads the settings there, and a preparation with other settings or other text is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pn_fairseq.common.command import UserError, did_you_mean
from pn_fairseq.common.files import read_settings, write_settings
from pn_fairseq.pipeline.data import subwords, tokens

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
    "clean": "",  # "MIN MAX RATIO": remove training pairs by their length
    "clean_stage": "tok",  # what is counted: tok, tokens (BPE is learned on what is kept), or bpe, subwords
    "separate_dictionaries": "0",  # 1: one for each language
    "valid_every": "0",  # N: each N-th training pair that is kept is for validation; 0: the text has a validation set
}


def complete(values: Mapping[str, object]) -> dict[str, str]:
    """All settings as text; those that are not among the ``values`` have their defaults."""
    for name in values:
        if name not in DEFAULTS:
            raise UserError(f"there is no setting {name!r}{did_you_mean(name, DEFAULTS)}")
    return {**DEFAULTS, **{name: str(value) for name, value in values.items()}}


def read(dest: Path) -> dict[str, str]:
    """The settings of prepared data, without the checksums."""
    kept = read_settings(dest / "settings.txt")
    return {name: kept.get(name, default) for name, default in DEFAULTS.items()}


def changed(dest: Path, settings: Mapping[str, str], sums: Mapping[str, str]) -> list[str]:
    """The names of settings and files of text that are recorded otherwise in ``dest``, or not at all.

    Raises:
        UserError: ``dest`` was begun with other settings or other text. The subwords may change until they are learned.
    """
    file, new = dest / "settings.txt", {**settings, **sums}
    old = read_settings(file) if file.exists() else {}
    names = [name for name, value in new.items() if old.get(name) != value]
    models = [dest / stage / model for stage in ("bpe", "stages/bpe") for model in subwords.MODELS.values()]
    may_change = () if any(map(Path.exists, models)) else ("bpe", "segmentation")
    for name in names if old else ():
        if name not in may_change:
            what = "other text" if name in sums else f"other settings ({name}={old.get(name)}, not {new[name]})"
            raise UserError(f"{dest} was made with {what}, see {file}; name another directory")
    return names


def keep(dest: Path, settings: Mapping[str, str], sums: Mapping[str, str]) -> None:
    """Record the settings, and the checksums of the text by the names of its files; refuse others (:func:`changed`)."""
    if changed(dest, settings, sums):
        write_settings(dest / "settings.txt", settings, sums)
