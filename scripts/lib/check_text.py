"""Check that a text is UTF-8, not empty, and one sentence a line: check_text.py FILE NAME.

Exit code 2 and one line that calls the file NAME if not.
"""

import sys
from pathlib import Path


def check(path: Path) -> str | None:
    """What is wrong with the text, None if nothing is."""
    number = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):  # noqa: B007 (the count is used after the loop)
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"line {number} is not UTF-8 ({error.reason}); convert the file first"
            if b"\r" in line.removesuffix(b"\n").removesuffix(b"\r"):
                return f"line {number} has a carriage return in the middle, which tools take for the end of a line"
    return None if number else "is empty"


if problem := check(Path(sys.argv[1])):
    print(f"{sys.argv[2]}: {problem}", file=sys.stderr)
    sys.exit(2)
