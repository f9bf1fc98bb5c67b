"""Whether detokenization gives text back: what it leaves torn is torn in every translation as well."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from pn_fairseq.pipeline.data import pairs, tokens

#: Lines by which a text is judged.
COMPARED = 2000
#: A note is worth its line above this share of lines whose punctuation is not joined again. English verses have 0.8%.
SHARE = 0.05


class Unrestored(NamedTuple):
    """Lines of text whose blanks differ after tokenization and detokenization."""

    lines: int  # of the text
    torn: int  # lines with a new blank within a word
    apart: int  # other lines whose blanks differ
    number: int  # of the first torn line, or else of the first other one
    example: str  # what became of it
    composed: bool  # the text is in Unicode's form NFC

    def note(self, name: str) -> str | None:
        """What a user should know and do about the text ``name``, if anything."""
        if not self.torn and self.apart <= SHARE * self.lines:
            return None
        what = f"words of {self.torn}" if self.torn else f"the punctuation of {self.apart}"
        advice = (
            "give it in tokens of another tokenizer (--tokenized)" if self.composed else "normalize it to NFC first"
        )
        return (
            f"note: detokenization does not join {what} of {self.lines} lines of {name} again, nor would it in "
            f"translations; line {self.number} becomes '{self.example[:80]}'. If the text matters, {advice}"
        )


def _blanks(text: str) -> tuple[str, set[int]]:
    """The text without white space, and before which of its characters there was some."""
    words = text.split()
    ends, total = set(), 0
    for word in words[:-1]:
        total += len(word)
        ends.add(total)
    return "".join(words), ends


def compare(raw: Iterable[str], restored: Iterable[str], lower: bool) -> Unrestored:
    """Compare text with what detokenization makes of its tokens; lines whose characters differ are left out."""
    total = torn = apart = 0
    first: dict[bool, tuple[int, str]] = {}
    composed = True
    for before, after in zip(raw, restored, strict=True):
        total, composed = total + 1, composed and unicodedata.is_normalized("NFC", before)
        (old, had), (new, has) = (_blanks(text.lower() if lower else text) for text in (before, after))
        if old != new or had == has:
            continue
        inside = any(all(unicodedata.category(new[at + side])[0] in "LMN" for side in (-1, 0)) for at in has - had)
        torn, apart = torn + inside, apart + (not inside)
        first.setdefault(inside, (total, " ".join(after.split())))
    return Unrestored(total, torn, apart, *first.get(True, first.get(False, (0, ""))), composed)


def note_on(raw: Path, tok: Path, settings: Mapping[str, str]) -> str | None:
    """A note if detokenization does not give ``raw`` back from its tokens, judged by :data:`COMPARED` lines."""
    before, tokenized = ([*itertools.islice(pairs.lines(path), COMPARED)] for path in (raw, tok))
    after = tokens.detokenize([line.removesuffix("\n") for line in tokenized], raw.suffix[1:])
    for pattern in tokens.protected(settings):
        before, after = ([re.sub(pattern, " ", line) for line in lines] for lines in (before, after))
    return compare(before, after, settings["lower"] == "1").note(raw.name)
