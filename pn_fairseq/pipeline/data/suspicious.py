"""What is suspicious about text that was read: notes, which change nothing."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

#: Number of lines of a split whose words are compared between the sides.
COMPARED = 5000
#: A side with fewer distinct words is not compared.
FEWEST_WORDS = 100
#: Sides count as swapped if, on both of them, at least this share of the distinct words occurs on
#: the other side of train, and that share is at least this many times the share that occurs on
#: their own side. In the verses, Multi30k and IWSLT15 the factor is at most a tenth, and if they
#: are swapped at least 10.
OTHER_SIDE, TIMES = 0.1, 2
#: A note on sentences that are also in train is printed above this share of a split. It is at most
#: 1.5% in the corpora named above.
SHARE = 0.05
#: Shorter lines of a language model's text recur in any text: headings ("= = = History = = ="),
#: markup.
SHORTEST_LINE = 10

#: Split -> its files: source and target, or one text.
Texts = Mapping[str, Sequence[Path]]


def notes_on(texts: Texts, splits: Sequence[str]) -> Iterator[str]:
    """Notes on these splits; ``texts`` holds the files of these splits and of train."""
    for split in splits:
        if len(texts[split]) == 2:
            yield from _copies(*texts[split])
    if "train" not in texts:
        return
    others = [split for split in splits if split != "train"]
    yield from _swapped(texts, others)
    for split in others:
        yield from _in_train(texts, split)


def _copies(source: Path, target: Path) -> Iterator[str]:
    """A note if most sentences are the same on both sides."""
    with source.open("rb") as sources, target.open("rb") as targets:
        same = [one == other for one, other in zip(sources, targets, strict=True)]
    if sum(same) > len(same) / 2:
        names = f"{source.name} and {target.name}"
        yield f"{sum(same)} of the {len(same)} pairs of {names} are the same on both sides"


def _words(text: Path) -> set[str]:
    """The distinct words of the first lines, lower-cased."""
    words: set[str] = set()
    with text.open(encoding="utf-8", errors="replace") as lines:
        for line in itertools.islice(lines, COMPARED):
            words.update(line.lower().split())
    return words


def _share(words: set[str], known: set[str]) -> float:
    return len(words & known) / len(words)


def _is_swapped(share_on_other_side: float, share_on_own_side: float) -> bool:
    return share_on_other_side >= max(OTHER_SIDE, TIMES * share_on_own_side)


def _swapped(texts: Texts, splits: Sequence[str]) -> Iterator[str]:
    """Notes on splits whose sides are swapped. If every split seems swapped, train is."""
    if len(texts["train"]) < 2:
        return
    train_source, train_target = (_words(file) for file in texts["train"])
    examples = {}
    for split in splits:
        source, target = (_words(file) for file in texts[split])
        if min(len(source), len(target)) < FEWEST_WORDS:
            continue
        source_shares = _share(source, train_target), _share(source, train_source)
        target_shares = _share(target, train_source), _share(target, train_target)
        if _is_swapped(*source_shares) and _is_swapped(*target_shares):
            examples[split] = source_shares
    if not examples:
        return
    at_fault = " and ".join(examples)
    if len(examples) > 1 and len(examples) == len(splits):
        at_fault = "train"
    split, (other_share, own_share) = next(iter(examples.items()))
    of_source, of_target = (file.name for file in texts["train"])
    yield (
        f"the two languages of {at_fault} seem to be swapped: {other_share:.0%} of the distinct "
        f"words of {texts[split][0].name} are in {of_target}, and {own_share:.0%} in {of_source}"
    )


def _sentences(files: Sequence[Path]) -> Iterator[tuple[bytes, ...]]:
    """The sentences of a split that can be compared: pairs, or lines of one text."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(file.open("rb")) for file in files]
        for lines in zip(*opened, strict=True):
            sentence = tuple(line.strip() for line in lines)
            is_long_enough = len(files) > 1 or len(sentence[0].split()) >= SHORTEST_LINE
            if any(sentence) and is_long_enough:
                yield sentence


def _in_train(texts: Texts, split: str) -> Iterator[str]:
    """A note on how many sentences of a split are also in train."""
    counts = Counter(_sentences(texts[split]))
    found = sum(counts.pop(sentence, 0) for sentence in _sentences(texts["train"]))
    total = found + counts.total()
    if found <= SHARE * total:
        return
    what, measure = "pairs", "BLEU"
    if len(texts[split]) < 2:
        what, measure = f"lines of at least {SHORTEST_LINE} words", "perplexity"
    if split == "valid":
        measure = "loss"
    which = f"{found} of {total} {what} of {split}"
    yield f"{which} are in train: its {measure} is that of training text"
