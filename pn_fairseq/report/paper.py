"""The published numbers that experiments are compared with, by table: the one place for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_POWERNORM = "Shen et al., PowerNorm: Rethinking Batch Normalization in Transformers, ICML 2020"
_ADANORM = "Xu et al., Understanding and Improving Layer Normalization, NeurIPS 2019"


#: Settings of rows, where a run does not have them.
_DEFAULTS = {"model.decoder_norm": "layer", "model.norm_variant": "paper"}


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        label: the model, as the table calls it.
        norm: a key of :data:`pn_fairseq.norms.NORMS`.
        bleu: tokenized BLEU; None where the table has none.
        settings: of ``scripts/train.sh`` beside the architecture, as text.
        suffix: what tells its runs from others with the same norm.
    """

    label: str
    norm: str
    bleu: float | None
    settings: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""

    def missing(self, settings: Mapping[str, object]) -> list[str]:
        """Those of the row's settings, as ``key=value``, that a run with ``settings`` does not have."""
        return [
            f"{key}={value}"
            for key, value in self.settings.items()
            if str(settings.get(key, _DEFAULTS.get(key))) != value
        ]


@dataclass(frozen=True)
class Table:
    """A published table, the column of one corpus.

    Attributes:
        title: the corpus.
        config: the file in ``configs/`` that its rows are trained with.
        source: paper and table, and what has to be known of all its numbers.
        data: what the settings of prepared data say: languages, case, merge operations of the joint BPE.
        sentences: size of the test set.
        measure: which BLEU it is.
        rows: in the table's order.
        compound_split: whether compounds were split for it.
        note: what else a reader has to know; may be empty.
    """

    title: str
    config: str
    source: str
    data: Mapping[str, str]
    sentences: int
    measure: str
    rows: tuple[Row, ...]
    compound_split: bool = False
    note: str = ""

    def row(self, norm: str, settings: Mapping[str, object]) -> Row | None:
        """The row of a system with the encoder norm ``norm``; of several, the one whose settings the system has."""
        rows = [row for row in self.rows if row.norm == norm]
        if len(rows) > 1:
            rows = [row for row in rows if not row.missing(settings)]
        return rows[0] if rows else None


#: In the tables of the PowerNorm paper the encoder has the norm and the decoder has LN. Where the released code says
#: how a row was computed, that is followed. The paper has layer-scale "in each model setting"; the released BN has one
#: group of it, which is taken for BRN and MABN, too. It would change neither LN nor, with a group per head, GN.
_RELEASE = {"model.norm_variant": "release"}
_ONE_GROUP = {"model.layer_scale_groups": "1"}
_PN_ROWS = {"LN": ("layer", {}, ""), "BN": ("batch", _RELEASE, "-release"), "PN-V": ("power-v", {}, "")} | {
    "PN": ("power", _RELEASE, "-release"),
    "BRN": ("batch-renorm", _ONE_GROUP, "-ls1"),
    "MABN": ("mabn", _ONE_GROUP, "-ls1"),
    "GN": ("group", {}, ""),
}


def _powernorm(**bleu: float) -> tuple[Row, ...]:
    found = []
    for name, value in bleu.items():
        norm, settings, suffix = _PN_ROWS[name.replace("_", "-")]
        found.append(Row(f"Transformer {name.replace('_', '-')}", norm, value, settings, suffix))
    return tuple(found)


def _everywhere(norm: str, **more: str) -> dict[str, str]:
    """In the AdaNorm paper every norm of encoder and decoder is replaced."""
    return {"model.decoder_norm": norm} | {f"model.{name}": value for name, value in more.items()}


_WITHOUT = Row("w/o Norm", "none", 34.0, _everywhere("none"))
_LN = Row("LayerNorm", "layer", 35.5, _everywhere("layer"))
_SIMPLE = Row("LayerNorm-simple", "layer-simple", 35.5, _everywhere("layer-simple"))
_DETACH = Row("DetachNorm", "detach", 33.9, _everywhere("detach"))
_DETACH_MEAN = Row("Detach Mean", "detach", 35.6, _everywhere("detach", norm_detach="mean"), "-mean")
_DETACH_STD = Row("Detach Variance", "detach", 34.2, _everywhere("detach", norm_detach="std"), "-std")
_ADA = Row("AdaNorm", "ada", 35.6, _everywhere("ada", ada_scale="2.0"))

_IWSLT14 = {
    "title": "IWSLT14 German-English",
    "data": {"source": "de", "target": "en", "lower": "1", "bpe": "10000"},
    "sentences": 6750,
    "measure": "tokenized BLEU, case-insensitive (the data is lower-cased)",
}
_WMT14 = {
    "title": "WMT14 English-German",
    "data": {"source": "en", "target": "de", "lower": "0", "bpe": "32764"},
    "sentences": 3003,
    "measure": "tokenized BLEU, case-sensitive, with compound splitting (##AT##-##AT##)",
    "compound_split": True,
}
_PN_V_NOTE = "PN-V is 35.5 in the paper's tables and 35.4 in its text."
_PN_SOURCE = "(pre-norm transformers; one number each, without a standard deviation)"
_ADA_SOURCE = "(pre-norm transformers, each norm in encoder and decoder; one number each, without a standard deviation)"

#: By name. Data is recognised as that of the first table with the same data.
PAPER: dict[str, Table] = {
    "powernorm-1": Table(
        config="iwslt14_de_en",
        source=f"{_POWERNORM}, Table 1 {_PN_SOURCE}",
        rows=_powernorm(LN=35.5, BN=34.4, PN_V=35.5, PN=35.9),
        note=_PN_V_NOTE,
        **_IWSLT14,
    ),
    "powernorm-1-wmt14": Table(
        config="wmt14_en_de_big",
        source=f"{_POWERNORM}, Table 1 {_PN_SOURCE}",
        rows=_powernorm(LN=29.5, BN=28.1, PN_V=28.5, PN=30.1),
        **_WMT14,
    ),
    "powernorm-4": Table(
        config="iwslt14_de_en",
        source=f"{_POWERNORM}, Table 4 in the appendix of arXiv 2003.07845 {_PN_SOURCE}",
        rows=_powernorm(BN=34.4, BRN=34.7, MABN=34.9, LN=35.5, GN=35.7, PN_V=35.5, PN=35.9),
        note=_PN_V_NOTE + " The paper gives no settings of BRN and MABN.",
        **_IWSLT14,
    ),
    **{
        f"adanorm-{number}": Table(
            config="iwslt14_de_en_adanorm", source=f"{_ADANORM}, Table {number} {_ADA_SOURCE}", rows=rows, **_IWSLT14
        )
        for number, rows in {
            1: (_WITHOUT, _LN, _SIMPLE),
            2: (_WITHOUT, _DETACH, _SIMPLE),
            3: (_SIMPLE, _DETACH_MEAN, _DETACH_STD),
            4: (_WITHOUT, _LN, _SIMPLE, _ADA),
        }.items()
    },
}


def recognise(data: Mapping[str, str], sentences: int | None) -> str | None:
    """The first of :data:`PAPER` whose data the prepared data is, or None.

    Settings and size must all be the same: other corpora share the languages, and a part of one cannot be compared.

    Args:
        data: settings of the prepared data.
        sentences: size of the test set; None if it is not known.
    """
    for name, table in PAPER.items():
        if sentences == table.sentences and all(data.get(key) == value for key, value in table.data.items()):
            return name
    return None


def print_rows(corpus: str) -> None:
    """For scripts/lib/reproduce.sh: a line for each row of each table of a corpus, in words: the table, its file in
    ``configs/``, the name of the row's runs, the abbreviation of its norm, and its settings.

    Args:
        corpus: the corpus' file in ``configs/``, which the names of the tables' files begin with.
    """
    from pn_fairseq.norms import NORMS

    for name, table in PAPER.items():
        if table.config.startswith(corpus):
            for row in table.rows:
                short = NORMS[row.norm].short
                settings = [f"{key}={value}" for key, value in row.settings.items()]
                print(name, table.config, short + row.suffix, short, *settings)
