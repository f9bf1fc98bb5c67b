"""Tokenization of a sentence, as by Moses' scripts, and plain text from tokens."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from pn_fairseq.common.command import UserError, why_it_failed
from pn_fairseq.pipeline.data.languages import language_of
from pn_fairseq.pipeline.data.parallel import Work, per_line
from pn_fairseq.pipeline.data.settings import MOSES, NONE, SACREMOSES, Settings

#: Setting -> the Moses script that it turns on, in the order in which they run. The tokenizer is
#: always on.
SCRIPTS = {
    "normalize": "scripts/tokenizer/normalize-punctuation.perl",
    "nonprinting": "scripts/tokenizer/remove-non-printing-char.perl",
    "tokenizer": "scripts/tokenizer/tokenizer.perl",
    "lower": "scripts/tokenizer/lowercase.perl",
}

FINAL_STOP = re.compile(r"(?<=[^\s.])\.\Z")


def scripts(settings: Settings) -> dict[str, str]:
    """Moses' scripts that these settings need, in their order."""
    return {
        name: script
        for name, script in SCRIPTS.items()
        if name == "tokenizer" or getattr(settings, name)
    }


def checkout(settings: Settings, moses: Path | None) -> Path:
    """The checkout of mosesdecoder (--moses), which must contain the scripts for these settings."""
    if moses is None:
        raise UserError(
            "the text was tokenized by Moses' own scripts: name a checkout of mosesdecoder "
            "(--moses DIR)"
        )
    for script in scripts(settings).values():
        if not (moses / script).is_file():
            raise UserError(
                f"--moses {moses} is not a checkout of mosesdecoder: {script} is missing"
            )
    return moses


#: Control characters that Moses deletes and that Python treats as white space.
_DELETED = dict.fromkeys(range(0x1C, 0x20))


def sacremoses(settings: Settings, lang: str, straighten: bool = False) -> Callable[[str], str]:
    """A function that turns a sentence into tokens with one blank between them.

    Args:
        settings: settings of the data: normalize, nonprinting, aggressive, lower, tokenizer.
        lang: language of the sentence.
        straighten: make typographic apostrophes plain first.
    """
    import regex
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    lang = language_of(lang)
    steps: list[Callable[[str], str]] = []
    if straighten:
        steps.append(lambda line: line.replace("’", "'"))
    if settings.normalize:
        # perl_parity: behave like normalize-punctuation.perl, from which the default differs in
        # three rules. The script also sees the line feed, which ends the rule for a full stop
        # before a last quotation mark.
        normalize = MosesPunctNormalizer(lang, perl_parity=True).normalize
        steps.append(lambda line: normalize(f"{line}\n"))
    if settings.nonprinting:
        unprintable = regex.compile(r"\p{C}")  # control, format, private and unassigned characters
        steps.append(lambda line: unprintable.sub(" ", line))
    tokenize = MosesTokenizer(lang).tokenize
    steps.append(lambda line: line.translate(_DELETED))
    steps.append(
        lambda line: tokenize(line, aggressive_dash_splits=settings.aggressive, return_str=True)
    )
    if settings.tokenizer == SACREMOSES:
        steps.append(lambda line: FINAL_STOP.sub(" .", line))
    if settings.lower:
        steps.append(str.lower)

    def function(line: str) -> str:
        for step in steps:
            line = step(line)
        return line

    return function


def moses(checkout: Path, settings: Settings, lang: str, straighten: bool = False) -> Work:
    """The same with Moses' own Perl scripts in a checkout of mosesdecoder, for many lines at a
    time.
    """
    flags = {
        "normalize": [language_of(lang)],  # by position: older versions of the script have no -l
        "tokenizer": ["-q", "-l", language_of(lang), *(["-a"] if settings.aggressive else [])],
    }
    commands = [
        ["perl", str(checkout / path), *flags.get(name, [])]
        for name, path in scripts(settings).items()
    ]

    def work(text: bytes) -> bytes:
        if straighten:
            text = text.replace("’".encode(), b"'")
        for command in commands:
            result = subprocess.run(command, input=text, capture_output=True)
            if result.returncode:
                messages = result.stderr.decode("utf-8", "replace").splitlines()
                raise UserError(
                    f"{command[1]} failed: {why_it_failed(result.returncode, messages)}"
                )
            text = result.stdout
        return text

    return work


#: Replaces a protected text while the rest is tokenized: a letter of Linear A, which no rule
#: changes.
_MARK = "\U00010640"


def tokenizer(
    settings: Settings, lang: str, straighten: bool = False, checkout_of_moses: Path | None = None
) -> Work:
    """The tokenizer that the settings name, for
    :func:`pn_fairseq.pipeline.data.parallel.transform`.
    """
    work = _unprotected(settings, lang, straighten, checkout_of_moses)
    if not settings.protect:
        return work
    pattern = re.compile("|".join(f"(?:{pattern})" for pattern in settings.protect), re.MULTILINE)

    def with_marks(text: bytes) -> bytes:
        kept: list[str] = []

        def keep(match: re.Match) -> str:
            if match[0].split() != [match[0]]:
                raise UserError(
                    f"{match[0]!r} is to be protected, but is empty or has white space (--protect)"
                )
            kept.append(match[0])
            return f" {_MARK} "

        marked = pattern.sub(keep, text.decode("utf-8"))
        parts = work(marked.encode()).decode("utf-8").split(_MARK)
        if len(parts) != len(kept) + 1:
            raise UserError(f"the text has {_MARK!r}, which --protect needs for itself")
        return "".join(itertools.chain(*zip(parts, [*kept, ""], strict=True))).encode()

    return with_marks


def _unprotected(
    settings: Settings, lang: str, straighten: bool, checkout_of_moses: Path | None
) -> Work:
    if settings.tokenizer == NONE:
        case = str.lower if settings.lower else str
        return per_line(lambda line: " ".join(case(line).split()))
    if settings.tokenizer == MOSES:
        return moses(checkout(settings, checkout_of_moses), settings, lang, straighten)
    return per_line(sacremoses(settings, lang, straighten))


#: Languages in which “ and ‘ close a quotation, which „ opens.
_LOW_OPENING_QUOTES = frozenset("bg cs da de et hr is lt mk sk sl sq sr".split())

#: sacremoses joins „ and “ alternately to the next and to the previous word, although each belongs
#: to one side. They are replaced by characters that occur in no text and that sacremoses leaves
#: unchanged.
_HIDE, _SHOW = str.maketrans("„“", "\ufdd0\ufdd1"), str.maketrans("\ufdd0\ufdd1", "„“")

#: The name of :func:`detokenize` in signatures.
DETOKENIZER = f"sacremoses-{metadata.version('sacremoses')}+quotes"


def detokenize(lines: Iterable[str], language: str) -> list[str]:
    """Plain text from Moses-style tokens: sacremoses' detokenizer, and rules of this project for
    typographic quotes.

    sacremoses leaves typographic quotation marks and apostrophes apart from their words, or joins
    them to the wrong words; the rules join them to the right ones. If a text has such marks,
    detokenized BLEU and chrF therefore differ from ``sacremoses detokenize | sacrebleu``. The
    references of the verses, tokenized and detokenized, score 99.8 against the raw text with the
    rules, and 95.0 without.
    """
    from sacremoses import MosesDetokenizer

    language = language_of(language)
    detokenizer = MosesDetokenizer(lang=language)
    opening, closing = ("„‚", "“”‘") if language in _LOW_OPENING_QUOTES else ("“‘", "”’")

    def plain(line: str) -> str:
        text = detokenizer.detokenize(line.translate(_HIDE).split()).translate(_SHOW)
        text = re.sub(r" ’ (s|t|d|m|re|ve|ll)\b", r"’\1", text)
        text = re.sub(f"([{opening}]) ", r"\1", text)
        return re.sub(f" ([{closing}])", r"\1", text)

    return [plain(line) for line in lines]
