"""Tokenize text: transform_text.py [--moses DIR] [--straighten] [--normalize] [--nonprinting] [--aggressive] [--lower]
    [--workers N] LANG INPUT OUTPUT [LANG INPUT OUTPUT ...].

In this order: typographic apostrophes made plain (--straighten), punctuation normalised (--normalize), characters that
are not printed made spaces (--nonprinting), tokens as Moses' tokenizer makes them, with hyphens within words split off
as @-@ (--aggressive), lower case (--lower). By sacremoses, or by Moses' own Perl scripts in the checkout DIR. An OUTPUT
that is there stays as it is.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path

from conventions import ArgumentParser, UserError
from text_files import per_line, step, transform

TOKENIZER = "scripts/tokenizer/tokenizer.perl"
LOWERCASE = "scripts/tokenizer/lowercase.perl"
NORMALIZE = "scripts/tokenizer/normalize-punctuation.perl"
NONPRINTING = "scripts/tokenizer/remove-non-printing-char.perl"


def with_sacremoses(args, lang: str) -> Callable[[bytes], bytes]:
    """The chosen steps by sacremoses, one line at a time."""
    import regex
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    steps = []
    if args.straighten:
        steps.append(lambda line: line.replace("’", "'"))
    if args.normalize:
        # perl_parity: what normalize-punctuation.perl does, of which the default differs in three rules. It sees the
        # line feed, too, which ends the rule for a full stop before a last quotation mark.
        normalize = MosesPunctNormalizer(lang, perl_parity=True).normalize
        steps.append(lambda line: normalize(f"{line}\n"))
    if args.nonprinting:
        other = regex.compile(r"\p{C}")
        steps.append(lambda line: other.sub(" ", line))
    tokenize = MosesTokenizer(lang).tokenize
    steps.append(lambda line: tokenize(line, aggressive_dash_splits=args.aggressive, return_str=True))
    if args.lower:
        steps.append(str.lower)

    def work(line: str) -> str:
        for function in steps:
            line = function(line)
        return line

    return per_line(work)


def with_moses(args, lang: str) -> Callable[[bytes], bytes]:
    """The chosen steps by Moses' Perl scripts, each a process that reads many lines."""
    commands = []
    if args.normalize:
        # By position: older versions of the script know no -l.
        commands.append([NORMALIZE, lang])
    if args.nonprinting:
        commands.append([NONPRINTING])
    commands.append([TOKENIZER, "-q", "-l", lang, *(["-a"] if args.aggressive else [])])
    if args.lower:
        commands.append([LOWERCASE])

    def work(text: bytes) -> bytes:
        if args.straighten:
            text = text.replace("’".encode(), b"'")
        for name, *flags in commands:
            result = subprocess.run(["perl", args.moses / name, *flags], input=text, capture_output=True)
            if result.returncode:
                said = result.stderr.decode("utf-8", "replace").strip().splitlines()
                raise UserError(f"{args.moses / name} failed: {said[-1] if said else result.returncode}")
            text = result.stdout
        return text

    return work


def main(argv: list[str] | None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--moses", type=Path)
    for name in ("--straighten", "--normalize", "--nonprinting", "--aggressive", "--lower"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("files", nargs="+")
    args = parser.parse_args(argv)
    jobs: dict[str, list[tuple[Path, Path]]] = {}
    for lang, source, output in zip(args.files[::3], args.files[1::3], args.files[2::3], strict=True):
        if not Path(output).exists():
            jobs.setdefault(lang, []).append((Path(source), Path(output)))
    make = with_moses if args.moses else with_sacremoses
    for lang, files in jobs.items():
        transform(files, lambda lang=lang: make(args, lang), args.workers, f"tokenizing {lang}")


step("transform_text.py", main)
