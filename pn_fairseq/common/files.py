"""Files of the pipeline: those shipped with the package, atomic writing, checksums, line counts,
``settings`` files.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from pn_fairseq.common.command import UserError, did_you_mean
from pn_fairseq.common.errors import most_similar

PACKAGE = Path(__file__).resolve().parent.parent


def shipped(path: str) -> Path:
    """``path`` (``configs`` or ``data/...``) in the checkout or, from a wheel, in the package."""
    installed = PACKAGE / path
    return installed if installed.exists() else PACKAGE.parent / path


#: The configurations of this project; its studies are in the subfolder studies/.
CONFIGS = shipped("configs")


def names_in(folder: Path) -> list[str]:
    """The names of the YAML files in a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def find_yaml(name: str, folder: Path, others: Iterable[str] = ()) -> Path:
    """The file that ``name`` means: a name in ``folder``, or a path. ``others``: names with another
    meaning here, which may be what was misspelt.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        known = names_in(folder)
        raise UserError(
            f"there is no '{path}'{did_you_mean(name, [*known, *others])}; {folder.name}/ has "
            f"{', '.join(known)}"
        )
    return path.resolve()


@contextlib.contextmanager
def atomic_write(path: Path | str, mode: str = "wb") -> Iterator[IO]:
    """Open for writing a file that replaces ``path`` when the block ends; after an error ``path``
    stays unchanged.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial")
    try:
        # Closing is part of writing: a full disk may raise its error only there.
        with partial.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        # an error while writing does not name the file itself
        if isinstance(error, OSError) and not error.filename:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def lock(file: Path, refusal: str) -> int:
    """Lock ``file`` until this process ends, or until the returned descriptor is closed.

    Raises:
        UserError: another process has locked it; ``refusal`` is its text.
    """
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
        try:
            # Not flock: a data-loading process would hold that lock for some seconds after its
            # parent was killed.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(refusal) from None
        except OSError:
            return descriptor  # a file system without locks
        if os.fstat(descriptor).st_nlink:
            return descriptor
        # the process that held the lock removed the file after it was opened here
        os.close(descriptor)


def is_locked(file: Path) -> bool:
    """Whether another process has locked the file with :func:`lock`."""
    if not file.exists():
        return False
    try:
        os.close(lock(file, ""))
    except UserError:
        return True
    return False


def _lock_file(output: Path) -> Path:
    return output.with_name(f".{output.name}.lock")


@contextlib.contextmanager
def only_writer(output: Path) -> Iterator[Callable[[str], None]]:
    """Keep other processes from making ``output``, a file or a folder, until the block ends.

    Yields a function that notes what this process is doing, for the error in other processes.

    Raises:
        UserError: another process is making it; the text says which, and what it is doing.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    file = _lock_file(output)
    other = file.read_text("utf-8") if file.exists() else ""
    by = f"another process ({other})" if other else "another process"
    descriptor = lock(
        file, f"'{output}' is being made by {by}: wait for it, or name another output"
    )

    def note(work: str) -> None:
        # through the same descriptor: closing another one of this file would release the lock
        text = f"{os.getpid()}, {work}" if work else str(os.getpid())
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)

    note("")
    try:
        yield note
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def check_no_writer(output: Path) -> None:
    """Refuse what :func:`only_writer` would refuse, without writing anything."""
    if _lock_file(output).exists():
        with only_writer(output):
            pass


def check_can_be_folder(path: Path, option: str) -> None:
    """Refuse an output folder whose path is a file or has a file as a parent."""
    for place in (path, *path.parents):
        if place.is_dir():
            return
        if place.exists():
            where = f"'{path}'" if place == path else f"'{path}': '{place}'"
            raise UserError(f"{option} {where} is a file; name a folder")


def check_folders(paths: Iterable[Path], option: str = "") -> None:
    """Refuse paths of folders that do not exist; the message contains ``option``."""
    before = f"{option}: " if option else ""
    for path in paths:
        if path.is_dir():
            continue
        if path.exists():
            raise UserError(f"{before}'{path}' is a file; name a folder")
        beside = {place.name: place for place in path.parent.glob("*") if place.is_dir()}
        meant = most_similar(path.name, beside)
        advice = f", did you mean '{beside[meant]}'?" if meant else ""
        raise UserError(f"{before}there is no directory '{path}'{advice}")


def check_file(path: Path, option: str, endings: Iterable[str] = ()) -> None:
    """Refuse the path given to ``option`` if it is a folder, or does not exist with any of the
    ``endings`` either.
    """
    if path.is_dir():
        raise UserError(f"{option} '{path}' is a folder; name a file")
    names = [path, *(path.with_name(f"{path.name}{ending}") for ending in endings)]
    if not any(name.exists() for name in names):
        beside = [other.name for other in path.parent.glob("*") if other.is_file()]
        meant = did_you_mean(path.name, beside)
        raise UserError(f"{option} {path}: No such file or directory{meant}")


def not_utf8(file: Path | str, line: int, error: UnicodeDecodeError) -> str:
    """The message about a line of text in another encoding."""
    return f"{file}: line {line} is not UTF-8 ({error.reason}); convert the file first"


def read_lines(path: Path | None) -> list[str]:
    """The lines of UTF-8 text, by default of standard input, cut at line feeds only; the last
    line may lack one.
    """
    content = path.read_bytes() if path else sys.stdin.buffer.read()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise UserError(not_utf8(path or "standard input", number, error)) from error
    return text.removesuffix("\n").split("\n") if text else []


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write UTF-8 text atomically, each line with a line feed."""
    with atomic_write(path) as file:
        file.writelines(f"{line}\n".encode() for line in lines)


@contextlib.contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Create the folder ``path``, and remove it when the block ends; a folder that a killed process
    left there is removed first.
    """
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which replaces ``path`` when the block ends; after an error
    ``path`` stays unchanged.
    """
    with scratch_folder(path.with_name(f"{path.name}.partial")) as partial:
        yield partial
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)


def checksum(path: Path, algorithm: str = "sha256") -> str:
    """The checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def count_lines(path: Path | str) -> int:
    """The number of lines. A last line without a line feed counts."""
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def short_names(paths: Sequence[Path]) -> list[str]:
    """The fewest last parts of each path that tell the paths apart."""
    paths = [path.resolve() for path in paths]
    for length in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = [str(Path(*path.parts[-length:])) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def read_settings(path: Path | str) -> dict[str, str]:
    """Read a ``settings`` file: one ``name=value`` per line, or a checksum and the name of a file
    as sha256sum prints them.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    settings = {}
    for number, line in enumerate(lines, 1):
        digest_line = re.fullmatch("([0-9a-f]{64})  (.+)", line)
        if digest_line:
            settings[digest_line[2]] = digest_line[1]
            continue
        name, equals, value = line.partition("=")
        if not equals:
            raise UserError(f"{path}, line {number}: expected name=value, found {line!r}")
        settings[name] = value
    return settings


def write_settings(
    path: Path | str, settings: Mapping[str, object], sums: Mapping[str, str] | None = None
) -> None:
    """Write a ``settings`` file atomically. ``sums``: name of a file -> its checksum."""
    with atomic_write(path, "w") as file:
        file.writelines(f"{name}={value}\n" for name, value in settings.items())
        file.writelines(f"{digest}  {name}\n" for name, digest in (sums or {}).items())
