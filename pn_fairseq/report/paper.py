"""The numbers that the experiments are compared with. The one place for them."""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = (
    "Shen et al., PowerNorm: Rethinking Batch Normalization in Transformers, ICML 2020, Table 1 (pre-norm "
    "transformers; one number each, without a standard deviation)"
)


@dataclass(frozen=True)
class PaperResult:
    """What the paper reports for one corpus, and by what prepared data of that corpus is known.

    Attributes:
        title: the corpus.
        languages: source and target, as fairseq names them.
        lower: whether the data is lower-cased.
        bpe: merge operations of the joint BPE.
        sentences: size of the test set.
        bleu: norm, as reports call it -> tokenized BLEU in Table 1.
        measure: which BLEU it is.
        note: what else a reader has to know; may be empty.
    """

    title: str
    languages: tuple[str, str]
    lower: bool
    bpe: int
    sentences: int
    bleu: dict[str, float]
    measure: str
    note: str = ""


PAPER: dict[str, PaperResult] = {
    "iwslt14": PaperResult(
        title="IWSLT14 German-English",
        languages=("de", "en"),
        lower=True,
        bpe=10000,
        sentences=6750,
        bleu={"LN": 35.5, "BN": 34.4, "PN-V": 35.5, "PN": 35.9},
        measure="tokenized BLEU, case-insensitive (the data is lower-cased)",
        note="PN-V is 35.5 in the paper's Table 1 and 35.4 in its text.",
    ),
    "wmt14": PaperResult(
        title="WMT14 English-German",
        languages=("en", "de"),
        lower=False,
        bpe=32764,
        sentences=3003,
        bleu={"LN": 29.5, "BN": 28.1, "PN-V": 28.5, "PN": 30.1},
        measure="tokenized BLEU, case-sensitive, with compound splitting (##AT##-##AT##)",
    ),
}


def recognise(data: dict[str, str], sentences: int | None) -> str | None:
    """The corpus of :data:`PAPER` that prepared data is, or None.

    The languages, the case, the BPE and the size of the test set must all be the corpus': other corpora share its
    languages, and a cut of it is no ground for a comparison.

    Args:
        data: the ``key=value`` lines of a prepared data directory's ``settings``.
        sentences: size of the test set; None if it is not known.
    """
    for name, paper in PAPER.items():
        expected = {
            "source": paper.languages[0],
            "target": paper.languages[1],
            "lower": str(int(paper.lower)),
            "bpe": str(paper.bpe),
        }
        if all(data.get(key) == value for key, value in expected.items()) and sentences == paper.sentences:
            return name
    return None
