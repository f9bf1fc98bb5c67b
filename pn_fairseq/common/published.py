"""The published numbers that experiments are compared with, by table: the one place for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_POWERNORM = "Shen et al., PowerNorm: Rethinking Batch Normalization in Transformers, ICML 2020"
_ADANORM = "Xu et al., Understanding and Improving Layer Normalization, NeurIPS 2019"


#: Settings of rows, where a run does not have them.
_DEFAULTS = {"decoder_norm": "layer", "norm_variant": "paper"}


@dataclass(frozen=True)
class Row:
    """A row of a table."""

    label: str  # the model, as the table calls it
    norm: str  # a key of pn_fairseq.norms.NORMS
    bleu: float | None  # tokenized BLEU; None where the table has none
    settings: Mapping[str, str] = field(default_factory=dict)  # of the model, in addition to the architecture, as text

    def missing(self, settings: Mapping[str, object]) -> list[str]:
        """Those of the row's settings, as ``model.key=value``, that a run with ``settings`` does not have."""
        return [
            f"model.{key}={value}"
            for key, value in self.settings.items()
            if str(settings.get(f"model.{key}", _DEFAULTS.get(key))) != value
        ]


@dataclass(frozen=True)
class Table:
    """A published table, the column of one corpus."""

    title: str  # the corpus
    config: str  # the file in configs/ that its rows are trained with
    source: str  # paper and table, and what has to be known of all its numbers
    data: Mapping[str, str]  # in the settings of prepared data: languages, case, merge operations of the joint BPE
    sentences: int  # size of the test set
    measure: str  # which BLEU it is
    rows: tuple[Row, ...]  # in the table's order
    compound_split: bool = False  # whether compounds were split for it
    note: str = ""  # what else a reader has to know

    def row(self, norm: str, settings: Mapping[str, object]) -> Row | None:
        """The row of a system with the encoder norm ``norm``; of several, the one whose settings the system has."""
        rows = [row for row in self.rows if row.norm == norm]
        if len(rows) > 1:
            rows = [row for row in rows if not row.missing(settings)]
        return rows[0] if rows else None


#: In the tables of the PowerNorm paper the encoder has the norm and the decoder has LN. Where the released code says
#: how a row was computed, that is followed. The paper has layer-scale "in each model setting"; the released BN has one
#: group of it, which is taken for BRN and MABN, too. It would change neither LN nor, with a group per head, GN.
_RELEASE = {"norm_variant": "release"}
_ONE_GROUP = {"layer_scale_groups": "1"}
_PN_ROWS = {
    "LN": ("layer", {}),
    "BN": ("batch", _RELEASE),
    "PN-V": ("power-v", {}),
    "PN": ("power", _RELEASE),
    "BRN": ("batch-renorm", _ONE_GROUP),
    "MABN": ("mabn", _ONE_GROUP),
    "GN": ("group", {}),
}


def _powernorm(**bleu: float) -> tuple[Row, ...]:
    values = {name.replace("_", "-"): value for name, value in bleu.items()}
    found = ((name, *_PN_ROWS[name], value) for name, value in values.items())
    return tuple(Row(f"Transformer {name}", norm, value, settings) for name, norm, settings, value in found)


def _everywhere(norm: str, **more: str) -> dict[str, str]:
    """In the AdaNorm paper every norm of encoder and decoder is replaced."""
    return {"decoder_norm": norm, **more}


_WITHOUT = Row("w/o Norm", "none", 34.0, _everywhere("none"))
_LN = Row("LayerNorm", "layer", 35.5, _everywhere("layer"))
_SIMPLE = Row("LayerNorm-simple", "layer-simple", 35.5, _everywhere("layer-simple"))
_DETACH = Row("DetachNorm", "detach", 33.9, _everywhere("detach"))
_DETACH_MEAN = Row("Detach Mean", "detach", 35.6, _everywhere("detach", **{"norm_options.detach": "mean"}))
_DETACH_STD = Row("Detach Variance", "detach", 34.2, _everywhere("detach", **{"norm_options.detach": "std"}))
_ADA = Row("AdaNorm", "ada", 35.6, _everywhere("ada", **{"norm_options.ada.ada_scale": "2.0"}))

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


LM_SOURCE = (
    'Shen et al., PowerNorm, ICML 2020, Tables 2 and 3 (perplexity; "*": run by its authors; one number each); the '
    "others there are of Inan et al. 2017, Yang et al. 2018, Baevski & Auli 2019, Dai et al. 2019 and Ma et al. 2019"
)
#: What ``pn report --paper`` calls these corpora.
LM_NAMES = {"ptb": "PTB", "wikitext103": "WikiText-103"}
#: A note on every published perplexity.
LM_SENTENCE = (
    "Published perplexities of the tensorized transformer (Ma et al. 2019, and PowerNorm, which takes its code as a "
    "base) are not perplexities of causal language models: in the code that is public the causal mask is built "
    "and never used, so that each position sees the tokens that it predicts. Whether the PowerNorm authors' own code, "
    "which is not public, differs is not known. The models here are causal unless a row says otherwise."
)
#: Corpus -> tokens of validation and test, ends of lines included.
LM_TOKENS = {"PTB": {"valid": 73760, "test": 82430}, "WikiText-103": {"valid": 217646, "test": 245569}}
#: Corpus -> model -> (validation, test), as the tables have them, errors included (docs/language_modeling.md).
LM_PAPER: dict[str, dict[str, tuple[float | None, float]]] = {
    "PTB": {
        "Tied-LSTM": (75.7, 48.7),
        "AWD-LSTM-MoS": (58.1, 56.0),
        "Adaptive Input": (59.1, 57.0),
        "Transformer-XL base": (56.7, 54.5),
        "Tensorized transformer, core-1 (Ma)": (55.4, 57.9),
        "Tensorized transformer, core-2 (Ma)": (54.3, 49.8),
        "core-1 + LN *": (58.0, 53.2),
        "core-1 + BN *": (71.7, 60.7),
        "core-1 + PN-V *": (59.7, 55.3),
        "core-1 + PN *": (51.6, 47.6),
        "core-1 + BRN * (Table 4)": (None, 58.3),
        "core-1 + MABN * (Table 4)": (None, 57.2),
        "core-1 + GN * (Table 4)": (None, 51.7),
    },
    "WikiText-103": {
        "Tied-LSTM": (None, 48.7),
        "AWD-LSTM-MoS": (29.0, 29.2),
        "Adaptive Input": (19.8, 20.5),
        "Transformer-XL base": (23.1, 24.0),
        "Transformer-XL large": (None, 18.3),
        "Tensorized transformer, core-1 (Ma)": (23.6, 20.9),
        "Tensorized transformer, core-2 (Ma)": (19.7, 18.9),
        "core-1 + LN *": (22.7, 20.9),
        "core-1 + BN *": (28.4, 27.2),
        "core-1 + PN-V *": (23.6, 21.3),
        "core-1 + PN *": (18.3, 17.9),
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
