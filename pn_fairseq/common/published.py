"""The published numbers that ``pn reproduce --table`` and ``pn report`` take, by table: the one place for them."""

from __future__ import annotations

import math
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
    bleu: float | None  # tokenized BLEU; None where the table has none, NaN where it says that the training diverges
    settings: Mapping[str, str] = field(default_factory=dict)  # of the model, in addition to the architecture, as text

    def missing(self, settings: Mapping[str, object]) -> list[str]:
        """Those of the row's settings, as ``model.key=value``, that a run with ``settings`` does not have."""
        return [
            f"model.{key}={value}"
            for key, value in self.settings.items()
            if str(settings.get(f"model.{key}", _DEFAULTS.get(key))) != value
        ]


@dataclass(frozen=True)
class Rows:
    """Rows of a published table that are trained with one configuration."""

    config: str  # the file in configs/
    rows: tuple[Row, ...]  # in the table's order


@dataclass(frozen=True, kw_only=True)
class Table(Rows):
    """A published table, the column of one corpus."""

    title: str  # the corpus
    source: str  # paper and table, and what has to be known of all its numbers
    data: Mapping[str, str]  # in the settings of prepared data: languages, case, merge operations of the joint BPE
    sentences: int  # size of the test set
    measure: str  # which BLEU it is
    compound_split: bool = False  # whether compounds were split for it
    note: str = ""  # what else a reader has to know
    cited: Mapping[str, float] = field(default_factory=dict)  # rows that the table takes from other papers -> BLEU

    def row(self, norm: str, settings: Mapping[str, object]) -> Row | None:
        """The row of a system with the encoder norm ``norm``; of several, the one whose settings the system has."""
        rows = [row for row in self.rows if row.norm == norm]
        if len(rows) > 1:
            rows = [row for row in rows if not row.missing(settings)]
        return max(rows, key=lambda row: len(row.settings), default=None)


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
#: The rows as the text has them: Algorithms 1 and 2, and layer-scale of one group where no number is given.
_TEXT_ROWS = {**_PN_ROWS, "BN": ("batch", _ONE_GROUP), "PN": ("power", {})}
#: "For BN big (not PN big) we use the synchronized version" (appendix A.1); PN-V is synchronized by default.
_BIG_ROWS = {**_PN_ROWS, "BN": ("batch", {**_RELEASE, "norm_sync": "on"})}


def _powernorm(rows: Mapping[str, tuple[str, Mapping]] = _PN_ROWS, **bleu: float) -> tuple[Row, ...]:
    values = {name.replace("_", "-"): value for name, value in bleu.items()}
    found = ((name, *rows[name], value) for name, value in values.items())
    return tuple(Row(f"Transformer {name}", norm, value, settings) for name, norm, settings, value in found)


_DIVERGES = math.nan
#: Rows of the AdaNorm paper: norm, its options, BLEU on De-En, En-Vi and En-De.
_ADA_ROWS = {
    "w/o Norm": ("none", {}, (34.0, 28.4, _DIVERGES)),
    "LayerNorm": ("layer", {}, (35.5, 31.2, 28.3)),
    "LayerNorm-simple": ("layer-simple", {}, (35.5, 31.6, 28.4)),
    "DetachNorm": ("detach", {}, (33.9, 27.7, _DIVERGES)),
    "Detach Mean": ("detach", {"norm_options.detach": "mean"}, (35.6, 31.3, 28.3)),
    "Detach Variance": ("detach", {"norm_options.detach": "std"}, (34.2, 29.8, _DIVERGES)),
    "AdaNorm": ("ada", {}, (35.6, 31.4, 28.5)),
}
#: Its tables: number -> rows.
_ADA_TABLES = {
    1: ("w/o Norm", "LayerNorm", "LayerNorm-simple"),
    2: ("w/o Norm", "DetachNorm", "LayerNorm-simple"),
    3: ("LayerNorm-simple", "Detach Mean", "Detach Variance"),
    4: ("w/o Norm", "LayerNorm", "LayerNorm-simple", "AdaNorm"),
}


def _adanorm(number: int, column: int, scale: str, last: bool = False) -> tuple[Row, ...]:
    """Rows of a table, with ``scale`` as AdaNorm's C. Every norm of encoder and decoder is replaced.

    ``last``: only the norms after the last layers are, as in the authors' public code, and the others are LN.
    """
    rows = []
    for label in _ADA_TABLES[number]:
        norm, options, bleu = _ADA_ROWS[label]
        settings = {"decoder_norm": "layer" if last else norm, **options}
        if last and norm != "layer":
            settings |= {"encoder_norm_last": norm, "decoder_norm_last": norm}
        if norm == "ada":
            settings |= {"norm_options.ada.ada_scale": scale, **(_RELEASE if last else {})}
        rows.append(Row(label, "layer" if last else norm, bleu[column], settings))
    return tuple(rows)


_IWSLT14 = {
    "title": "IWSLT14 German-English",
    "data": {"source": "de", "target": "en", "lower": "1", "bpe": "10000"},
    "sentences": 6750,
    "measure": "tokenized BLEU, case-insensitive (the data is lower-cased)",
}
_IWSLT15 = {
    "title": "IWSLT15 English-Vietnamese",
    "data": {"source": "en", "target": "vi", "lower": "0", "bpe": "10000", "separate_dictionaries": "1"},
    "sentences": 1268,
    "measure": "tokenized BLEU (the paper does not say whether case counts)",
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
_ADA_NOTE = "In the authors' public code the norms inside the layers stay LN (docs/norms.md)."
#: The upper rows of Table 1: IWSLT14 and WMT14.
_CITED = {
    "Transformer (Vaswani et al. 2017)": (34.4, 28.4),
    "DS-Init (Zhang et al. 2019a)": (34.4, 29.1),
    "Fixup-Init (Zhang et al. 2019b)": (34.5, 29.3),
    "Scaling NMT (Ott et al. 2018)": (None, 29.3),
    "Dynamic Conv (Wu et al. 2019)": (35.2, 29.7),
    "Transformer + LayerDrop (Fan et al. 2020)": (None, 29.6),
}
_TABLE_1 = {
    "source": f"{_POWERNORM}, Table 1 {_PN_SOURCE}",
    "note": _PN_V_NOTE,
    "cited": {name: small for name, (small, _) in _CITED.items() if small},
    **_IWSLT14,
}
_TABLE_4 = {
    "source": f"{_POWERNORM}, Table 4 in the appendix of arXiv 2003.07845 {_PN_SOURCE}",
    "note": _PN_V_NOTE + " The paper gives no settings of BRN and MABN.",
    **_IWSLT14,
}
_SCORES_1 = {"LN": 35.5, "BN": 34.4, "PN-V": 35.5, "PN": 35.9}
_SCORES_4 = {"BN": 34.4, "BRN": 34.7, "MABN": 34.9, "LN": 35.5, "GN": 35.7, "PN-V": 35.5, "PN": 35.9}

#: By name. Data is recognised as that of the first table with the same data.
PAPER: dict[str, Table] = {
    "powernorm-1": Table(config="iwslt14_de_en", rows=_powernorm(**_SCORES_1), **_TABLE_1),
    "powernorm-1-paper": Table(config="iwslt14_de_en_paper", rows=_powernorm(_TEXT_ROWS, **_SCORES_1), **_TABLE_1),
    "powernorm-1-wmt14": Table(
        config="wmt14_en_de_big",
        source=f"{_POWERNORM}, Table 1 {_PN_SOURCE}",
        rows=_powernorm(_BIG_ROWS, LN=29.5, BN=28.1, PN_V=28.5, PN=30.1),
        cited={name: big for name, (_, big) in _CITED.items()},
        **_WMT14,
    ),
    "powernorm-4": Table(config="iwslt14_de_en", rows=_powernorm(**_SCORES_4), **_TABLE_4),
    "powernorm-4-paper": Table(config="iwslt14_de_en_paper", rows=_powernorm(_TEXT_ROWS, **_SCORES_4), **_TABLE_4),
    **{
        f"adanorm-{number}{'-code' if last else ''}{suffix}": Table(
            config=config,
            source=f"{_ADANORM}, Table {number} {_ADA_SOURCE}",
            rows=_adanorm(number, column, scale, last),
            note=_ADA_NOTE,
            **corpus,
        )
        for column, (suffix, config, scale, corpus) in enumerate(
            (
                ("", "iwslt14_de_en_adanorm", "2.0", _IWSLT14),
                ("-iwslt15", "iwslt15_en_vi_adanorm", "1.0", _IWSLT15),
                ("-wmt14", "wmt14_en_de_big_adanorm", "2.0", _WMT14),
            )
        )
        for number in _ADA_TABLES
        for last in (False, True)
    },
}


LM_SOURCE = (
    'Shen et al., PowerNorm, ICML 2020, Tables 2 and 3 (perplexity; "*": run by its authors; one number each); the '
    "others there are of Inan et al. 2017, Yang et al. 2018, Baevski & Auli 2019, Dai et al. 2019 and Ma et al. 2019"
)
#: What ``pn report --paper`` calls these corpora.
LM_NAMES = {"ptb": "PTB", "wikitext103": "WikiText-103", "enwik8": "enwik8"}
#: Corpora whose numbers are not perplexities of :data:`LM_SOURCE`: the measure, and the source.
LM_OTHERS = {
    "enwik8": (
        "bits per byte",
        f"{_ADANORM}, Tables 1 to 4: Transformer-XL, which reads a memory of 512 tokens before each block; the models "
        "here have no memory",
    )
}
#: A note on every published perplexity.
LM_SENTENCE = (
    "Published perplexities of the tensorized transformer (Ma et al. 2019, and PowerNorm, which takes its code as a "
    "base) are not perplexities of causal language models: in the code that is public the causal mask is built "
    "and never used, so that each position sees the tokens that it predicts. Whether the PowerNorm authors' own code, "
    "which is not public, differs is not known. The models here are causal unless this page says otherwise."
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
    "enwik8": {
        "w/o Norm": (None, 1.04),
        "LayerNorm": (None, 1.07),
        "LayerNorm-simple": (None, 1.07),
        "DetachNorm": (None, 1.12),
        "Detach Mean": (None, 1.07),
        "Detach Variance": (None, 1.10),
        "AdaNorm": (None, 1.07),
    },
}


def _language_models(config: str, *labels: str) -> Rows:
    known = {**_TEXT_ROWS, **{label: row[:2] for label, row in _ADA_ROWS.items()}}
    return Rows(config, tuple(Row(label, known[label][0], None, known[label][1]) for label in labels))


#: Rows of language models. Those of the PowerNorm paper are as the text has them: no code was released.
LM_TABLES: dict[str, Rows] = {
    **{
        f"powernorm-{number}-{corpus}{suffix}": _language_models(f"{corpus}_lm{suffix.replace('-', '_')}", *labels)
        for number, corpus, labels in (
            (2, "ptb", ("LN", "BN", "PN-V", "PN")),
            (2, "wikitext103", ("LN", "BN", "PN-V", "PN")),
            (4, "ptb", _SCORES_4),
        )
        for suffix in ("", "-paper")
    },
    **{f"adanorm-{number}-enwik8": _language_models("enwik8_lm", *rows) for number, rows in _ADA_TABLES.items()},
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
