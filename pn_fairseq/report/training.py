"""The sections of a report about training: how far each run came, its speed, the norms' diagnostics, the machines."""

from __future__ import annotations

import json
import math
import statistics

from pn_fairseq.report.page import Bullets, Code, Element, Heading, Inline, Missing, Paragraph, Table
from pn_fairseq.report.runs import Run
from pn_fairseq.report.systems import Corpus
from pn_fairseq.report.wording import count, duration, here, number

#: What describes a start of a training and not the machine it ran on (scripts/train.sh).
_OF_A_START = ("started", "workers", "tokens_per_update", "update_freq", "max_tokens")

#: Diagnostic -> what it is, and how the records of a run are made one number. docs/training.md says more.
DIAGNOSTICS = {
    "norm_psi_distance": ("mean of abs(log(ψ_B / ψ))", statistics.fmean, "mean"),
    "norm_nu_rms": ("root mean square of ν", max, "largest"),
    "norm_gamma_max": ("largest mean(x̂²) of a channel", max, "largest"),
    "norm_guarded_steps": ("times that max(0, ·) acted", max, "largest"),
    "norm_nonfinite_steps": ("steps kept out of the state, not finite", max, "largest"),
}


def training(corpus: Corpus) -> list[Element]:
    """How far each run came, and how fast."""
    header = [
        "norm", "seed", "run", "state", "updates", "best validation loss (bits/token)", "wall time", "starts",
        "tokens/s", "tokens", "workers", "parameters",
    ]  # fmt: skip
    rows = [[system.label, *_training_row(run)] for system in corpus.systems for run in system.runs]
    notes: list[Inline] = [
        "Best validation loss: the lowest negative log-likelihood without label smoothing, and the update it was at.",
        "Wall time: the sum over all starts of a run, validation and saving included, loading not. Of a start that was "
        'cut off it counts what lies before its last record ("at least").',
        "Tokens/s: median over the records of the training (fairseq's wps), target-side tokens, all workers together. "
        "Tokens: target-side, what was trained again after an interruption included.",
    ]
    return [Heading(3, "Training"), Table(header, rows, frozenset({4, 5, 6, 7, 8, 9, 10, 11})), Bullets(notes)]


def state(run: Run) -> Inline:
    """One word or two for how far a run came."""
    if run.failed is not None:
        return Missing(f"failed: {here(run.failed) or 'no reason given'}")
    if run.log is None or not (run.log.curve.train or run.log.curve.valid):
        return Missing("not trained")
    if not run.log.ended and not (run.max_update and run.log.updates >= run.max_update):
        return Missing("not finished")
    if run.decoded is None:
        return Missing("trained, not decoded")
    return "complete" if run.scores else Missing("decoded, not scored")


def _training_row(run: Run) -> list[Inline]:
    row: list[Inline] = [
        Missing("not known") if run.seed is None else str(run.seed), Code(run.name), state(run)
    ]  # fmt: skip
    log = run.log
    if log is None or not (log.curve.train or log.curve.valid):
        return row + [Missing("not trained")] * 8
    row.append(f"{log.updates:,} of {run.max_update:,}" if run.max_update else f"{log.updates:,} (no limit)")
    best = run.best_valid
    row.append(f"{number(best[0], 3)} at {best[1]:,}" if best else Missing("never validated"))
    seconds = sum(start.seconds for start in log.starts)
    certain = all(start.done_seconds is not None for start in log.starts)
    row.append(("" if certain else "at least ") + duration(seconds) if seconds else Missing("not logged"))
    row.append(str(len(log.starts)))
    speeds = list(log.tokens_per_second.values())
    row.append(number(statistics.median(speeds), 0) if speeds else Missing("not logged"))
    tokens = sum(start.tokens for start in log.starts)
    row.append(number(tokens, 0) if tokens else Missing("not logged"))
    row.append(str(run.workers))
    row.append(f"{log.parameters:,}" if log.parameters else Missing("not logged"))
    return row


def diagnostics(corpus: Corpus) -> list[Element]:
    """The norms' diagnostics, of the runs that logged them."""
    elements: list[Element] = [Heading(3, "Diagnostics of the norms")]
    names = list(dict.fromkeys(name for run in corpus.runs if run.log for name in run.log.diagnostics))
    if not names:
        return [*elements, Paragraph(Missing("Not logged (model.norm_stats_interval is 0, or no norm has any)."))]
    names.sort(key=lambda name: list(DIAGNOSTICS).index(name) if name in DIAGNOSTICS else len(DIAGNOSTICS))
    rows, silent = [], []
    for system in corpus.systems:
        for run in system.runs:
            found = run.log.diagnostics if run.log else {}
            if not found:
                silent.append(run.name)
                continue
            row: list[Inline] = [system.label, Missing("not known") if run.seed is None else str(run.seed)]
            for name in names:
                values = [value for _, value in sorted(found.get(name, {}).items())]
                finite = [value for value in values if math.isfinite(value)]
                if not values:
                    row.append(Missing("not logged"))
                elif not finite:
                    row.append(Missing("not finite"))
                else:
                    make = DIAGNOSTICS[name][1] if name in DIAGNOSTICS else max
                    row.append(f"{make(finite):.4g}, last {values[-1]:.4g}")
            rows.append(row)
    meanings: list[Inline] = [
        [Code(name), f": {DIAGNOSTICS[name][0]}; {DIAGNOSTICS[name][2]} of the run's records, and the last"]
        for name in names
        if name in DIAGNOSTICS
    ]
    if silent:
        meanings.append(Missing(f"Not logged by {', '.join(silent)}."))
    header = ["norm", "seed", *(Code(name) for name in names)]
    return [
        *elements,
        Table(header, rows, frozenset(range(2, len(header)))),
        *([Bullets(meanings)] if meanings else []),
    ]


def machines(runs: list[Run]) -> list[Element]:
    """Versions and hardware, as each start of a training recorded them; the same ones once."""
    elements: list[Element] = [Heading(2, "Versions and hardware")]
    found: dict[str, tuple[dict, list[str], list[str]]] = {}
    for run in runs:
        for start in run.starts:
            machine = {name: value for name, value in start.items() if name not in _OF_A_START}
            entry = found.setdefault(json.dumps(machine, sort_keys=True, default=str), (machine, [], []))
            if run.name not in entry[1]:
                entry[1].append(run.name)
            entry[2].append(str(start.get("started", "not recorded")))
    if not found:
        return [*elements, Paragraph(Missing("Not recorded: no run has a starts.jsonl."))]
    names = list(dict.fromkeys(name for machine, _, _ in found.values() for name in machine))
    header: list[Inline] = ["", *(f"machine {number}" for number in range(1, len(found) + 1))]
    if len(found) == 1:
        header = ["what", "all starts"]
    else:
        header[0] = "what"
    rows: list[list[Inline]] = [
        [name.replace("_", " "), *(_shown(machine.get(name)) for machine, _, _ in found.values())] for name in names
    ]
    rows.append(["runs", *(", ".join(runs_there) for _, runs_there, _ in found.values())])
    rows.append(["starts", *(f"{count(len(times), 'start')}, {_span(times)}" for _, _, times in found.values())])
    elements.append(Table(header, rows))
    lacking = [run.name for run in runs if not run.starts]
    if lacking:
        elements.append(Paragraph(Missing(f"Not recorded for {', '.join(lacking)}.")))
    return elements


def _span(times: list[str]) -> str:
    first, last = min(times), max(times)
    return first if first == last else f"{first} to {last}"


def _shown(value: object) -> Inline:
    return Missing("none") if value in (None, "", [], {}) else _plain(value)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_plain(one)}" for name, one in value.items())
    if isinstance(value, list):
        # Eight times the same GPU.
        texts = [_plain(one) for one in value]
        several = {text: texts.count(text) for text in texts}
        return "; ".join(f"{times} × {text}" if times > 1 else text for text, times in several.items()) or "none"
    return "none" if value is None else str(value)
