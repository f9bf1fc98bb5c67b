"""``DEST/settings.txt``: what prepared data was made with, one ``name=value`` a line, then the checksums of its text.

Every step reads the settings there, and a preparation with other settings or other text is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import read_settings
from pn_fairseq.pipeline import stamp
from pn_fairseq.pipeline.data import subwords, tokens

#: Name -> default. These are all settings of a translation corpus, in the order in which they are written.
DEFAULTS = {
    "source": "",  # language
    "target": "",  # language
    "lower": "0",  # 1: lower-case
    "bpe": "10000",  # merges; with segmentation=sentencepiece the size of the vocabulary
    "segmentation": "subword-nmt",  # or sentencepiece
    "tokenizer": tokens.SACREMOSES,  # or moses, its own Perl scripts, or none: the text came in tokens
    "straighten": "",  # splits whose typographic apostrophes become plain ones: "test", "valid test"
    "normalize": "0",  # 1: normalize punctuation
    "nonprinting": "0",  # 1: characters that are not printed become spaces
    "aggressive": "0",  # 1: hyphens within words become tokens @-@
    "compound_split": "0",  # 1: pn score splits compounds at hyphens (##AT##-##AT##)
    "clean": "",  # "MIN MAX RATIO": remove training pairs by their numbers of tokens
    "separate_dictionaries": "0",  # 1: one for each language
    "valid_every": "0",  # N: each N-th training pair that is kept is for validation; 0: the text has a validation set
}

#: Settings that are written only where they are set.
OPTIONAL = (
    "protect",  # a JSON list of regular expressions: text that no step changes
)


def check(dest: Path, settings: Mapping[str, str], sums: Mapping[str, str]) -> None:
    """Refuse a folder that was begun with other settings or other text. Subwords may change until they are learned.

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
            what = "other text" if name in sums else f"other settings ({name}={old}, not {new[name]})"
            raise UserError(f"{dest} was made with {what}, see {file}; name another directory")
