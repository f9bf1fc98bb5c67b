"""The experiment around the norms: data, training, decoding, scoring."""

import argparse
import os

from pn_fairseq.common.command import split_paths

#: The help of the option --run.
RUN_HELP = (
    "a training run: a folder of pn train, the --save-dir of fairseq-train, or a job of "
    "fairseq-hydra-train"
)
#: The help of the option --subset.
SUBSET_HELP = "test (default), valid, or a further test set (pn prepare text --test NAME)"


def add_norm_module(parser: argparse.ArgumentParser) -> None:
    """Add the option --norm-module: absolute paths, separated by commas."""

    def existing(text: str) -> str:
        paths = split_paths(text)
        for path in paths:
            if not os.path.isfile(path):
                raise argparse.ArgumentTypeError(f"there is no file '{path}'")
        return ",".join(os.path.abspath(path) for path in paths)

    meaning = (
        "the Python files that register the model's own norms, if the files moved after the "
        "training run"
    )
    parser.add_argument("--norm-module", type=existing, metavar="FILE[,FILE]", help=meaning)
