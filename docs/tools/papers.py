"""The papers' tables beside our results: docs/reproducing.md, docs/language_modeling.md and docs/placements.md.

``python -m docs.tools.papers [FOLDER]`` writes them. With FOLDER, in which runs were made, `pn report` first writes
docs/results of the finished runs of `pn reproduce compare_adanorm` and `compare_placements`, as docs.tools.results
does; rows of runs that FOLDER does not have stay. Copy the csv files of the examples to
docs/results/sentiment/sentiment.csv and docs/results/images/TRAINING/epochs.csv. What is missing is named.
"""

import functools
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pandas

from pn_fairseq.common.published import LM_OTHERS, LM_PAPER, PAPER
from pn_fairseq.norms import NORMS
from pn_fairseq.pipeline import experiments
from pn_fairseq.report.intervals import signed
from pn_fairseq.report.significance import LOSS, families
from pn_fairseq.report.systems import norm_labels

from . import results
from .generated import table, write_parts

_SCALE = "norm_options.ada.ada_scale"
#: Column of report.csv -> title.
MEASURES = {"tokenized": "BLEU", LOSS: "validation loss"}
#: Report -> its runs.
RUNS = {
    "adanorm": "runs/compare_adanorm/adanorm/*_seed*",
    "placements": "runs/compare_placements/placements/*_seed*",
    "placements-deep": "runs/compare_placements/placements_deep/*_seed*",
}
#: What the AdaNorm paper concludes from the difference of two rows. They were named before the runs.
EFFECTS = {
    "normalizing forward": ("DetachNorm", "w/o Norm"),
    "the derivatives of mean and deviation": ("LayerNorm-simple", "DetachNorm"),
    "leaving gain and bias out": ("LayerNorm-simple", "LayerNorm"),
    "AdaNorm's gain, C = 1": ("AdaNorm, C = 1", "LayerNorm"),
    "AdaNorm's gain, C = 2": ("AdaNorm, C = 2", "LayerNorm"),
}


# The rows of AdaNorm's tables on the verses.


def adanorm_rows() -> dict[str, str]:
    """Runs of compare_adanorm, without their seed -> the row of the paper's tables, and where the norm stands."""
    labels = {
        (row.norm, row.settings.get("norm_options.detach")): row.label
        for number in (1, 2, 3, 4)
        for row in PAPER[f"adanorm-{number}"].rows
    }
    names, found = {entry.short: name for name, entry in NORMS.items()}, {}
    for run in experiments.adanorm().parts[0].norms.split():
        short, *settings = run.split("+")
        given = dict(setting.split("=") for setting in settings)
        norm, last = given.get("encoder_norm_last", names[short]), "encoder_norm_last" in given
        scale = f", C = {float(given.get('norm_options.ada_scale', 1)):g}" if norm == "ada" else ""
        found[run] = f"{labels[norm, given.get('norm_options.detach')]}{scale}{', last only' if last else ''}"
    return found


def _runs(report: str, labels: dict[str, str]) -> pandas.DataFrame:
    """The runs of a report, with ``labels`` (name of a run without its seed -> label) as systems."""
    file = results.RESULTS / report / "report.csv"
    frame = results.read(file.parent, report) if file.is_file() else pandas.DataFrame(columns=["run"])
    frame["system"] = frame["run"].str.extract(r"([^/]+)_seed\d+$", expand=False).map(labels)
    return frame.dropna(subset=["system"])


def _of_paper(label: str) -> dict[str, float]:
    """BLEU of a row of the AdaNorm paper's tables by corpus; of AdaNorm only with the C that it has there."""
    wanted, scale, *_ = [*label.split(", "), ""]
    every = [(table.title, row) for name, table in PAPER.items() if "adanorm" in name for row in table.rows]
    return {
        title.partition(" ")[0]: row.bleu
        for title, row in every
        if row.label == wanted and scale in ("last only", "", f"C = {float(row.settings.get(_SCALE, 0)):g}")
    }


def _columns(of_paper: dict[str, float], text: Callable[[float], str]) -> dict[str, str]:
    return {f"paper, {corpus}": "diverges" if math.isnan(bleu) else text(bleu) for corpus, bleu in of_paper.items()}


def _compared(frame: pandas.DataFrame, control: str, title: str = "system") -> dict[str, dict[str, str]]:
    """System -> its row: its name in the column ``title``, means, and differences from ``control``."""
    others = frame["system"].map(lambda label: None if label == control else control)
    frame = frame.assign(**{"compared with": others})
    rows = results.system_rows(frame, MEASURES) if len(frame) else []
    named = ({title: row.pop("encoder norm"), **row} for row in rows)
    return dict(zip(frame["system"].unique(), named, strict=True))


def _difference(frame: pandas.DataFrame, label: str, other: str) -> dict[str, str]:
    """Title of a measure -> the difference of two systems, compared without the other systems."""
    found = _compared(frame[frame["system"].isin([label, other])], other).get(label, {})
    return {title: found.get(f"difference in {title}", "not finished") for title in MEASURES.values()}


def adanorm() -> str:
    """Every row beside the paper's numbers."""
    labels = adanorm_rows()
    frame = _runs("adanorm", labels)
    ours = _compared(frame, "LayerNorm", "norm")
    rows = [
        ours.get(label, {"norm": label, "blocks": "not finished"}) | _columns(_of_paper(label), "{:.1f}".format)
        for label in labels.values()
    ]
    planned = len(labels) * len(experiments.adanorm().parts)
    return f"{table(rows)}\n\n{frame['run'].nunique()} of {planned} planned runs are finished."


def effects() -> str:
    """The differences from which the paper concludes."""
    frame, rows = _runs("adanorm", adanorm_rows()), []
    for effect, (label, other) in EFFECTS.items():
        row = {"effect of": effect, "difference": f"{label} − {other}"}
        row |= {f"here, {title}": text for title, text in _difference(frame, label, other).items()}
        one, another = _of_paper(label), _of_paper(other)
        rows.append(row | _columns({corpus: one[corpus] - another[corpus] for corpus in one}, lambda d: signed(d, 1)))
    return table(rows)


# AdaNorm's tasks of examples/.

#: Test accuracies of the AdaNorm paper, Tables 1 to 4: task -> label of a row -> percent.
ACCURACIES = {
    "RT": {"w/o Norm": 76.85, "LayerNorm": 77.21, "LayerNorm-simple": 76.66, "DetachNorm": 76.40,
           "Detach Mean": 75.02, "Detach Variance": 77.04, "AdaNorm": 77.50},
    "SST5": {"w/o Norm": 38.55, "LayerNorm": 39.23, "LayerNorm-simple": 40.54, "DetachNorm": 40.04,
             "Detach Mean": 40.99, "Detach Variance": 41.74, "AdaNorm": 40.54},
    "MNIST": {"w/o Norm": 99.14, "LayerNorm": 99.13, "LayerNorm-simple": 99.09, "DetachNorm": 99.10,
              "Detach Mean": 99.25, "Detach Variance": 99.10, "AdaNorm": 99.35},
}  # fmt: skip


def _accuracies_of_sentences() -> pandas.DataFrame:
    """What examples/sentiment.py wrote, with the labels of norms as systems."""
    file = results.RESULTS / "sentiment/sentiment.csv"
    columns = ["task", "norm", "seed", "test accuracy"]
    frame = pandas.read_csv(file) if file.is_file() else pandas.DataFrame(columns=columns)
    return frame.assign(system=frame["norm"].map(NAMES), machine="one")


def sentiment() -> str:
    """Means of each norm, and differences from LN of the same seed with simultaneous intervals."""
    frame, rows = _accuracies_of_sentences(), {}
    if frame.empty:
        return results.NOTHING
    frame["compared with"] = frame["system"].map(lambda system: None if system == "LN" else "LN")
    for task in ("RT", "SST5"):
        of_task = frame[frame["task"] == task.lower()]
        intervals = {system: found for family in families(of_task, "test accuracy")[0]
                     for system, found in family.intervals.items()}  # fmt: skip
        for system, runs in of_task.groupby("system", sort=False):
            row = rows.setdefault(system, {"norm": system})
            row[task] = f"{runs['test accuracy'].mean():.2f} ± {runs['test accuracy'].std():.2f} ({len(runs)})"
            found = intervals.get(system)
            ends = [signed(value) for value in (found.difference, found.low, found.high)] if found else []
            row[f"{task}, difference"] = "{} ({} to {})".format(*ends) if found else "–"
            row[f"{task}, paper"] = str(ACCURACIES[task].get(system.replace("LN", "LayerNorm"), "–"))
    return table([*rows.values()])


# Placements.

#: End of the name of a system with PN in the encoder.
_PN = ", PN in the encoder"


def _placements(report: str) -> tuple[list[str], pandas.DataFrame, int]:
    """The systems in the order of the plan, their finished runs, and the number of planned runs."""
    parts = [part for part in experiments.placements().parts if part.folder.replace("_", "-") == report]
    names = {}
    for run in parts[0].norms.split():
        short, *settings = run.split("+")
        where = settings[0].partition("=")[2] if settings else "pre"
        names[run] = f"`{where}`" if short == "ln" else f"`{where}`{_PN}"
    return [*names.values()], _runs(report, names), len(names) * len(parts)


def placements(report: str = "placements") -> str:
    """Means of every placement and differences from ``pre`` with LN."""
    names, frame, planned = _placements(report)
    ours = _compared(frame, "`pre`", "placement")
    rows = [ours.get(name, {"placement": name, "blocks": "not finished"}) for name in names]
    return f"{table(rows)}\n\n{frame['run'].nunique()} of {planned} planned runs are finished."


def norms_of_placements() -> str:
    """PN in the encoder minus LN, in the same placement."""
    names, frame, _ = _placements("placements")
    rows = []
    for name in (name for name in names if name.endswith(_PN)):
        where = name.removesuffix(_PN)
        differences = _difference(frame, name, where).items()
        rows.append({"placement": where} | {f"difference in {title}": text for title, text in differences})
    return table(rows)


# One table of all tasks.


def _ours(report: str, column: str, systems: tuple[str, ...] = (), digits: int = 2) -> str:
    """Means over the runs of a report, by system."""
    if not results.folders(report):
        return NOT_YET
    frame = results.runs_of(report).dropna(subset=[column])
    frame = frame[frame["system"].isin(systems)] if systems else frame
    return _means(frame, "system", column, digits)


def _means(frame: pandas.DataFrame, by: str, column: str, digits: int) -> str:
    groups = frame.groupby(by, sort=False)[column]
    return ", ".join(f"{name} {values.mean():.{digits}f} ({len(values)})" for name, values in groups) or NOT_YET


def _sentiment(task: str) -> str:
    """Test accuracies of examples/sentiment.py."""
    frame = _accuracies_of_sentences()
    return _means(frame[frame["task"] == task], "system", "test accuracy", 2)


def _images(network: str) -> str:
    """Test accuracies of examples/images.py: of the best epoch of the validation images, else of the last one."""
    rows = []
    for file in sorted(results.RESULTS.glob(f"images/{network}_*_seed*/epochs.csv")):
        best = pandas.read_csv(file).nlargest(1, "validation accuracy", keep="last")
        norm = file.parent.name.split("_")[-2]
        rows.append({"norm": NAMES[norm], "accuracy": best["test accuracy"].item()})
    return _means(pandas.DataFrame(rows, columns=["norm", "accuracy"]), "norm", "accuracy", 2)


def _listed(task: str) -> str:
    return ", ".join(f"{label} {value:.2f}" for label, value in ACCURACIES[task].items())


def _bleu(table: str) -> str:
    """The numbers of a published table."""
    rows = {row.label.removeprefix("Transformer "): row.bleu for row in PAPER[table].rows}
    return ", ".join(f"{label} {'diverges' if math.isnan(bleu) else bleu}" for label, bleu in rows.items())


def _perplexity(corpus: str) -> str:
    own = corpus in LM_OTHERS
    rows = {label: test for label, (_, test) in LM_PAPER[corpus].items() if own or "*" in label}
    names = {label: label.partition(" *")[0].removeprefix("core-1 + ") for label in rows}
    return ", ".join(f"{names[label]} {test:.{1 + own}f}" for label, test in rows.items())


NOT_YET = "not yet"
#: Name of a norm in the examples -> its label.
NAMES = {**norm_labels(), "detach-mean": "Detach Mean", "detach-std": "Detach Variance"}
_FOUR = ("LN", "BN", "PN-V", "PN")
_RATED = "heads, learning rate, epochs and vocabulary are not in the paper"
_SENTIMENT = "python examples/sentiment.py DATA --norms layer ada layer-simple batch power rms"
#: Task and measure, command, the paper's numbers, ours, what differs.
TASKS = (
    ("IWSLT14 De-En, BLEU (PowerNorm, Table 4)", "TABLE=powernorm-4 pn reproduce iwslt14",
     lambda: _bleu("powernorm-4"),
     lambda: _ours("iwslt14", "tokenized"), "settings of the authors' scripts; `powernorm-4-paper`: of the text"),
    ("WMT14 En-De, BLEU (PowerNorm, Table 1)", "TABLE=powernorm-1-wmt14 pn reproduce wmt14",
     lambda: _bleu("powernorm-1-wmt14"),
     lambda: _ours("wmt14", "tokenized"), "32,764 merges; the paper writes 37K"),
    ("the same on the verses", "pn reproduce compare_norms",
     lambda: "–", lambda: _ours("verses", "tokenized", _FOUR),
     "small corpus, tiny model"),
    ("IWSLT14 De-En, BLEU (AdaNorm, Table 4)", "TABLE=adanorm-4 pn reproduce iwslt14",
     lambda: _bleu("adanorm-4"),
     lambda: _ours("iwslt14_adanorm", "tokenized"),
     "the norm is in every place; `adanorm-4-code` has it after the last layers, as the authors' code"),
    ("IWSLT15 En-Vi, BLEU (AdaNorm, Table 4)", "TABLE=adanorm-4-iwslt15 pn reproduce iwslt15_envi",
     lambda: _bleu("adanorm-4-iwslt15"),
     lambda: _ours("iwslt15", "tokenized"), "the same; 10,000 joint merges, the paper's number is not known"),
    ("WMT14 En-De, BLEU (AdaNorm, Table 4)", "TABLE=adanorm-4-wmt14 pn reproduce wmt14",
     lambda: _bleu("adanorm-4-wmt14"),
     lambda: _ours("wmt14_adanorm", "tokenized"), "the same; GPUs and updates are not in the paper"),
    ("the same on the verses", "pn reproduce compare_adanorm",
     lambda: "–",
     lambda: "[below](#adanorms-tables-on-the-verses)", "small corpus, tiny model"),
    ("PTB, perplexity (PowerNorm, Tables 3 and 4)", "TABLE=powernorm-4-ptb pn reproduce ptb --corpus DIR",
     lambda: _perplexity("PTB"),
     lambda: _ours("ptb", "perplexity"), "causal; settings of Ma et al.'s script, `-paper`: those of the text"),
    ("WikiText-103, perplexity (PowerNorm, Table 3)", "TABLE=powernorm-2-wikitext103 pn reproduce wikitext103",
     lambda: _perplexity("WikiText-103"), lambda: _ours("wikitext103", "perplexity"), "as PTB"),
    ("the same on the verses", "pn reproduce verses_lm",
     lambda: "–",
     lambda: "[Language modeling](language_modeling.md#results)", "small corpus, tiny models"),
    ("enwik8, bits per byte (AdaNorm, Tables 1 to 4)", "TABLE=adanorm-4-enwik8 pn reproduce enwik8",
     lambda: _perplexity("enwik8"),
     lambda: _ours("enwik8", "bits"), "causal Transformer without Transformer-XL's memory and relative positions"),
    ("the same on the verses", "pn reproduce verses_lm --unit byte "
     "--data runs/data/verses_lm_en_bytes --runs runs/verses_lm_bytes",
     lambda: "–",
     lambda: _ours("verses_lm_bytes", "bits", digits=3),
     "300 updates of a tiny model ([command](language_modeling.md#bytes))"),
    ("RT, accuracy (AdaNorm)", f"{_SENTIMENT} --task rt",
     lambda: _listed("RT"),
     lambda: _sentiment("rt"), _RATED),
    ("SST5, accuracy (AdaNorm)", f"{_SENTIMENT} --task sst5",
     lambda: _listed("SST5"),
     lambda: _sentiment("sst5"), _RATED),
    ("MNIST, accuracy (AdaNorm)", "python examples/images.py DATA --network mnist --norms layer ada --validation 5000",
     lambda: _listed("MNIST"),
     lambda: _images("mnist"), "kernels, pooling and hidden size are not in the paper"),
    ("CIFAR-10, accuracy (PowerNorm, Figures 2, 3)", "python examples/images.py DATA",
     lambda: "statistics only",
     lambda: _images("resnet20"), "20 epochs; of JPEG copies of the images, so no accuracy on CIFAR-10 itself"),
)  # fmt: skip


def tasks() -> str:
    """Every task of the papers: command, the paper's numbers, ours."""
    titles = ("task", "command", "paper", "ours", "what differs")
    rows = ((task, f"`{command}`", paper(), ours(), differs) for task, command, paper, ours, differs in TASKS)
    text = "Ours: means over seeds, whose number is in brackets."
    return f"{table([dict(zip(titles, row, strict=True)) for row in rows])}\n\n{text}"


def bytes_of_verses() -> str:
    """The language models of bytes."""
    if not results.folders("verses_lm_bytes"):
        return results.NOTHING
    frame = results.runs_of("verses_lm_bytes")
    rows = [
        {"model": row.system, "bits per byte": f"{row.bits:.3f}", "updates": f"{row.updates:,}"}
        for row in frame.itertuples()
    ]
    where = "results/verses_lm_bytes/report"
    return f"{table(rows)}\n\n[Report]({where}.md) · [all numbers]({where}.csv)"


PAGES = {
    "reproducing.md": {"tasks": tasks, "adanorm": adanorm, "effects": effects, "sentiment": sentiment},
    "language_modeling.md": {"bytes": bytes_of_verses},
    "placements.md": {
        "placements": placements,
        "norms": norms_of_placements,
        "deep": functools.partial(placements, "placements-deep"),
    },
}


def main() -> None:
    logging.disable(logging.INFO)  # of sacrebleu
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1]).resolve()
        if not (done := [f"{name}={glob}" for name, glob in RUNS.items() if results.with_results(folder, glob)]):
            raise SystemExit(f"{folder} has no finished runs: {', '.join(RUNS.values())}")
        results.write_reports(folder, *done)
    write_parts(PAGES)


if __name__ == "__main__":
    main()
