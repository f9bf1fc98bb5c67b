"""The merge operations of subword-nmt's learn_bpe, found in a fraction of its time.

subword-nmt 0.3.8 looks at every pair of symbols for each merge to find the most frequent one, which is three quarters
of its time; here a heap keeps them in order. All else is its own functions, called in its own order, and so are the
merges: its pruning of rare pairs can change which pair comes next, and is kept.
"""

import heapq
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator

from subword_nmt.learn_bpe import get_pair_statistics, prune_stats, replace_pair, update_pair_statistics
from tqdm import tqdm

Pair = tuple[str, str]

LEAST_FREQUENCY = 2
"""A pair that is rarer than this is not merged (subword-nmt's default)."""


class Statistics(defaultdict):
    """Frequencies of pairs that remember which of them were set."""

    def __init__(self, *args):
        super().__init__(int, *args)
        self.changed: set[Pair] = set()

    def __setitem__(self, pair: Pair, frequency: int) -> None:
        self.changed.add(pair)
        super().__setitem__(pair, frequency)


class MostFrequent:
    """The most frequent pair, and of several the one that sorts last, as frequencies change."""

    def __init__(self, statistics: Statistics):
        self.statistics = statistics
        statistics.changed.clear()
        self.heap = [self.entry(pair, frequency) for pair, frequency in statistics.items() if frequency > 0]
        heapq.heapify(self.heap)

    @staticmethod
    def entry(pair: Pair, frequency: int) -> tuple:
        # The heap gives the smallest: everything is turned around. The 1 makes a word come after those that it begins.
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
    """At most ``operations`` merges, the first first, for words with their frequencies."""
    vocabulary = [((*word[:-1], f"{word[-1]}</w>"), frequency) for word, frequency in words.items()]
    vocabulary.sort(key=lambda item: item[1], reverse=True)
    found, indices = get_pair_statistics(vocabulary)
    if not found:
        return
    # Of all pairs; `current` is without those that were too rare to come next when it was last pruned.
    everything = found.copy()
    current = Statistics(found)
    most_frequent = MostFrequent(current)
    threshold = max(found.values()) / 10
    for done in tqdm(range(operations), desc="learning BPE", disable=not sys.stderr.isatty()):
        pair, frequency = most_frequent.top()
        if pair is None or (done and frequency < threshold):
            # The best one may have been pruned.
            prune_stats(current, everything, threshold)
            current = Statistics(everything)
            frequency, pair = max((frequency, pair) for pair, frequency in current.items())
            threshold = frequency * done / (done + 10000.0)
            prune_stats(current, everything, threshold)
            most_frequent = MostFrequent(current)
        if frequency < LEAST_FREQUENCY:
            return
        yield pair
        changes = replace_pair(pair, vocabulary, indices)
        update_pair_statistics(pair, changes, current, indices)
        current[pair] = 0
        if done % 100 == 0:
            prune_stats(current, everything, threshold)
