"""Whether detokenization restores text: what it leaves torn is torn in every translation."""

from __future__ import annotations

import itertools
import re
import unicodedata
from pathlib import Path

from pn_fairseq.pipeline.data import pairs, tokens
from pn_fairseq.pipeline.data.settings import Settings

#: Number of lines by which a text is judged.
COMPARED = 2000
#: A note is printed above this share of lines whose punctuation is not rejoined. It is 0.8% in the
#: English verses.
SHARE = 0.05


def _blanks(text: str) -> tuple[str, set[int]]:
    """The text without white space, and the places in it that white space preceded."""
    parts = text.split()
    return "".join(parts), set(itertools.accumulate(map(len, parts[:-1])))


def _is_of_word(character: str) -> bool:
    return unicodedata.category(character)[0] in "LMN"  # letter, mark or number


def note_on(raw: Path, tok: Path, settings: Settings) -> str | None:
    """A note if detokenization does not restore ``raw`` from its tokens, judged by
    :data:`COMPARED` lines.

    Lines that differ in more than blanks are left out.
    """
    before = list(itertools.islice(pairs.lines(raw), COMPARED))
    tokenized = itertools.islice(pairs.lines(tok), COMPARED)
    after = tokens.detokenize(tokenized, raw.suffix[1:])
    for pattern in settings.protect:
        before = [re.sub(pattern, " ", line) for line in before]
        after = [re.sub(pattern, " ", line) for line in after]
    # number of a line with a new blank within a word, or only elsewhere -> the restored line
    torn, apart = {}, {}
    for number, (original, restored) in enumerate(zip(before, after, strict=True), 1):
        characters, blanks = _blanks(original.lower() if settings.lower else original)
        restored_characters, restored_blanks = _blanks(
            restored.lower() if settings.lower else restored
        )
        if characters != restored_characters or blanks == restored_blanks:
            continue
        is_torn = any(
            _is_of_word(characters[place - 1]) and _is_of_word(characters[place])
            for place in restored_blanks - blanks
        )
        lines = torn if is_torn else apart
        lines[number] = " ".join(restored.split())
    if not torn and len(apart) <= SHARE * len(before):
        return None
    what = f"words of {len(torn)}" if torn else f"the punctuation of {len(apart)}"
    number, example = next(iter((torn or apart).items()))
    composed = all(unicodedata.is_normalized("NFC", line) for line in before)
    advice = (
        "give it in tokens of another tokenizer (--tokenized)"
        if composed
        else "normalize it to NFC first"
    )
    return (
        f"note: detokenization does not join {what} of {len(before)} lines of {raw.name} again, "
        f"nor would it in translations; line {number} becomes '{example[:80]}'. If the text "
        f"matters, {advice}"
    )
