"""``pn translate``: plain text in, plain text out, tokenized and segmented as the data of a run."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pn_fairseq.common.command import ArgumentParser, UserError, command
from pn_fairseq.common.files import atomic_write
from pn_fairseq.pipeline.generate import Decoding, add_decoding_options, hypotheses, write_lines

if TYPE_CHECKING:
    from pn_fairseq.pipeline.runs import Run


def _parser() -> ArgumentParser:
    about = "Translate UTF-8 text, one sentence a line. The output has as many lines; an empty line stays empty."
    parser = ArgumentParser(prog="pn translate", description=about)
    add_decoding_options(parser)
    parser.add_argument("--input", type=Path, metavar="FILE", help="text to translate (default: standard input)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    return parser


def to_subwords(run: Run, text: str) -> list[str]:
    """The lines of ``text`` in the form of the model's training data."""
    from pn_fairseq.pipeline.data import settings, subwords, tokens

    how = settings.read(run.data)
    tokenize = tokens.tokenizer(how, how["source"], "test" in how["straighten"].split())
    segment = subwords.segmenter(how["segmentation"], run.data / "bpe" / subwords.MODELS[how["segmentation"]])
    tokenized = tokenize("".join(f"{line}\n" for line in text.split("\n")).encode("utf-8"))
    return [segment(line).strip() for line in tokenized.decode("utf-8").removesuffix("\n").split("\n")]


@command("pn translate")
def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)

    from pn_fairseq.pipeline.runs import open_run
    from pn_fairseq.pipeline.scoring import detokenize

    run = open_run(args.run, same_data=True)
    if run.data is None:
        raise UserError(f"{run.bin}/../settings.txt does not exist: how its text was tokenized is not known")
    decoding = Decoding(args, run)
    try:
        text = (args.input.read_bytes() if args.input else sys.stdin.buffer.read()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{args.input or 'standard input'} is not UTF-8 (byte {error.start})") from error
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    lines = to_subwords(run, text.removesuffix("\n")) if text else []
    sentences = [line for line in lines if line]
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        write_lines(source, sentences)
        buffer = str(max(len(sentences), args.batch_size))
        command_line = ["fairseq_cli.interactive", str(run.bin), "--input", str(source), "--buffer-size", buffer]
        commands, kept = [[*command_line, *decoding.options]], Path(f"{name}.err")
        log = decoding.run("translate", commands, len(sentences), kept) if sentences else []
    best = iter([options[0][1] for options in hypotheses(log, len(sentences))])
    tokens = [next(best) if line else "" for line in lines]
    plain = "".join(f"{line}\n" for line in detokenize(tokens, decoding.data["target"])).encode("utf-8")
    if args.output is None:
        sys.stdout.buffer.write(plain)
    else:
        with atomic_write(args.output) as file:
            file.write(plain)
    return 0
