"""What ``pn-fold`` and ``pn-import-release`` share: they read one checkpoint and write another."""

from __future__ import annotations

import argparse
from pathlib import Path

from pn_fairseq.pipeline.command import ArgumentParser


def conversion_parser(tool: str, description: str, epilog: str, checkpoint: str) -> ArgumentParser:
    """A parser with the arguments CHECKPOINT, which ``checkpoint`` describes, and OUTPUT."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(prog=tool, description=description, epilog=epilog, formatter_class=formatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help=checkpoint)
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="the file to write; not CHECKPOINT")
    return parser
