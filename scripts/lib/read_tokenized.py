"""Take text that comes tokenized: read_tokenized.py [--workers N] LANG INPUT TOKENS TEXT [LANG INPUT TOKENS TEXT ...].

TOKENS are the tokens of INPUT as they are, with one blank between them; TEXT is what they are without tokenization, by
the detokenizer that score.sh uses for translations. A TOKENS or TEXT that is there stays as it is.
"""

import functools
from pathlib import Path

from conventions import ArgumentParser
from text_files import per_line, step, transform

from pn_fairseq.scoring import detokenize


def blanks(line: str) -> str:
    """White space as fairseq sees it, which cuts at all that Unicode calls so."""
    return " ".join(line.split())


def detokenizer(lang: str):
    def work(text: bytes) -> bytes:
        lines = text.decode("utf-8").removesuffix("\n").split("\n")
        return "".join(f"{line}\n" for line in detokenize(lines, lang)).encode("utf-8")

    return work


def main(argv: list[str] | None) -> None:
    parser = ArgumentParser(prog="read_tokenized.py", description=__doc__)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("files", nargs="+")
    args = parser.parse_args(argv)
    jobs: dict[str, list[tuple[Path, Path, Path]]] = {}
    for lang, *paths in zip(*(args.files[start::4] for start in range(4)), strict=True):
        jobs.setdefault(lang, []).append(tuple(map(Path, paths)))
    for lang, files in jobs.items():
        tokens = [(given, output) for given, output, _ in files if not output.exists()]
        transform(tokens, lambda: per_line(blanks), args.workers, f"reading {lang}")
        texts = [(given, output) for _, given, output in files if not output.exists()]
        transform(texts, functools.partial(detokenizer, lang), args.workers, f"detokenizing {lang}")


step("read_tokenized.py", main)
