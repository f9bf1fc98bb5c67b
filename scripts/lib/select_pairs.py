"""Remove pairs of sentences by their length, and take the validation set from the training text.

select_pairs.py --source LANG --target LANG --splits SPLIT[,SPLIT...] --by NAME --output FOLDER
    [--clean MIN MAX RATIO --clean-splits SPLIT[,SPLIT...]] [--valid-every N] NAME=FOLDER [NAME=FOLDER ...]

Each FOLDER holds SPLIT.LANG for all splits and both languages, line by line the same sentences; --by names the one
whose tokens are counted. FOLDER of --output, which must not be there, gets NAME/SPLIT.LANG with the pairs that are kept
in their order, `counts` (key=value lines) and `removed.tsv`, one line for each removed pair.

The rule is that of Moses' clean-corpus-n.perl: both sides must have between MIN and MAX tokens between white space, and
no empty side, neither may have more than RATIO times the tokens of the other, and no token more than 1000 characters.
With --valid-every N each N-th pair of the training text *that is kept* becomes one of the validation set.
"""

import contextlib
import os
import shutil
from collections import Counter
from pathlib import Path

from conventions import ArgumentParser, UserError
from text_files import step

LONGEST_TOKEN = 1000


def objection(source: list[str], target: list[str], least: int, most: int, ratio: float) -> str | None:
    """Why a pair of sentences, as tokens, is removed; None if it is kept."""
    lengths = len(source), len(target)
    if 0 in lengths:
        return "empty"
    if max(lengths) > most:
        return "too long"
    if min(lengths) < least:
        return "too short"
    if max(lengths) / min(lengths) > ratio:
        return "ratio"
    if any(len(token) > LONGEST_TOKEN for side in (source, target) for token in side):
        return "long token"
    return None


def select(args, folders: dict[str, Path], output: Path) -> None:
    """Fill the output folder."""
    languages = args.source, args.target
    counts: list[str] = []
    written = Counter()
    with contextlib.ExitStack() as stack:
        removed_file = stack.enter_context((output / "removed.tsv").open("w", encoding="utf-8"))
        removed_file.write(f"split\tline\treason\ttokens {args.source}\ttokens {args.target}\n")

        def outputs(split: str) -> list:
            return [
                stack.enter_context((output / name / f"{split}.{lang}").open("wb"))
                for name in folders
                for lang in languages
            ]

        for name in folders:
            (output / name).mkdir()
        valid = outputs("valid") if args.valid_every else None
        by = list(folders).index(args.by) * 2
        for split in args.splits:
            inputs = [
                stack.enter_context((folder / f"{split}.{lang}").open("rb"))
                for folder in folders.values()
                for lang in languages
            ]
            own = outputs(split)
            cleaned = args.clean is not None and split in args.clean_splits
            reasons = Counter()
            read = kept = 0
            try:
                for lines in zip(*inputs, strict=True):
                    read += 1
                    if cleaned:
                        source, target = (line.decode("utf-8").split() for line in lines[by : by + 2])
                        reason = objection(source, target, *args.clean)
                        if reason:
                            reasons[reason] += 1
                            removed_file.write(f"{split}\t{read}\t{reason}\t{len(source)}\t{len(target)}\n")
                            continue
                    kept += 1
                    to_valid = split == "train" and args.valid_every and kept % args.valid_every == 0
                    for file, line in zip(valid if to_valid else own, lines, strict=True):
                        file.write(line if line.endswith(b"\n") else line + b"\n")
                    written["valid" if to_valid else split] += 1
            except ValueError as error:
                raise UserError(f"the files of {split} have different numbers of lines after line {read}") from error
            counts.append(f"{split}.read={read}")
            if cleaned:
                counts.append(f"{split}.removed={reasons.total()}")
                counts += [f"{split}.removed.{key.replace(' ', '_')}={reasons[key]}" for key in sorted(reasons)]
    counts += [f"{split}={written[split]}" for split in ("train", "valid", "test")]
    for split in ("train", "valid", "test"):
        if not written[split]:
            raise UserError(f"no sentence pair of {split} is left ({', '.join(counts)})")
    (output / "counts").write_text("".join(f"{line}\n" for line in counts), encoding="utf-8")


def main(argv: list[str] | None) -> None:
    parser = ArgumentParser(description=__doc__)
    for name in ("--source", "--target", "--by", "--output"):
        parser.add_argument(name, required=True)
    parser.add_argument("--splits", required=True, type=lambda text: text.split(","))
    parser.add_argument("--clean", nargs=3, metavar=("MIN", "MAX", "RATIO"))
    parser.add_argument("--clean-splits", type=lambda text: text.split(","), default=["train"])
    parser.add_argument("--valid-every", type=int, default=0)
    parser.add_argument("folders", nargs="+", metavar="NAME=FOLDER")
    args = parser.parse_args(argv)
    if args.clean:
        least, most, ratio = args.clean
        args.clean = int(least), int(most), float(ratio)
    folders = {name: Path(folder) for name, folder in (text.split("=", 1) for text in args.folders)}
    output = Path(args.output)
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        select(args, folders, partial)
        os.rename(partial, output)
    except OSError as error:  # of writing, which names no file itself
        raise OSError(error.errno, error.strerror, error.filename or str(output)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


step("select_pairs.py", main)
