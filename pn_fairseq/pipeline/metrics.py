"""The measures of translations that ``pn score`` computes, all of them in :data:`METRICS`.

A number from another program reaches the reports through a file (``report/measures.py``).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric as SacrebleuMetric
from sacrebleu.metrics.base import Signature

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data.languages import language_of


@dataclass(frozen=True)
class Scoring:
    """How texts are scored.

    Attributes:
        lowercase: ignore the case of plain text.
        target: the tag of the language, which chooses sacrebleu's tokenizer (13a for most).
        compound_split: split words with hyphens among tokens (:func:`split_compounds`).
        lowercase_tokens: ignore the case of tokens, A to Z only.
    """

    lowercase: bool = False
    target: str = ""
    compound_split: bool = False
    lowercase_tokens: bool = False


@dataclass(frozen=True)
class Measure:
    """A measure by which runs are compared.

    Attributes:
        name: the column of report.csv, and the key in scores.json.
        title: its name in tables and sentences.
        short: its name in ``pn report --planned SYSTEM:MEASURE``.
        better: "higher" or "lower".
        margin: systems whose whole interval is within this distance of the control are equivalent,
            by a choice of this project. None: differences over seeds are not tested by this
            measure.
    """

    name: str
    title: str
    short: str
    better: str = "higher"
    margin: float | None = None

    @property
    def decimals(self) -> int:
        """How many decimals are shown: one more than the margin has; two without a margin."""
        if self.margin is None:
            return 2
        return max(0, 1 - math.floor(math.log10(self.margin)))

    @property
    def heading(self) -> str:
        """The title at the beginning of a sentence; "chrF2" keeps its small letter."""
        first = self.title.split()[0]
        return self.title if first != first.lower() else self.title[0].upper() + self.title[1:]


@dataclass(frozen=True, kw_only=True)
class Metric(Measure):
    """A measure of hypotheses against references.

    Attributes:
        compute: returns sacrebleu's metric for a :class:`Scoring`. Raises :class:`UserError` if it
            cannot score the language.
        about: what the metric measures, for ``pn score --help``.
        on_tokens: whether it scores tokens as prepared; otherwise plain text.
        symbol: sacrebleu's name for it in a line of scores.
    """

    compute: Callable[[Scoring], SacrebleuMetric]
    about: str
    on_tokens: bool = False
    symbol: str = "BLEU"


def split_compounds(line: str) -> str:
    """Split words at hyphens, as for the WMT14 scores in the literature.

    Perl's ``s{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g``, from fairseq's
    ``scripts/compound_split_bleu.sh``. As Perl reads without ``-C``, ``\\S`` is a byte of UTF-8,
    and matches do not overlap: ``a-b-c`` becomes ``a ##AT##-##AT## b-c``, but ``a-é-c``, whose
    middle has two bytes, is split at both hyphens.
    """
    return re.sub(rb"(\S)-(\S)", rb"\1 ##AT##-##AT## \2", line.encode()).decode()


class TokenizedBLEU(BLEU):
    """BLEU of tokens as Moses' ``multi-bleu.perl`` computes it, with ``-lc`` for ``lowercase``.

    As Perl reads without ``-C``, only ASCII spaces separate tokens, and only A to Z are
    lower-cased.
    """

    def __init__(self, lowercase: bool, compound_split: bool):
        super().__init__(tokenize="none", smooth_method="none", force=True)
        self.ascii_lowercase, self.compound_split = lowercase, compound_split

    def _preprocess_segment(self, sent: str) -> str:
        text = (split_compounds(sent) if self.compound_split else sent).encode()
        tokens = (text.lower() if self.ascii_lowercase else text).split()
        # sacrebleu splits at all Unicode spaces. BLEU depends only on which tokens are equal.
        return " ".join(token.hex() for token in tokens)

    def get_signature(self) -> Signature:
        signature = super().get_signature()
        if self.ascii_lowercase:
            signature.update("case", "lc[ascii]")
        if self.compound_split:
            signature.update("compounds", "split")
        return signature


def _sacrebleu(scoring: Scoring) -> BLEU:
    language = language_of(scoring.target)
    try:
        return BLEU(lowercase=scoring.lowercase, trg_lang=language, force=True)
    except (ImportError, RuntimeError) as error:
        # The tokenizers of Japanese and Korean are separate packages.
        raise UserError(
            f"sacrebleu cannot tokenize '{language}': {' '.join(str(error).split())}"
        ) from error


_ALL = (
    # Papineni et al. 2002: BP * exp(mean of log p_n, n = 1..4) without smoothing; 0 if no n-gram of
    # some order matches.
    Metric(
        "tokenized",
        "tokenized BLEU",
        "bleu",
        margin=0.3,
        on_tokens=True,
        compute=lambda scoring: TokenizedBLEU(scoring.lowercase_tokens, scoring.compound_split),
        about="on the tokens as prepared: the value of multi-bleu and fairseq-generate, and of the "
        "paper",
    ),
    # Post 2018.
    Metric(
        "detokenized",
        "detokenized BLEU",
        "sacrebleu",
        compute=_sacrebleu,
        about="sacreBLEU on plain text, with its signature; case is ignored if the data was "
        "lower-cased",
    ),
    # Popović 2015: the F-score of character n-grams up to 6, in which recall counts twice.
    Metric(
        "chrf",
        "chrF2",
        "chrf",
        margin=0.3,
        symbol="chrF2",
        compute=lambda scoring: CHRF(lowercase=scoring.lowercase),
        about="on plain text, the F-score of character n-grams",
    ),
    # Snover et al. 2006: edits, with shifts of phrases, per 100 words of the reference; tercom's
    # tokens, without case.
    Metric(
        "ter",
        "TER",
        "ter",
        "lower",
        margin=0.3,
        symbol="TER",
        compute=lambda scoring: TER(),
        about="on plain text, edits for each 100 words of the reference; lower is better",
    ),
)

#: The measures of translations by name, in the order in which they are shown.
METRICS = {metric.name: metric for metric in _ALL}
