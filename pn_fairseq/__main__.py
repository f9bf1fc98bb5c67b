"""``python -m pn_fairseq``: what someone needs to know to use the plugin."""

import argparse
from pathlib import Path

from pn_fairseq import __version__


def info() -> str:
    """Which implementation of the kernels computes on which device, and why."""
    import torch

    from pn_fairseq import kernels

    lines = [f"pn_fairseq {__version__}, torch {torch.__version__}"]
    lines += [f"kernels on {device}: {name} ({why})" for device, (name, why) in kernels.describe().items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pn_fairseq", description="Power Normalization for fairseq.")
    parser.add_argument("--version", action="version", version=f"pn_fairseq {__version__}")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--user-dir",
        action="store_true",
        help='print the directory for fairseq: fairseq-train --user-dir "$(python -m pn_fairseq --user-dir)" ...',
    )
    what.add_argument("--info", action="store_true", help="print which kernels are in use on CPU and CUDA, and why")
    args = parser.parse_args()
    if args.user_dir:
        print(Path(__file__).resolve().parent)
        return
    try:
        print(info())
    except RuntimeError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
