"""``python -m pn_fairseq``: what someone needs to know to use the plugin."""

import argparse
from pathlib import Path

from pn_fairseq import __version__


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pn_fairseq", description="Power Normalization for fairseq.")
    parser.add_argument("--version", action="version", version=f"pn_fairseq {__version__}")
    parser.add_argument(
        "--user-dir",
        action="store_true",
        required=True,
        help='print the directory for fairseq: fairseq-train --user-dir "$(python -m pn_fairseq --user-dir)" ...',
    )
    parser.parse_args()
    print(Path(__file__).resolve().parent)


if __name__ == "__main__":
    main()
