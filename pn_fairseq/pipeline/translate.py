"""``pn translate``: plain text in, plain text out, tokenized and segmented as the data of a run."""

import sys
import tempfile
from pathlib import Path

from pn_fairseq.common.command import ArgumentParser, UserError, absolute, say
from pn_fairseq.common.files import check_file, read_lines, write_lines
from pn_fairseq.pipeline.data import subwords
from pn_fairseq.pipeline.data.tokens import detokenize, tokenizer
from pn_fairseq.pipeline.generate import Decoding, add_decoding_options, hypotheses
from pn_fairseq.pipeline.runs import Run, check_translates, open_run

#: How many lines are named whose translations may be cut off.
SHOWN = 10


def to_subwords(run: Run, lines: list[str], moses: Path | None) -> list[str]:
    """``lines`` in the form of the model's training data; ``moses``: a checkout of mosesdecoder,
    if that was used.
    """
    how = run.settings_of_data()
    tokenize = tokenizer(how, how.source, "test" in how.straighten, moses)
    model = run.data / "bpe" / subwords.MODELS[how.segmentation]
    segment = subwords.segmenter(how.segmentation, model, how.protect)
    tokenized = tokenize("".join(f"{line}\n" for line in lines).encode("utf-8")).decode("utf-8")
    return [segment(line).strip() for line in tokenized.split("\n")[:-1]]


def check_output(output: Path | None, given: Path | None) -> None:
    """Before translating, refuse a file that the translations could not be written to, or would
    destroy.
    """
    if output is None:
        return
    if not output.absolute().parent.is_dir():
        raise UserError(
            f"there is no folder {str(output.absolute().parent)!r} for --output {output}"
        )
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; name a file")
    if given is not None and output.exists() and given.exists() and output.samefile(given):
        raise UserError(
            f"--output {output} is the file of --input, which would be replaced; name another file"
        )


def main(argv: list[str] | None = None) -> int:
    description = (
        "Translate UTF-8 text, one sentence per line, into as many lines; empty lines stay empty."
    )
    parser = ArgumentParser(prog="pn translate", description=description)
    add_decoding_options(parser)
    moses = "a checkout of mosesdecoder, if the data was prepared with pn prepare --moses"
    parser.add_argument("--moses", type=absolute, metavar="DIR", help=moses)
    parser.add_argument(
        "--input", type=Path, metavar="FILE", help="text to translate (default: standard input)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    args = parser.parse_args(argv)
    if args.input:
        check_file(args.input, "--input")
    check_output(args.output, args.input)
    run = open_run(args.run, same_data=True)
    check_translates(run)
    if run.data is None:
        settings = run.bin.parent / "settings.txt"
        raise UserError(f"{settings} does not exist: how its text was tokenized is not known")
    decoding = Decoding(args, run, "translate")
    text = [line.removeprefix("\ufeff").removesuffix("\r") for line in read_lines(args.input)]
    lines = to_subwords(run, text, args.moses) if text else []
    too_long = decoding.too_long(lines)
    for number, reason in too_long.items():
        say("translate", f"warning: line {number} is not translated: it has {reason}")
        lines[number - 1] = ""
    # an empty line stays empty
    sentences = {number: line for number, line in enumerate(lines, 1) if line}
    if too_long and not sentences:
        raise UserError("no line of the input can be translated: all are too long")
    log = _decode(decoding, run, list(sentences.values()), args.batch_size)
    translations = dict.fromkeys(range(1, len(lines) + 1), "")
    best = hypotheses(log, len(sentences))
    for number, options in zip(sentences, best, strict=True):
        translations[number] = options[0][1]
    lengths = [len(line.split()) + 1 for line in sentences.values()]
    cut = decoding.at_limit(log, lengths)
    if cut:
        numbers = list(sentences)
        _warn_of_limit(decoding, [numbers[sentence] for sentence in cut], len(numbers))
    plain = detokenize(translations.values(), decoding.text.target)
    if args.output:
        write_lines(args.output, plain)
    else:
        sys.stdout.writelines(f"{line}\n" for line in plain)
    return 0


def _decode(decoding: Decoding, run: Run, sentences: list[str], batch_size: int) -> list[str]:
    """The output of fairseq for these lines of subwords."""
    if not sentences:
        return []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        write_lines(source, sentences)
        command = ["fairseq_cli.interactive", str(run.bin), "--input", str(source)]
        command += [*decoding.options, "--buffer-size", str(max(len(sentences), batch_size))]
        errors = Path(f"{folder}.err")  # beside the temporary folder, which it must outlive
        return decoding.run("translate", [command], len(sentences), errors)


def _warn_of_limit(decoding: Decoding, numbers: list[int], translated: int) -> None:
    """Warn of lines whose translations are as long as allowed."""
    named = ", ".join(map(str, numbers[:SHOWN]))
    if len(numbers) > SHOWN:
        named += f" and {len(numbers) - SHOWN} more"
    lines = "line" if len(numbers) == 1 else "lines"
    say(
        "translate",
        f"warning: {len(numbers)} of {translated} translations are as long as they may be "
        f"({decoding.limit}), and may be cut off: {lines} {named}",
    )
