"""docs/results/masks.md, what the padding mask changes: ``python -m docs.tools.masks [FOLDER]`` writes it.

FOLDER has the runs of scripts/compare_masks.sh (DIR of its --runs). What is finished in it is added to
docs/results/masks: reports as of docs.tools.results, and for each run

- ``distances.parquet``: relative distances of running to batch statistics, of each record of --norm-probe;
- ``changed.csv``: the sentences whose translation differs if every sentence is decoded in a batch of its own;
- ``padding.csv``: the padding in the training batches of the first epoch.

The runs of LN, BN and PN in batches by length are the trainings of compare_norms with these seeds, so that
docs.tools.results also counts them as blocks of the verses.
"""

import logging
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas

from pn_fairseq.__main__ import call
from pn_fairseq.common.files import atomic_write
from pn_fairseq.common.probe_files import read_probe
from pn_fairseq.pipeline import experiments
from pn_fairseq.pipeline.bootstrap import p_text
from pn_fairseq.pipeline.runs import Run
from pn_fairseq.report import intervals
from pn_fairseq.report.curves import save, style
from pn_fairseq.report.significance import LOSS, MEASURES, SHORT_NAMES, Interval

from . import papers, results
from .generated import ROOT, write_parts

FOLDER = ROOT / "docs/results/masks"
#: Folder of the runs, masks_NAME, and of its report -> the kind of batches.
KINDS = {"by_length": "batches by length", "random": "random batches"}
UNMASKED = "{} without the mask"
#: Updates of the distances in the table: the second half of the training.
SECOND_HALF = 800
FINISHED = "generate/test/scores.json"


# What is kept of a run.


def add(folder: Path) -> None:
    """Add the finished runs in a folder."""
    FOLDER.mkdir(exist_ok=True)
    for kind in KINDS:
        runs = [run for run in sorted(folder.glob(f"masks_{kind}/*_seed*")) if (run / FINISHED).is_file()]
        if not runs:
            continue
        results.write_reports(folder, f"masks/{kind}=masks_{kind}/*_seed*")
        for run in runs:
            names = {"batches": kind, "run": run.name}
            keep("distances.parquet", names, lambda run=run: distances(run))
            keep("changed.csv", names, lambda run=run: changed(run))
            keep("padding.csv", {"batches": kind, "seed": Run(run).get("common.seed")}, lambda run=run: padding(run))


def read(name: str) -> pandas.DataFrame:
    """A table in docs/results/masks; empty if nothing was added yet."""
    file = FOLDER / name
    if not file.is_file():
        return pandas.DataFrame(columns=["batches", "run", "seed"])
    return pandas.read_parquet(file) if file.suffix == ".parquet" else pandas.read_csv(file)


def keep(name: str, key: dict, compute) -> None:
    """Add the rows that ``compute()`` returns to a table, unless it has rows with this key, which then stay."""
    table = read(name)
    if (table[list(key)] == pandas.Series(key)).all(axis=1).any():
        return
    rows = pandas.DataFrame(compute())
    rows = pandas.concat([pandas.DataFrame([key] * len(rows)), rows], axis=1)
    table = rows if table.empty else pandas.concat([table, rows], ignore_index=True)
    with atomic_write(FOLDER / name) as file:
        if name.endswith(".parquet"):
            table.to_parquet(file, index=False, compression="zstd")
        else:
            file.write(table.to_csv(index=False).encode())


def distances(run: Path) -> pandas.DataFrame:
    """For each record: mean over channels of abs(s / s_B - 1), s being the deviation, or PN's root mean square."""
    probe = read_probe(run / "norm_probe")
    psi = np.array([np.abs(1 / ratios - 1).mean() for ratios in probe["psi_batch_over_psi"]])
    relative = probe["tid_var"].where(probe["running"] != "psi2", psi)
    return probe[["update", "norm"]].assign(distance=relative.astype("float32"))


def changed(run: Path) -> list[dict[str, int]]:
    """The sentences of the test set, and those with another translation in batches of one sentence."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "one by one"
        if call(["generate", "--run", str(run), "--batch-size", "1", "--output", str(output)]) != 0:
            raise SystemExit(f"{run} cannot be decoded")
        singly, together = (
            (place / "hyp.tok").read_text("utf-8").splitlines() for place in (output, run / "generate/test")
        )
    return [{"sentences": len(singly), "changed": sum(a != b for a, b in zip(singly, together, strict=True))}]


def padding(run: Path) -> list[dict]:
    """Positions and tokens of the training batches of the first epoch, of each side; as fairseq makes the batches."""
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    import pn_fairseq.models  # noqa: F401

    trained = Run(run)
    words = [str(trained.bin), "--task", trained.get("task._name"), "--arch", "transformer_pn_tiny"]
    words += ["--optimizer", "adam"]
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    task = tasks.setup_task(convert_namespace_to_omegaconf(args).task)
    task.load_dataset("train")
    iterator = task.get_batch_iterator(
        task.dataset("train"),
        max_tokens=trained.get("dataset.max_tokens"),
        required_batch_size_multiple=trained.get("dataset.required_batch_size_multiple"),
        seed=trained.get("common.seed"),
        epoch=1,
    )
    sides: dict[str, list[tuple[int, int]]] = {"source": [], "target": []}
    for batch in iterator.next_epoch_itr(shuffle=False):
        for side, tokens in (("source", batch["net_input"]["src_tokens"]), ("target", batch["target"])):
            sides[side].append((tokens.numel(), int(tokens.ne(task.target_dictionary.pad()).sum())))
    return [
        {"side": side, "batches of the epoch": len(sizes)}
        | dict(zip(("positions", "tokens"), np.sum(sizes, axis=0).tolist(), strict=True))
        for side, sizes in sides.items()
    ]


# The page.


def runs_of(kind: str) -> pandas.DataFrame:
    """The rows of a report; ``system`` is the norm, or the norm without the mask."""
    file = FOLDER / kind / "report.csv"
    if not file.is_file():
        return pandas.DataFrame(columns=["run", "norm", "seed", "machine", "system", "compared with", *MEASURES])
    frame = pandas.read_csv(file)
    unmasked = frame["run"].str.contains("norm_ignore_mask=true")
    systems = frame["norm"].where(~unmasked, frame["norm"].map(UNMASKED.format))
    return frame.assign(system=systems)


def planned() -> list[tuple[str, str]]:
    """Norm and column of report.csv of ``experiments.masks``."""
    pairs = [text.split(":") for text in experiments.masks().planned]
    return [(norm, SHORT_NAMES[measure]) for norm, measure in pairs]


def compare(kind: str, norm: str, column: str) -> tuple[pandas.Series, Interval | None]:
    """A norm with the mask minus the same norm without it.

    Returns:
        The differences by block, and their 95% interval, which has the noise of all five systems in these batches;
        None with fewer than two blocks.
    """
    frame, control = runs_of(kind), UNMASKED.format(norm)
    values = frame.pivot_table(index=["machine", "seed"], columns="system", values=column)
    differences = values.reindex(columns=[norm, control]).diff(axis="columns")[control].dropna() * -1
    if len(differences) < 2:
        return differences, None
    controls = frame["system"].map(lambda system: None if system == control else control)
    of_measure = intervals.compare(frame.assign(**{"compared with": controls}))[column]
    family = of_measure.family_of(norm)
    return differences, family.separate[norm] if family else None


def comparisons() -> list[tuple[str, str, str, pandas.Series, Interval | None]]:
    """Kind of batches, norm, column of report.csv, and what :func:`compare` returns, of all planned comparisons."""
    return [(kind, norm, column, *compare(kind, norm, column)) for kind in KINDS for norm, column in planned()]


def answer() -> str:
    """One sentence for each planned comparison, and first what they say together."""
    lines, found, tested = [], [], 0
    for kind, norm, column, differences, interval in comparisons():
        measure = MEASURES[column]
        where = f"{norm}, {KINDS[kind]}, {measure.title}"
        seeds = ", ".join(str(seed) for _, seed in differences.index)
        if interval:
            of_measure = intervals.Compared(measure, [], {})
            sides = f"{intervals.side_of(list(differences))} seeds"
            text = f"{of_measure.text(interval)}, {p_text(interval.p_value)}, {sides}: {of_measure.verdict(interval)}"
            tested += 1
            found += [where] if interval.low > 0 or interval.high < 0 else []
        elif len(differences):
            mean = intervals.signed(differences.mean(), measure.decimals)
            text = f"{mean} with seed {seeds}: not tested, because one seed is no sample of seeds"
        else:
            text = "no seed is finished with and without the mask"
        lines.append(f"- **{where}:** {text}.")
    total, decoded = len(lines), read("changed.csv")
    if len(decoded):
        amount = f"{decoded['changed'].sum():,} of {decoded['sentences'].sum():,} translations"
        lines.append(f"- **Decoding:** {amount} ({len(decoded)} runs) depend on the batch that they are decoded in.")
    if not tested:
        first = f"**None of the {total} planned comparisons is tested yet: that needs two seeds or more.**"
    elif found:
        first = f"**In {len(found)} of {tested} tested comparisons the interval excludes 0:** {'; '.join(found)}."
    else:
        first = (
            f"**The mask is not shown to change anything:** the intervals of all {tested} tested comparisons have 0."
        )
    if 0 < tested < total:
        first += f" {total - tested} of the {total} planned comparisons are not tested yet."
    return "\n".join([first, "", *lines])


def table() -> str:
    """Means and standard deviations over seeds, and differences from LN in the same batches."""
    parts = []
    for kind, title in KINDS.items():
        frame = runs_of(kind)
        if frame.empty:
            parts.append(f"{title.capitalize()}: no run is finished.")
            continue
        frame["compared with"] = np.where(frame["system"] == "LN", None, "LN")
        rows = results.system_rows(frame, {LOSS: "validation loss", "tokenized": "BLEU"})
        parts.append(f"{title.capitalize()} ([report](masks/{kind}/report.md), [scores](masks/{kind}/report.csv)):")
        parts.append(results.to_table(rows))
    return "\n\n".join(parts)


def padding_shares() -> str:
    """The share of padding in each kind of batches."""
    frame = read("padding.csv")
    if frame.empty:
        return results.NOTHING
    sums = frame.groupby(["batches", "side"])[["positions", "tokens", "batches of the epoch"]].mean()
    rows = []
    for kind, title in KINDS.items():
        if kind not in sums.index:
            rows.append({"batches": title, "source": "no run is finished", "target": "–", "batches of an epoch": "–"})
            continue
        of_kind = sums.loc[kind]
        shares = 1 - of_kind["tokens"] / of_kind["positions"]
        rows.append(
            {"batches": title}
            | {side: f"{shares[side]:.1%}" for side in ("source", "target")}
            | {"batches of an epoch": f"{of_kind['batches of the epoch'].iloc[0]:,.0f}"}
        )
    return results.to_table(rows)


def _by_system(frame: pandas.DataFrame, cell) -> str:
    """A table: a row for each system, a column for each kind of batches; ``cell`` makes the text of some rows."""
    rows = []
    norms = dict.fromkeys(norm for part in experiments.masks().parts for norm in part.norms.split())
    for norm in norms:
        short, _, ignores = norm.partition("+")
        row = {"norm": UNMASKED.format(short.upper()) if ignores else short.upper()}
        for kind, title in KINDS.items():
            own = frame[(frame["batches"] == kind) & frame["run"].str.fullmatch(rf"{norm.replace('+', '[+]')}_seed\d+")]
            row[title] = cell(own) if len(own) else "–"
        rows.append(row)
    return results.to_table(rows)


def distance_table() -> str:
    """Medians over norms and records of the second half of the training, mean over seeds."""
    frame = read("distances.parquet")
    if frame.empty:
        return results.NOTHING
    frame = frame[frame["update"] > SECOND_HALF]
    return _by_system(frame, lambda own: f"{own.groupby('run')['distance'].median().mean():.2%}")


def changed_table() -> str:
    """The sentences that change, by seed."""
    frame = read("changed.csv")
    if frame.empty:
        return results.NOTHING
    return _by_system(frame, lambda own: ", ".join(f"{row.changed} of {row.sentences:,}" for row in own.itertuples()))


def missing() -> str:
    """What is planned and not finished."""
    lines, finished, amount = [], 0, 0
    for part in experiments.masks().parts:
        kind = part.folder.removeprefix("masks_")
        names = {norm: f"{norm}_seed{part.seed}" for norm in part.norms.split()}
        done = set(runs_of(kind).dropna(subset=["tokenized"])["run"])
        finished, amount = finished + len(done & {*names.values()}), amount + len(names)
        if absent := [f"`{norm}`" for norm, name in names.items() if name not in done]:
            lines.append(f"- {KINDS[kind]}, seed {part.seed}: {', '.join(absent)}.")
    head = f"{finished} of {amount} planned runs are finished."
    return "\n".join([head, *(["", "Not finished:", ""] if lines else []), *lines])


def draw() -> None:
    """Differences of each seed and their intervals, a column for each measure."""
    columns = list(dict.fromkeys(column for _, column in planned()))
    labels = [(kind, norm) for kind in KINDS for norm in dict.fromkeys(norm for norm, _ in planned())]
    names = [f"{norm}, {KINDS[kind]}" for kind, norm in labels]
    figure, axes = intervals.panels([MEASURES[column] for column in columns], names, 3, "mask better")
    for axis, column in zip(axes, columns, strict=True):
        for row, (kind, norm) in enumerate(labels):
            differences, interval = compare(kind, norm, column)
            look = style(1 + list(KINDS).index(kind))
            axis.plot(differences, [row] * len(differences), look["marker"], color=look["color"], alpha=0.4)
            if interval:
                half = interval.high - interval.difference
                look |= {"linestyle": "none", "markersize": 6, "capsize": 3}
                axis.errorbar([interval.difference], [row], xerr=[half], **look)
    save(figure, FOLDER.with_suffix(".png"))


PAGES = {
    "results/masks.md": {
        "masks": answer,
        "systems": table,
        "padding": padding_shares,
        "distances": distance_table,
        "changed": changed_table,
        "missing": missing,
    }
}


def main() -> None:
    logging.disable(logging.INFO)  # of sacrebleu
    if len(sys.argv) > 1:
        add(Path(sys.argv[1]).resolve())
    draw()
    results.draw()
    write_parts(results.PAGES | PAGES | papers.PAGES)


if __name__ == "__main__":
    main()
