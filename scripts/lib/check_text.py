"""Check that text files are UTF-8 and not empty; exit code 2 and one line naming file and line if not."""

import sys
from pathlib import Path

for name in sys.argv[1:]:
    lines = 0
    with Path(name).open("rb") as file:
        for lines, line in enumerate(file, start=1):  # noqa: B007 (the count is used after the loop)
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                print(f"{name}: line {lines} is not UTF-8 ({error.reason}); convert the file first", file=sys.stderr)
                sys.exit(2)
    if not lines:
        print(f"{name} is empty", file=sys.stderr)
        sys.exit(2)
