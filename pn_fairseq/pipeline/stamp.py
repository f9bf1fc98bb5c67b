"""Whether a step is done already: its output exists, and its stamp says that it was made from the
same inputs.

A stamp is a ``settings`` file: the settings of a step that determine its output, and the checksum
of each input. Contents are compared, not times, so a copy of a folder is as good as the folder. The
stamp is ``settings.txt`` in prepared data, ``made.txt`` in the folder of any other step, and
``FILE.made.txt`` beside an output of one file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from pn_fairseq.common.command import UserError, say
from pn_fairseq.common.files import checksum, read_settings


def stamp_of(output: Path) -> Path:
    """The file of the stamp for an output of one file."""
    return output.with_name(f"{output.name}.made.txt")


def made_from(
    settings: Mapping[str, object], inputs: Mapping[str, Iterable[Path]]
) -> dict[str, str]:
    """The content of a stamp: name of a setting -> its value, name of an input -> the checksum
    of all its files.
    """
    texts = {name: str(value) for name, value in settings.items()}
    for name, paths in inputs.items():
        sums = b"".join(bytes.fromhex(checksum(path)) for path in paths)
        texts[name] = hashlib.sha256(sums).hexdigest()
    return texts


def read(stamp: Path) -> dict[str, str]:
    """The content of a stamp; empty if the stamp is missing or damaged."""
    try:
        return read_settings(stamp) if stamp.is_file() else {}
    except UserError:
        return {}


def differences(stamp: Path, wanted: Mapping[str, str]) -> list[str]:
    """The names of wanted entries that the stamp lacks, or contains with another value. A stamp may
    contain more.
    """
    made = read(stamp)
    return [name for name, value in wanted.items() if made.get(name) != value]


def done(step: str, stamp: Path, wanted: Mapping[str, str], *outputs: Path) -> bool:
    """Whether all ``outputs`` exist and were made from what is ``wanted``; prints a line that says
    so, or what is different.
    """
    if not all(output.exists() for output in outputs):
        return False
    changed = differences(stamp, wanted)
    if not changed:
        say(step, f"{outputs[0]} already exists")
    elif read(stamp):
        say(
            step,
            f"{outputs[0]} was made with other values of {', '.join(changed)}; making it again",
        )
    else:
        say(step, f"{outputs[0]} is incomplete; making it again")
    return not changed
