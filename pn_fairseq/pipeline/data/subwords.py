"""Joint segmentation of both languages into subwords: learning and applying it.

Kinds: ``subword-nmt`` (a number of merges; one that is continued ends in ``@@``) and ``sentencepiece`` (its
BPE, with a size of the vocabulary; white space is marked with U+2581). Both see tokenized text, and joining the
subwords gives it back.
"""

from __future__ import annotations

import heapq
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pn_fairseq.pipeline.command import UserError
from pn_fairseq.pipeline.data.parallel import map_pieces, per_line, pieces, progress
from pn_fairseq.pipeline.files import atomic_write

#: Kind -> name of the file with the model.
MODELS = {"subword-nmt": "codes", "sentencepiece": "sentencepiece.model"}

Pair = tuple[str, str]

#: A pair that is rarer is not merged (subword-nmt's default).
LEAST_FREQUENCY = 2


class _Statistics(defaultdict):
    """Frequencies of pairs that remember which of them were set."""

    def __init__(self, *args):
        super().__init__(int, *args)
        self.changed: set[Pair] = set()

    def __setitem__(self, pair: Pair, frequency: int) -> None:
        self.changed.add(pair)
        super().__setitem__(pair, frequency)


class _MostFrequent:
    """The most frequent pair, and of several the one that sorts last, as frequencies change."""

    def __init__(self, statistics: _Statistics):
        self.statistics = statistics
        statistics.changed.clear()
        self.heap = [self.entry(pair, frequency) for pair, frequency in statistics.items() if frequency > 0]
        heapq.heapify(self.heap)

    @staticmethod
    def entry(pair: Pair, frequency: int) -> tuple:
        # A heap gives the smallest first: everything is negated. The 1 makes a word come after those that it begins.
        first, second = ((*(-ord(character) for character in symbol), 1) for symbol in pair)
        return -frequency, first, second, pair

    def top(self) -> tuple[Pair | None, int]:
        """The pair and its frequency; (None, 0) if there is none that occurs."""
        for pair in self.statistics.changed:
            if (frequency := self.statistics.get(pair, 0)) > 0:
                heapq.heappush(self.heap, self.entry(pair, frequency))
        self.statistics.changed.clear()
        while self.heap:
            frequency, _, _, pair = self.heap[0]
            if self.statistics.get(pair, 0) == -frequency:
                return pair, -frequency
            heapq.heappop(self.heap)  # the frequency has changed since, or the pair was pruned
        return None, 0


def learn_merges(words: Counter, operations: int) -> Iterator[Pair]:
    """The merges of subword-nmt's learn_bpe for words with their frequencies, at most ``operations``.

    Own code, because subword-nmt 0.3.8 compares all pairs of symbols for each merge: with the heap here the same merges
    take 3.2 s in place of 8.9 s (Multi30k, 10,000 merges). All else is its own functions in its own order; its pruning
    of rare pairs can change which pair comes next, and is kept.
    """
    from subword_nmt.learn_bpe import get_pair_statistics, prune_stats, replace_pair, update_pair_statistics

    vocabulary = [((*word[:-1], f"{word[-1]}</w>"), frequency) for word, frequency in words.items()]
    vocabulary.sort(key=lambda item: item[1], reverse=True)
    found, indices = get_pair_statistics(vocabulary)
    if not found:
        return
    # `everything` has all pairs; `current` lacks those that were too rare to come next when it was last pruned.
    everything = found.copy()
    current = _Statistics(found)
    most_frequent = _MostFrequent(current)
    threshold = max(found.values()) / 10
    for done in progress(range(operations), desc="learning BPE"):
        pair, frequency = most_frequent.top()
        if pair is None or (done and frequency < threshold):
            # The best one may have been pruned.
            prune_stats(current, everything, threshold)
            current = _Statistics(everything)
            frequency, pair = max((frequency, pair) for pair, frequency in current.items())
            threshold = frequency * done / (done + 10000.0)
            prune_stats(current, everything, threshold)
            most_frequent = _MostFrequent(current)
        if frequency < LEAST_FREQUENCY:
            return
        yield pair
        changes = replace_pair(pair, vocabulary, indices)
        update_pair_statistics(pair, changes, current, indices)
        current[pair] = 0
        if done % 100 == 0:
            prune_stats(current, everything, threshold)


def _count_words(text: bytes) -> Counter:
    words = Counter(text.decode("utf-8").replace("\n", " ").split(" "))
    del words[""]
    return words


def _learn_subword_nmt(texts: Sequence[Path], operations: int, workers: int) -> bytes:
    """The codes that `subword-nmt learn-bpe` prints: all cores count the words, one finds the merges."""
    words = Counter()
    for part in map_pieces(lambda: _count_words, [piece for path in texts for piece in pieces(path)], workers):
        words.update(part)
    if not any(len(word) > 1 for word in words):
        raise UserError(f"{texts[0]}: there is no word of two characters to learn BPE from")
    merges = "".join(f"{first} {second}\n" for first, second in learn_merges(words, operations))
    return f"#version: 0.2\n{merges}".encode()


def _lines(texts: Sequence[Path]) -> Iterator[str]:
    for path in texts:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                yield line.removesuffix("\n")


def _learn_sentencepiece(texts: Sequence[Path], operations: int, _: int) -> bytes:
    """A serialised model."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),  # not by name: the trainer splits names at commas
            model_writer=model,
            model_type="bpe",
            vocab_size=operations,
            # Nothing is changed or left out: the tokens are the reference text.
            normalization_rule_name="identity",
            character_coverage=1.0,
            max_sentence_length=1 << 30,
            minloglevel=2,
            # num_threads is written into the model, and stays sentencepiece's default whatever the cores.
        )
    except RuntimeError as error:
        # The message begins with a place in sentencepiece's source, in brackets.
        said = " ".join(str(error).split()).rsplit("] ", 1)[-1]
        raise UserError(
            f"sentencepiece with --bpe {operations}: {said} (run it again with another --bpe; what is done is kept)"
        ) from error
    return model.getvalue()


def learn(kind: str, operations: int, model: Path, texts: Sequence[Path], workers: int) -> None:
    """Write the model, unless it is there.

    Args:
        kind: a key of :data:`MODELS`.
        operations: number of merges, or the size of sentencepiece's vocabulary.
        model: file to write.
        texts: tokenized training text of both languages.
        workers: number of processes.
    """
    if model.exists():
        return
    content = {"subword-nmt": _learn_subword_nmt, "sentencepiece": _learn_sentencepiece}[kind](
        texts, operations, workers
    )
    model.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(model) as file:
        file.write(content)


def segmenter(kind: str, model: Path) -> Callable[[str], str]:
    """The function that turns a line of tokens into a line of subwords."""
    if kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        encode = SentencePieceProcessor(model_file=str(model)).encode
        return lambda line: " ".join(encode(line, out_type=str))
    from subword_nmt.apply_bpe import BPE

    with model.open(encoding="utf-8") as file:
        return BPE(file).process_line


def segment_lines(kind: str, model: Path) -> Callable[[bytes], bytes]:
    """The same for :func:`pn_fairseq.pipeline.data.parallel.transform`."""
    return per_line(segmenter(kind, model))
