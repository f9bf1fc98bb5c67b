"""Files of the pipeline: the one atomic write, the one line counter, the one reader of ``settings`` files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from pn_fairseq.pipeline.command import UserError


@contextlib.contextmanager
def atomic_write(path: Path | str, mode: str = "wb") -> Iterator[IO]:
    """Open a file for writing that replaces ``path`` when the block ends; after an error ``path`` is unchanged."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial")
    try:
        # Closing is part of writing: a full disk may show there first. OSErrors of writing name no file themselves.
        try:
            with partial.open(mode, encoding=None if "b" in mode else "utf-8") as file:
                yield file
        except OSError as error:
            raise OSError(error.errno, error.strerror, error.filename or str(path)) from error
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def count_lines(path: Path | str) -> int:
    """Number of lines. A last line without a line feed counts."""
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            last = block
    return count + (not last.endswith(b"\n"))


def read_settings(path: Path | str) -> dict[str, str]:
    """Read a ``settings`` file: one ``name=value`` a line, or a checksum and the name of a file as of sha256sum.

    Raises:
        UserError: the file is missing or a line is neither.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    settings = {}
    for number, line in enumerate(lines, 1):
        if checksum := re.fullmatch("([0-9a-f]{64})  (.+)", line):
            settings[checksum[2]] = checksum[1]
            continue
        name, equals, value = line.partition("=")
        if not equals:
            raise UserError(f"{path}, line {number}: expected name=value, found {line!r}")
        settings[name] = value
    return settings


def write_settings(path: Path | str, settings: Mapping[str, object]) -> None:
    """Write a ``settings`` file atomically."""
    with atomic_write(path, "w") as file:
        file.writelines(f"{name}={value}\n" for name, value in settings.items())
