"""Check that a parallel text can be used: check_text.py [--allow-carriage-returns] FILE NAME FILE NAME [...].

Each pair of files, called by their NAMEs in what is printed, must be UTF-8, not empty, and of one sentence a line, as
many in both. Exit code 2 and one line if not. A carriage return in the middle of a line is an end of the line to some
tools; it is refused unless --allow-carriage-returns says that only tools see the text that take it for white space.
"""

from pathlib import Path

from conventions import ArgumentParser, UserError
from text_files import step


def check(path: Path, name: str, allow_carriage_returns: bool) -> int:
    """The number of lines.

    Raises:
        UserError: if something is wrong with the text.
    """
    number = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):  # noqa: B007 (the count is used after the loop)
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{name}: line {number} is not UTF-8 ({error.reason}); convert the file first"
                ) from error
            if b"\r" in line.removesuffix(b"\n").removesuffix(b"\r") and not allow_carriage_returns:
                raise UserError(
                    f"{name}: line {number} has a carriage return in the middle, which tools take for the end of a line"
                )
    if not number:
        raise UserError(f"{name}: is empty")
    return number


def main(argv: list[str] | None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--allow-carriage-returns", action="store_true")
    parser.add_argument("files", nargs="+")
    args = parser.parse_args(argv)
    names = args.files
    for first, name, second, other in zip(names[::4], names[1::4], names[2::4], names[3::4], strict=True):
        count, counterpart = (
            check(Path(file), called, args.allow_carriage_returns) for file, called in ((first, name), (second, other))
        )
        if count != counterpart:
            raise UserError(
                f"{name} has {count} lines and {Path(other).name} {counterpart}: "
                "they are not translations of each other"
            )


step("check_text.py", main)
