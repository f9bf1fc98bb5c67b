"""Copy files of text, unpacked: copy_text.py INPUT OUTPUT [INPUT OUTPUT ...].

An INPUT that is not there is taken from INPUT.gz.
"""

import gzip
import shutil
import zlib
from pathlib import Path

from conventions import ArgumentParser, UserError
from text_files import step, whole_file


def main(argv: list[str] | None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    files = parser.parse_args(argv).files
    for source, output in zip(files[::2], files[1::2], strict=True):
        packed = source.with_name(f"{source.name}.gz")
        with whole_file(output) as copy, source.open("rb") if source.exists() else gzip.open(packed) as file:
            try:
                shutil.copyfileobj(file, copy)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise UserError(f"{packed} is damaged or cut off; get it again") from error


step("copy_text.py", main)
