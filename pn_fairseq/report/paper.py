"""The numbers that the experiments are compared with. The one place for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SOURCE = (
    "Shen et al., PowerNorm: Rethinking Batch Normalization in Transformers, ICML 2020, Table 1 (pre-norm "
    "transformers; one number each, without a standard deviation)"
)


@dataclass(frozen=True)
class PaperResult:
    """What the paper reports for one corpus, and how prepared data of that corpus is recognised.

    Attributes:
        title: the corpus.
        data: what the data's settings say: languages, case, merge operations of the joint BPE.
        sentences: size of the test set.
        bleu: norm, as reports call it -> tokenized BLEU in Table 1.
        measure: which BLEU it is.
        compound_split: whether compounds were split for it.
        note: what else a reader has to know; may be empty.
    """

    title: str
    data: Mapping[str, str]
    sentences: int
    bleu: Mapping[str, float]
    measure: str
    compound_split: bool = False
    note: str = ""


PAPER: dict[str, PaperResult] = {
    "iwslt14": PaperResult(
        title="IWSLT14 German-English",
        data={"source": "de", "target": "en", "lower": "1", "bpe": "10000"},
        sentences=6750,
        bleu={"LN": 35.5, "BN": 34.4, "PN-V": 35.5, "PN": 35.9},
        measure="tokenized BLEU, case-insensitive (the data is lower-cased)",
        note="PN-V is 35.5 in the paper's Table 1 and 35.4 in its text.",
    ),
    "wmt14": PaperResult(
        title="WMT14 English-German",
        data={"source": "en", "target": "de", "lower": "0", "bpe": "32764"},
        sentences=3003,
        bleu={"LN": 29.5, "BN": 28.1, "PN-V": 28.5, "PN": 30.1},
        measure="tokenized BLEU, case-sensitive, with compound splitting (##AT##-##AT##)",
        compound_split=True,
    ),
}


LM_SOURCE = (
    'Shen et al., PowerNorm, ICML 2020, Tables 2 and 3 (perplexity; "*": run by its authors; one number each); the '
    "others there are of Inan et al. 2017, Yang et al. 2018, Baevski & Auli 2019, Dai et al. 2019 and Ma et al. 2019"
)
#: What ``pn-report --paper`` calls these corpora.
LM_NAMES = {"ptb": "PTB", "wikitext103": "WikiText-103"}
#: Stands beside every published perplexity.
LM_SENTENCE = (
    "Published perplexities of the tensorized transformer (Ma et al. 2019, and PowerNorm, which takes its code as a "
    "base) cannot be taken for those of causal language models: in the code that is public the causal mask is built "
    "and never used, so that each position sees the tokens that it predicts. Whether the PowerNorm authors' own code, "
    "which is not public, differs is not known. The models here are causal unless a row says otherwise."
)
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
    """The corpus of :data:`PAPER` that prepared data is, or None.

    Settings and size must all be the corpus': others share its languages, and a part of it cannot be compared.

    Args:
        data: settings of the prepared data.
        sentences: size of the test set; None if it is not known.
    """
    for name, paper in PAPER.items():
        if sentences == paper.sentences and all(data.get(key) == value for key, value in paper.data.items()):
            return name
    return None
