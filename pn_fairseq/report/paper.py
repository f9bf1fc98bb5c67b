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
