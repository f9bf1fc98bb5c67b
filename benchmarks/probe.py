"""What ``--norm-probe`` costs: ``python -m benchmarks.probe``.

A trainer of ``fairseq-train`` makes updates on made-up batches: one without a probe, one whose
batches the probe only averages, one that it records, and so on in turn. Printed are medians of the
ratios in one round, and the mean cost of an update with ``--norm-probe-interval 50``: of 50
updates, 1 is recorded and 10 are averaged.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import hide_messages
from benchmarks.results import in_turns, output_file, ratios, settings_of, write_csv
from benchmarks.training import make_batches, make_trainer, update
from pn_fairseq.models.architectures import SIZES
from pn_fairseq.models.norm_probe import WINDOW, NormProbe

INTERVAL = 50


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every update, by kind."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(args.norm, args.dtype, args)
        batches = make_batches(args)
        model = trainer.get_model()
        probe = NormProbe(
            model, str(Path(folder) / "probe"), 1, "encoder.*"
        )  # turn sets the interval

        def turn(kind: str, number: int) -> None:
            # The probe records update n if n is a multiple of its interval. With interval n the
            # next update, n, is recorded; with n + 1 it is one of those that are averaged.
            probe.interval = trainer.get_num_updates() + (2 if kind == "averaged" else 1)
            model.norm_probe = None if kind == "plain" else probe
            update(trainer, batches[number % len(batches)])

        turns = {kind: partial(turn, kind) for kind in ("plain", "averaged", "recorded")}
        return in_turns(turns, args.rounds, warm=1)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.probe", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--size", choices=list(SIZES), default="iwslt", help="default: iwslt")
    parser.add_argument(
        "--norm", default="pn", help="abbreviation of the encoder's norm (default: pn)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument(
        "--tokens", type=int, default=1024, help="tokens a batch and side (default: 1024)"
    )
    parser.add_argument(
        "--length", type=int, default=32, help="tokens of the longest sentence (default: 32)"
    )
    parser.add_argument(
        "--vocabulary", type=int, default=10000, help="size of the dictionary (default: 10000)"
    )
    parser.add_argument(
        "--rounds", type=int, default=10, help="measured updates of each kind (default: 10)"
    )
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also write a CSV file")
    args = parser.parse_args(argv)
    hide_messages()
    found = measure(args)
    ratio = {kind: ratios(seconds, found["plain"])[1] for kind, seconds in found.items()}
    cost = ((ratio["averaged"] - 1) * WINDOW + ratio["recorded"] - 1) / INTERVAL
    print(f"averaged {ratio['averaged']:.3f} times, recorded {ratio['recorded']:.3f} times")
    print(f"--norm-probe-interval {INTERVAL}: {100 * cost:+.2f}% of an update")
    if args.output:
        measured = {
            "averaged": ratio["averaged"],
            "recorded": ratio["recorded"],
            "percent_of_an_update": 100 * cost,
        }
        measured = {name: f"{value:.4g}" for name, value in measured.items()}
        row = {"norm": args.norm, "interval": INTERVAL, **settings_of(args), **measured}
        write_csv(args.output, [row])


if __name__ == "__main__":
    main()
