"""``pn-plot-curves``: the learning curves of one or more training runs as a picture."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pn_fairseq.cli import ArgumentParser, UserError, command
from pn_fairseq.report.curves import plot
from pn_fairseq.training_log import read_log

TOOL = "pn-plot-curves"


def _log_of(path: Path) -> Path:
    return path / "train.log" if path.is_dir() else path


@command(TOOL)
def main(argv: Sequence[str] | None = None) -> None:
    """Run the tool on ``argv`` (by default the process's arguments) and return its exit code: 0, 2 or 130."""
    parser = ArgumentParser(prog=TOOL, description="Draw the learning curves of training runs, side by side.")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="directory of a run (with train.log in it), or a log file"
    )
    parser.add_argument("--output", required=True, type=Path, help="picture to write: .png, .pdf or .svg")
    parser.add_argument("--labels", nargs="+", metavar="LABEL", help="names for the legend (default: from the paths)")
    args = parser.parse_args(argv)
    if args.output.suffix not in (".png", ".pdf", ".svg"):
        raise UserError(f"--output {args.output}: the name must end in .png, .pdf or .svg")
    if not args.output.absolute().parent.is_dir():
        raise UserError(f"--output {args.output}: there is no directory {args.output.absolute().parent}")
    labels = args.labels or [_log_of(path).absolute().parent.name for path in args.runs]
    if len(labels) != len(args.runs):
        raise UserError(f"{len(args.runs)} runs but {len(labels)} --labels")
    if len(set(labels)) != len(labels):
        raise UserError(f"the runs need different names ({', '.join(labels)}): give --labels")
    curves = {}
    for label, path in zip(labels, args.runs, strict=True):
        try:
            curves[label] = [read_log(_log_of(path))]
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {_log_of(path)}: {error}") from error
    plot(curves, args.output)
    print(args.output)


if __name__ == "__main__":
    sys.exit(main())
