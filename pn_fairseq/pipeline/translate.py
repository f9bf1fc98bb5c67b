"""``pn translate``: plain text in, plain text out, tokenized and segmented as the data of a run."""

import sys
import tempfile
from pathlib import Path

from pn_fairseq.common.command import ArgumentParser, UserError, absolute, say
from pn_fairseq.common.files import read_lines, write_lines
from pn_fairseq.pipeline.data import subwords
from pn_fairseq.pipeline.data.tokens import detokenize, tokenizer
from pn_fairseq.pipeline.generate import Decoding, add_decoding_options, hypotheses
from pn_fairseq.pipeline.runs import Run, open_run

#: How many lines whose translations may be cut off are named.
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
    """Refuse a file that the translations could not be written to, or would destroy, before they
    are made.
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
    check_output(args.output, args.input)
    run = open_run(args.run, same_data=True)
    if run.data is None:
        raise UserError(
            f"{run.bin}/../settings.txt does not exist: how its text was tokenized is not known"
        )
    decoding = Decoding(args, run)
    text = [line.removeprefix("\ufeff").removesuffix("\r") for line in read_lines(args.input)]
    lines = to_subwords(run, text, args.moses) if text else []
    too_long = decoding.too_long(lines)
    for number, reason in too_long.items():
        say("translate", f"warning: line {number} is not translated: it has {reason}")
        lines[number - 1] = ""
    sentences = {number: line for number, line in enumerate(lines, 1) if line}
    if too_long and not sentences:
        raise UserError("no line of the input can be translated: all are too long")
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        write_lines(source, sentences.values())
        command = [
            "fairseq_cli.interactive",
            str(run.bin),
            "--input",
            str(source),
            *decoding.options,
        ]
        command += ["--buffer-size", str(max(len(sentences), args.batch_size))]
        log = (
            decoding.run("translate", [command], len(sentences), Path(f"{name}.err"))
            if sentences
            else []
        )
    best = iter(hypotheses(log, len(sentences)))
    tokens = [next(best)[0][1] if line else "" for line in lines]
    lengths = {number: len(line.split()) + 1 for number, line in enumerate(sentences.values())}
    numbers = list(sentences)
    if cut := [numbers[number] for number in decoding.at_limit(log, lengths)]:
        named = ", ".join(map(str, cut[:SHOWN])) + (
            f" and {len(cut) - SHOWN} more" if len(cut) > SHOWN else ""
        )
        options = (
            f"--max-len-b {decoding.search['max_len_b']}, --max-len-a "
            f"{decoding.search['max_len_a']}"
        )
        count = f"{len(cut)} of {len(numbers)} translations are as long as they may be ({options})"
        say(
            "translate", f"warning: {count}, and may be cut off: line{'s' * (len(cut) > 1)} {named}"
        )
    plain = detokenize(tokens, decoding.text.target)
    if args.output:
        write_lines(args.output, plain)
    else:
        sys.stdout.writelines(f"{line}\n" for line in plain)
    return 0
