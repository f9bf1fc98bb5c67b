"""``scripts/average.sh``: average the last checkpoints of a run, once."""

from __future__ import annotations

import argparse
from pathlib import Path

from pn_fairseq.common.command import ArgumentParser, UserError, command, say, whole
from pn_fairseq.common.files import atomic_write, checksum, recorded
from pn_fairseq.pipeline.runs import RUN, Run, open_run

#: --by -> the setting that says how many of these fairseq keeps.
KEPT = {"epoch": "checkpoint.keep_last_epochs", "update": "checkpoint.keep_interval_updates"}


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="scripts/average.sh",
        description="Average the weights of the last checkpoints of a run.",
        epilog="Does nothing if the output was made from the same checkpoints with the same options.",
    )
    add = parser.add_argument
    add("--run", type=Path, required=True, metavar="DIR", help=RUN)
    last = "how many checkpoints (default: average_last of the configuration, else as many as the run keeps); if there "
    add("--last", type=whole, metavar="N", help=f"{last}are fewer, all are averaged and a line says so")
    by = "checkpoints of epochs or of updates (default: those that the run keeps)"
    add("--by", choices=KEPT, help=by)
    add("--output", type=Path, metavar="FILE", help="default DIR/checkpoints/averaged.pt")
    recalibrate = (
        "re-estimate the norms' running statistics with the averaged weights on the run's training data, and print the "
        "validation loss before and after (docs/averaging.md); by default the statistics are averaged, too"
    )
    add("--recalibrate", action=argparse.BooleanOptionalAction, default=False, help=recalibrate)
    return parser


def choose(run: Run, by: str | None, last: int | None) -> tuple[list[Path], str]:
    """The checkpoints to average, oldest first, and what they are counted in."""
    from pn_fairseq.common.checkpoints import checkpoints_to_average

    kept = by or ("update" if run.get(KEPT["update"], -1) > 0 else "epoch")
    if last is None:
        last = run.get(KEPT[kept], -1)
        if last < 1:
            raise UserError(f"'{run.path}' keeps all checkpoints: say how many to average with --last")
        last = run.get("average_last") or run.get("scoring.average_last") or last
    kinds = (by,) if by else (kept, *(KEPT.keys() - {kept}))
    paths, kind, differs = checkpoints_to_average(run.checkpoints, last, kinds)
    if differs:
        say("average", differs)
    return paths, kind


@command("average.sh")
def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    run = open_run(args.run)
    output = args.output or run.checkpoints / "averaged.pt"

    from pn_fairseq.pipeline.average_checkpoints import average

    paths, kind = choose(run, args.by, args.last)
    made, how = output.with_name(f"{output.name}.made"), f"{kind} {len(paths)}"
    if args.recalibrate:
        about = recorded(run.data, "settings") if run.data else run.bin / "preprocess.log"
        how += f" recalibrated on {checksum(about)[:16]}"
    if output.is_file() and made.is_file() and made.read_text("utf-8").strip() == how:
        newest = max(path.stat().st_mtime_ns for path in run.checkpoints.glob("checkpoint*.pt"))
        if newest <= output.stat().st_mtime_ns:
            say("average", f"{output} is there already")
            return 0
    # Gone while the output changes: after an interruption it must not describe another file.
    made.unlink(missing_ok=True)
    average(paths, output, data=run.bin if args.recalibrate else None)
    with atomic_write(made, "w") as file:
        file.write(f"{how}\n")
    return 0
