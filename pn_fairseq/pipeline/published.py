"""Published scores, for ``--table`` and ``pn report``: the tables in data/published.yaml, and a
user's file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from pn_fairseq.common.command import UserError, did_you_mean
from pn_fairseq.common.files import shipped

#: Values of the settings of rows that a run lacks.
_DEFAULTS = {
    "decoder_norm": "layer",
    "norm_variant": "paper",
    "encoder_norm_placement": "pre",
    "decoder_norm_placement": "pre",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table."""

    label: str  # the model, as the table calls it
    norm: str  # a key of pn_fairseq.norms.NORMS
    # tokenized BLEU; None if the table has none, NaN if it reports divergence
    bleu: float | None = None
    # settings of the model, in addition to the architecture, as text
    settings: Mapping[str, str] = field(default_factory=dict)
    signature: str = ""  # how the score was computed, and its parts

    def missing(self, settings: Mapping[str, object]) -> list[str]:
        """The row's settings, as ``model.key=value``, that a run with ``settings`` lacks."""
        absent = []
        for key, value in self.settings.items():
            of_run = settings.get(f"model.{key}")
            if of_run in (None, ""):
                of_run = _DEFAULTS.get(key)
            if str(of_run) != value:
                absent.append(f"model.{key}={value}")
        return absent


@dataclass(frozen=True, kw_only=True)
class Table:
    """A published table, the column of one corpus."""

    rows: tuple[Row, ...]  # in the table's order
    config: str = ""  # the file in configs/ with which --table trains the rows
    title: str = ""  # the corpus
    source: str = ""  # paper and table, and what a reader must know about all its numbers
    measure: str = "tokenized BLEU"  # which BLEU it is
    # settings of the prepared data: languages, case, BPE, ...
    data: Mapping[str, str] = field(default_factory=dict)
    sentences: int | None = None  # size of the test set
    training: int | None = None  # pairs of the training set
    compound_split: bool = False  # whether compounds were split for it
    exact: bool = False  # a row is shown only beside systems with all of its settings
    note: str = ""  # what else a reader must know
    # rows that the table takes from other papers -> BLEU
    cited: Mapping[str, float] = field(default_factory=dict)

    def has_larger_training_set(self, training: float | None) -> bool:
        """Whether ``training`` pairs (None: unknown) are only a part of the corpus."""
        return None not in (training, self.training) and training < 0.9 * self.training

    def row(self, norm: str, settings: Mapping[str, object]) -> Row | None:
        """The row of a system with the encoder norm ``norm``; if there are several, the row with
        the system's settings.
        """
        rows = [row for row in self.rows if row.norm == norm]
        if len(rows) > 1 or self.exact:
            rows = [row for row in rows if not row.missing(settings)]
        return max(rows, key=lambda row: len(row.settings), default=None)


def _made(kind: type, values: object, where: str):
    """A row or a table from a file; every key must be a field, and no field without a default may
    be missing.
    """
    fields = {declared.name: declared for declared in dataclasses.fields(kind)}
    if not isinstance(values, dict):
        raise UserError(f"{where} is not a mapping of {', '.join(fields)}")
    for key in values:
        if key not in fields:
            raise UserError(f"{where}: unknown key '{key}'{did_you_mean(str(key), fields)}")
    for name, declared in fields.items():
        required = declared.default is declared.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise UserError(f"{where} has no '{name}'")
    values = dict(values)
    for name in ("settings", "data"):
        if name in values:
            values[name] = {key: str(value) for key, value in values[name].items()}
    return kind(**values)


def _table(values: object, where: str) -> Table:
    rows = values.get("rows") if isinstance(values, dict) else None
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{where} has no list of rows")
    made = tuple(_made(Row, row, f"{where}, row {number}") for number, row in enumerate(rows, 1))
    return _made(Table, {**values, "rows": made}, where)


def read_table(file: Path) -> Table:
    """The table in a user's file.

    Raises:
        UserError: the file does not have this form.
    """
    try:
        return _table(yaml.safe_load(file.read_text("utf-8")), str(file))
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError, TypeError) as error:
        raise UserError(
            f"{file} cannot be read as a published table ({' '.join(str(error).split())})"
        ) from error


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CONTENT = yaml.load(shipped("data/published.yaml").read_text("utf-8"), _LOADER)


def _tables(section: str) -> dict[str, Table]:
    tables = {}
    for name, values in _CONTENT[section].items():
        corpus = _CONTENT["corpora"].get(values.pop("corpus", None), {})
        tables[name] = _table({**corpus, **values}, name)
    return tables


#: Tables by name. Data is recognised as that of the first table with the same data.
PAPER = _tables("tables")
#: Rows of language models, by name.
LM_TABLES = _tables("language_model_tables")
#: What ``pn report --paper`` calls a corpus -> what is published for language models: name,
#: measure, source, note, tokens of each split, and rows (model -> validation, test).
LM_PAPER: dict[str, dict] = _CONTENT["language_models"]
#: Numbers of the PowerNorm paper's Figures 2 to 7.
_FIGURES = _CONTENT["figures"]
PAPER_MEDIANS, PAPER_BLEU, PAPER_GAIN = _FIGURES["medians"], _FIGURES["bleu"], _FIGURES["gain"]
PAPER_SPECTRA, SPECTRA_INDICES = _FIGURES["spectra"], _FIGURES["spectra_indices"]


def recognise(data: Mapping[str, str], sentences: int | None, training: float | None) -> str | None:
    """The first table of :data:`PAPER` with the same data as the prepared data, or None.

    Settings and sizes must be the same: other corpora share the languages, and results on a part of
    a corpus cannot be compared. Only the training set, whose size depends on the tokenizer, may be
    larger, or up to 10% smaller.

    Args:
        data: settings of the prepared data.
        sentences: size of the test set; None if unknown.
        training: pairs of the training set; None if their number is unknown.
    """
    for name, table in PAPER.items():
        same = sentences == table.sentences and data.items() >= table.data.items()
        if same and not table.has_larger_training_set(training):
            return name
    return None
