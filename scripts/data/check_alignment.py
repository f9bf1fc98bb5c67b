#!/usr/bin/env python3
"""Look for verses of the Spanish-English corpus whose two sides are not translations of each other.

A word translation model (IBM model 1, both directions) is learned from the pairs themselves.  It scores a pair by how
much better each side is explained by the other than by the frequencies of its words alone, in nats a word: about 0
for unrelated texts.  A verse is then flagged as

    shifted   its English fits the Spanish of the verse before or after better than its own, by a margin
    divided   words at its start (or end) are explained by the other side of the verse before (or after), and not by
              its own: the two texts divide these verses at different words, or one of them says something twice
    weak      its own score is low

Each kind is printed with the share of it that lies in runs of neighbouring verses: renumbered verses make runs,
loose translations do not.  By default the shipped corpus is checked; --source checks every verse that the two texts
have in common, before anything is dropped, which is how the table in make_verses.py was found.
"""

from __future__ import annotations

import argparse
import gzip
import math
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import make_verses  # noqa: E402  (the folder of this script is not always on the path)
from make_verses import Pair, Ref, UserError  # noqa: E402

STEM = 6  # letters of a word that count: a crude way to join the forms of a verb
RARE = 3  # words seen less often are no evidence: the model learns them by heart from the pair in question
MARGIN = 0.25  # nats a word by which a neighbour must fit better
WEAK = 0.9  # nats a word under which a verse is flagged
SPILL = 12.0  # nats that the neighbour must explain better, over all the words at the edge
NULL = ""

Table = dict[str, dict[str, float]]


def stems(text: str) -> list[str]:
    """The words of a text as the model sees them."""
    return [word[:STEM] for word in re.findall(r"[^\W\d_]+", text.lower())]


def learn(targets: list[list[str]], sources: list[list[str]], rounds: int) -> Table:
    """Learn t(target word | source word) by expectation maximization; returned by target word first."""
    table: Table = {}
    for number in range(rounds):
        counts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        totals: dict[str, float] = defaultdict(float)
        for target, source in zip(targets, sources, strict=True):
            given = [NULL, *source]
            for word in target:
                row = counts[word]
                if number == 0:
                    weights = [1.0] * len(given)
                else:
                    old = table[word]
                    weights = [old[other] for other in given]
                scale = 1.0 / sum(weights)
                for other, weight in zip(given, weights, strict=True):
                    share = weight * scale
                    row[other] += share
                    totals[other] += share
        table = {word: {other: count / totals[other] for other, count in row.items()} for word, row in counts.items()}
    return table


class Scorer:
    """Scores any Spanish text against any English text."""

    def __init__(self, pairs: list[Pair], rounds: int = 4) -> None:
        es, en = [stems(p.es) for p in pairs], [stems(p.en) for p in pairs]
        self.tables = (learn(es, en, rounds), learn(en, es, rounds))
        self.counts = tuple(Counter(word for words in side for word in words) for side in (es, en))
        self.sizes = tuple(sum(counts.values()) for counts in self.counts)

    def _gain(self, side: int, target: list[str], source: list[str]) -> tuple[float, int]:
        table, counts, size = self.tables[side], self.counts[side], self.sizes[side]
        given = [NULL, *source]
        gain, used = 0.0, 0
        for word in target:
            if counts[word] < RARE:
                continue
            row = table[word]
            chance = counts[word] / size
            # A tenth of the chance is kept back, so that one unexplained word does not decide.
            explained = 0.9 * sum(row.get(other, 0.0) for other in given) / len(given) + 0.1 * chance
            gain += math.log(explained / chance)
            used += 1
        return gain, used

    def _best(self, side: int, target: list[str], source: list[str]) -> list[float]:
        table, counts, size = self.tables[side], self.counts[side], self.sizes[side]
        gains = []
        for word in target:
            if counts[word] >= RARE:
                row, chance = table[word], counts[word] / size
                gains.append(math.log(max([chance, *(row.get(other, 0.0) for other in source)]) / chance))
        return gains

    def spill(self, own: Pair, near: Pair, step: int) -> float:
        """Nats by which words at the edge of a verse fit the other side of its neighbour better than its own."""
        most = 0.0
        for side in (0, 1):
            target = stems((own.es, own.en)[side])
            here = self._best(side, target, stems((own.en, own.es)[side]))
            there = self._best(side, target, stems((near.en, near.es)[side]))
            gains = [b - a for a, b in zip(here, there, strict=True)]
            total = 0.0
            for gain in gains if step < 0 else reversed(gains):
                total += gain
                most = max(most, total)
        return most

    def score(self, es: str, en: str) -> float:
        """Nats a word gained by knowing the other side; about 0 or less for unrelated texts."""
        es_words, en_words = stems(es), stems(en)
        forth, m = self._gain(0, es_words, en_words)
        back, n = self._gain(1, en_words, es_words)
        return (forth + back) / (m + n) if m + n else 0.0


def check(pairs: list[Pair]) -> dict[str, list[tuple[Ref, str]]]:
    """Return the flagged verses of each kind with a note on each."""
    scorer = Scorer(pairs)
    by_ref = {pair.ref: pair for pair in pairs}
    flags: dict[str, list[tuple[Ref, str]]] = {"shifted": [], "divided": [], "weak": []}
    for pair in pairs:
        own = scorer.score(pair.es, pair.en)
        best, where = own + MARGIN, 0
        spill, edge = SPILL, 0
        for step in (-1, 1):
            near = by_ref.get(pair.ref._replace(verse=pair.ref.verse + step))
            if near is not None:
                other = scorer.score(near.es, pair.en)
                if other > best:
                    best, where = other, step
                nats = scorer.spill(pair, near, step)
                if nats > spill:
                    spill, edge = nats, step
        if where:
            flags["shifted"].append((pair.ref, f"own {own:.2f}, Spanish of verse {where:+d} {best:.2f}"))
        elif edge:
            flags["divided"].append((pair.ref, f"own {own:.2f}, with verse {edge:+d} {spill:.1f} nats"))
        elif own < WEAK:
            flags["weak"].append((pair.ref, f"own {own:.2f}"))
    return flags


def in_runs(refs: list[Ref]) -> int:
    """How many of the verses have a flagged neighbour (one verse in between is allowed)."""
    have = set(refs)
    return sum(any(ref._replace(verse=ref.verse + step) in have for step in (-2, -1, 1, 2)) for ref in refs)


def read_corpus(folder: Path) -> list[Pair]:
    """Read all splits of the shipped corpus, in the order of the references within each."""
    pairs = []
    for name in make_verses.SPLITS:
        columns = []
        for suffix in ("refs", "es", "en"):
            path = folder / f"{name}.{suffix}.gz"
            try:
                with gzip.open(path, "rt", encoding="utf-8", newline="\n") as stream:
                    columns.append(stream.read().splitlines())
            except (OSError, EOFError, UnicodeDecodeError) as error:
                raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
        if len({len(column) for column in columns}) != 1:
            raise UserError(f"{folder}: the files of the split {name} differ in length")
        for ref, es, en in zip(*columns, strict=True):
            match = re.fullmatch(r"(.+) (\d+):(\d+)", ref)
            if match is None:
                raise UserError(f"{folder}: {name}.refs.gz holds {ref!r}, which is no reference")
            pairs.append(Pair(Ref(match[1], int(match[2]), int(match[3])), es, en))
    return pairs


def main(argv: list[str] | None = None) -> int:
    """Run the command line; 0 when the check ran, 2 for a mistake in its use."""
    parser = argparse.ArgumentParser(
        description="Flag verses whose two sides may not be translations of each other (takes a minute or two)."
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        metavar="DIR",
        default=Path(__file__).resolve().parents[2] / "data" / "verses.es-en",
        help="the corpus to check (default: data/verses.es-en of this repository)",
    )
    parser.add_argument(
        "--source", action="store_true", help="check the two texts before anything is dropped, instead of the corpus"
    )
    parser.add_argument("--list", action="store_true", help="also print every flagged verse")
    make_verses.add_source_arguments(parser)
    args = parser.parse_args(argv)
    try:
        pairs = make_verses.join(*make_verses.load_dumps(args))[0] if args.source else read_corpus(args.corpus)
    except UserError as error:
        print(f"check_alignment.py: error: {error}", file=sys.stderr)
        return 2
    flags = check(pairs)
    if args.list:
        for kind, found in flags.items():
            for ref, note in found:
                print(f"{kind:<8} {str(ref):<24} {note}")
    print(f"{'verses':<8} {len(pairs):>6}")
    for kind, found in flags.items():
        print(f"{kind:<8} {len(found):>6}  of which in runs: {in_runs([ref for ref, _ in found])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
