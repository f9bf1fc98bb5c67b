"""The measures by which runs are compared, and one record for each number, whoever computed it.

The values of a run are those of ``pn score`` or ``pn evaluate-lm``, and those in the file
``RUN/generate/SUBSET/measures.json``, which any other program may write (docs/compare.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pn_fairseq.common.command import UserError, did_you_mean
from pn_fairseq.pipeline.evaluate_lm import Perplexity
from pn_fairseq.pipeline.metrics import METRICS, Measure
from pn_fairseq.pipeline.translation_scores import Scores

LOSS = "best validation loss (bits/token)"

_LOSS = Measure(LOSS, "validation loss (bits/token)", "loss", "lower", margin=0.02)

#: The measures of language models by name, in the order of the tables.
LM_MEASURES = {
    "perplexity": Measure("perplexity", "perplexity", "perplexity", "lower"),
    "bits": Measure("bits", "test loss (bits/token)", "bits", "lower", margin=0.02),
    "batch": Measure("batch", "with statistics of the batch", "batch", "lower"),
}

#: All measures that this project computes, by column of report.csv.
MEASURES: dict[str, Measure] = {**METRICS, LOSS: _LOSS, **LM_MEASURES}

#: Names that measures in a file must not have: columns of report.csv, of its tables and of
#: ``CorpusRuns.frame``, which tests/report/test_measures.py lists; nor may they begin with "std, ".
_TAKEN = (
    {"run", "data", "system", "norm", "seed", "machine", "code", "compared with", "signature"}
    | {"updates", "at update", "seconds", "seconds per update", "tokens/s", "tokens", "state"}
    | {"problems", "paper", "difference", "parts of tokenized BLEU", *MEASURES}
    | {"seeds scored", "seeds measured", "bits per byte", "bits per token"}
    | {"number", "rank", "details"}
    | {measure.title for measure in MEASURES.values()}
    | {measure.short for measure in MEASURES.values()}
)

FILE = "measures.json"
_KEYS = ("name", "value", "better", "margin", "signature")


@dataclass(frozen=True)
class Value:
    """The value of a run by one measure."""

    measure: Measure
    value: float
    signature: str = ""  # how it was computed


def of_scores(scores: Scores) -> list[Value]:
    values = []
    for name, score in scores.by_metric.items():
        values.append(Value(METRICS[name], score.score, score.signature))
    return values


def of_perplexity(perplexity: Perplexity) -> list[Value]:
    return [
        Value(MEASURES["perplexity"], perplexity.perplexity, perplexity.signature),
        Value(MEASURES["bits"], perplexity.bits),
        Value(MEASURES["batch"], perplexity.batch_perplexity),
    ]


def of_file(folder: Path) -> list[Value]:
    """The values in ``measures.json`` in a folder; none without the file.

    Raises:
        UserError: the file is not a list of measures.
    """
    file = folder / FILE
    if not file.is_file():
        return []
    try:
        entries = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error})") from None
    if not isinstance(entries, list):
        raise UserError(f"{file} is not a list of measures")
    values = []
    for number, entry in enumerate(entries, 1):
        value = _of_entry(entry, f"{file}, measure {number}")
        name = value.measure.name
        if any(name == other.measure.name for other in values):
            raise UserError(f"{file} names '{name}' twice")
        values.append(value)
    return values


def _of_entry(entry: object, where: str) -> Value:
    if not isinstance(entry, dict):
        raise UserError(f"{where} is not a mapping of {', '.join(_KEYS)}")
    for key in entry:
        if key not in _KEYS:
            raise UserError(f"{where}: unknown key '{key}'{did_you_mean(key, _KEYS)}")
    for key in ("name", "value", "better"):
        if key not in entry:
            raise UserError(f"{where} has no '{key}'")
    name = entry["name"]
    if not _is_name(name):
        raise UserError(f"{where}: the name {name!r} must be text on one line, without a colon")
    if name in _TAKEN or name.startswith("std, "):
        raise UserError(f"{where}: the name '{name}' is taken by a column of the report; rename it")
    if entry["better"] not in ("higher", "lower"):
        raise UserError(f"{where}: better is {entry['better']!r}; it must be 'higher' or 'lower'")
    if not _is_number(entry["value"]):
        raise UserError(f"{where}: the value {entry['value']!r} must be a finite number")
    margin = entry.get("margin")
    if margin is not None and not (_is_number(margin) and margin > 0):
        raise UserError(f"{where}: the margin {margin!r} must be a number above 0, or null")
    signature = entry.get("signature", "")
    if not isinstance(signature, str):
        raise UserError(f"{where}: the signature {signature!r} must be text")
    measure = Measure(name, name, name, entry["better"], margin)
    return Value(measure, float(entry["value"]), signature)


def _is_name(name: object) -> bool:
    """Whether a value is text on one line, without a colon."""
    if not isinstance(name, str) or not name.strip():
        return False
    return ":" not in name and len(name.splitlines()) <= 1


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def measures_of(values: Mapping[str, Iterable[Value]]) -> dict[str, Measure]:
    """The measures of runs (name of a run -> its values) by name: those of this project in the
    order of :data:`MEASURES`, then the others.

    Raises:
        UserError: two runs do not agree on a measure.
    """
    found: dict[str, Measure] = {}
    origin: dict[str, str] = {}
    for run, of_run in values.items():
        for value in of_run:
            measure = found.setdefault(value.measure.name, value.measure)
            first = origin.setdefault(measure.name, run)
            if measure != value.measure:
                raise UserError(
                    f"{first} and {run} do not agree on '{measure.name}': in {FILE}, better and "
                    "margin of a measure must be the same in all runs"
                )
    known = {name: measure for name, measure in MEASURES.items() if name in found}
    return known | found
