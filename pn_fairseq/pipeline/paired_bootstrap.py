"""The paired bootstrap: the significance of differences between decoded runs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sacrebleu.metrics.base import Metric as SacrebleuMetric
from sacrebleu.significance import PairedTest, Result

from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import read_lines
from pn_fairseq.pipeline.metrics import METRICS, Scoring
from pn_fairseq.pipeline.translation_scores import check_same_length, read_scores

#: Default number of resamples of the paired bootstrap, as in sacrebleu.
RESAMPLES = 1000


class Comparison(NamedTuple):
    """The result of :func:`paired_bootstrap`: a metric's signature, and name of a system -> its
    result.

    A result contains the ``score`` on the whole text, the ``mean`` of the scores over the
    resamples, half the width of their 95% confidence interval, ``ci``, and the ``p_value`` of no
    difference from the baseline, which is the first system and has no p. p is 1 if on every
    resample both systems score the same.
    """

    signature: str
    results: dict[str, Result]


def p_text(p: float) -> str:
    """A p-value as it is printed everywhere."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def paired_bootstrap(
    systems: Mapping[str, Sequence[str]],
    reference: Sequence[str],
    metric: SacrebleuMetric,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Test whether each system differs from the first, the baseline, by more than the choice of
    test sentences.

    Paired bootstrap resampling (Koehn 2004, "Statistical significance tests for machine translation
    evaluation") by sacrebleu's ``PairedTest``: both systems get the same resampled sentences. With
    the difference ``d`` of scores on the whole text, and ``d_b`` on the b-th set, ``p = (1 + #{b:
    |d_b| - mean(|d_b|) > |d|}) / (1 + resamples)``. If ``d`` is large compared with the spread of
    ``d_b``, this is the area under one tail: a two-sided p would be twice as large. If ``d`` is 0,
    p is about 0.42, and not 1. The test does not cover the variation over training seeds. It needs
    about 80 bytes of memory for each sentence and resample. The seed is sacrebleu's, 12345 or
    SACREBLEU_SEED.

    Args:
        systems: name -> hypotheses; the baseline first.
        reference: a line for each sentence.
        metric: a metric from :attr:`.Metric.compute`.
        resamples: number of resampled sets.
    """
    check_same_length(systems, reference)
    signatures, table = PairedTest(
        list(systems.items()), {"": metric}, [reference], "bs", n_samples=resamples
    )()
    ((key, signature),) = signatures.items()
    results = table[key]
    for result in results[1:]:
        # If no resample makes a difference, sacrebleu's formula returns its smallest p.
        first = results[0]
        if (result.score, result.mean, result.ci) == (first.score, first.mean, first.ci):
            result.p_value = 1.0
    return Comparison(str(signature), dict(zip(systems, results, strict=True)))


def compare_folders(
    folders: Mapping[str, Path], resamples: int = RESAMPLES
) -> dict[str, Comparison]:
    """:func:`paired_bootstrap` for decodings that :func:`score_run` has scored, by each metric for
    which all of them have a score.

    ``folders`` maps the name of a system to its folder, the baseline first. All systems must have
    translated the same text and be scored in the same way.
    """
    scores = {name: read_scores(folder) for name, folder in folders.items()}
    first, expected = next(iter(scores.items()))
    metrics = list(METRICS)
    for of_system in scores.values():
        metrics = [name for name in metrics if name in of_system.by_metric]
    for system, of_system in scores.items():
        for kind in ("ref.tok", "ref.txt"):
            one, other = folders[first] / kind, folders[system] / kind
            if one.read_bytes() != other.read_bytes():
                where = f"{kind} in {folders[first]} and {folders[system]}"
                raise UserError(f"{first} and {system} translate different text ({where})")
        for name in metrics:
            usual, own = expected.by_metric[name].signature, of_system.by_metric[name].signature
            if usual != own:
                raise UserError(
                    f"{first} and {system} were scored in different ways: {usual} and {own}"
                )
    scoring = Scoring(
        expected.lowercase, expected.target, expected.by_metric["tokenized"].compound_split
    )
    comparisons = {}
    for name in metrics:
        kind = "tok" if METRICS[name].on_tokens else "txt"
        systems = {system: read_lines(folder / f"hyp.{kind}") for system, folder in folders.items()}
        reference = read_lines(folders[first] / f"ref.{kind}")
        comparison = paired_bootstrap(systems, reference, METRICS[name].compute(scoring), resamples)
        # The detokenizer is named as in the scores.
        note = re.search(r"(\|detok:.*)?$", expected.by_metric[name].signature)[0]
        comparisons[name] = comparison._replace(signature=comparison.signature + note)
    return comparisons
