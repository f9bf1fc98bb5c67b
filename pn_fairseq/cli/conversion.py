"""What ``pn-fold`` and ``pn-import-release`` share: they read one checkpoint and write another."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pn_fairseq.checkpoints import check_output_path
from pn_fairseq.pipeline.command import ArgumentParser, UserError, without_fairseqs_log


def conversion_parser(tool: str, description: str, epilog: str, checkpoint: str) -> ArgumentParser:
    """A parser with the arguments CHECKPOINT, which ``checkpoint`` describes, and OUTPUT."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(prog=tool, description=description, epilog=epilog, formatter_class=formatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help=checkpoint)
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="the file to write; not CHECKPOINT")
    return parser


def read_input(args: argparse.Namespace, load: Callable[[Path], dict]) -> dict:
    """Load CHECKPOINT, after a check that OUTPUT can be written and is another file."""
    check_output_path(args.output, [args.checkpoint])
    return load(args.checkpoint)


@contextmanager
def fairseq_needed() -> Iterator[None]:
    """Import and use fairseq without its log, and say so if it is not installed."""
    with without_fairseqs_log(logging.CRITICAL):
        try:
            yield
        except ModuleNotFoundError as error:
            raise UserError(f"fairseq is needed to build the model, and {error.name} is not installed") from error
