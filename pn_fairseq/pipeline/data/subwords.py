"""Joint segmentation of both languages into subwords: learning and applying it.

Kinds: ``subword-nmt`` (a number of merges; a subword that continues ends in ``@@``) and
``sentencepiece`` (its BPE, with a size of the vocabulary; white space is marked with U+2581). Both
read tokenized text, and joining the subwords restores it.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from unittest import mock

from pn_fairseq.common.command import UserError, say
from pn_fairseq.common.files import atomic_write
from pn_fairseq.pipeline.data import pairs
from pn_fairseq.pipeline.data.parallel import progress

#: Kind -> name of the file with the model.
MODELS = {"subword-nmt": "codes", "sentencepiece": "sentencepiece.model"}


def _learn_subword_nmt(lines: Iterator[str], operations: int) -> bytes:
    """The codes that ``subword-nmt learn-bpe`` prints."""
    from subword_nmt import learn_bpe

    codes = io.StringIO()
    try:
        with mock.patch.object(learn_bpe, "tqdm", progress):
            learn_bpe.learn_bpe(lines, codes, operations)
    except ValueError:  # the maximum over no pairs
        raise UserError(
            "the training text has no word of two characters to learn BPE from"
        ) from None
    learned = codes.getvalue().count("\n") - 1  # without the line of the version
    if learned < operations:
        say(
            "prepare",
            f"note: the text has {learned:,} merges, fewer than --bpe {operations:,}; all of them "
            "are used",
        )
    return codes.getvalue().encode()


def _learn_sentencepiece(lines: Iterator[str], operations: int) -> bytes:
    """A serialised model."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            # not the name of a file, because the trainer splits names at commas
            sentence_iterator=lines,
            model_writer=model,
            model_type="bpe",
            vocab_size=operations,
            # Nothing may be changed or left out, because the tokens are the reference text.
            normalization_rule_name="identity",
            character_coverage=1.0,
            max_sentence_length=1 << 30,
            minloglevel=2,
            # num_threads is written into the model, so it stays sentencepiece's default on any
            # number of cores.
        )
    except RuntimeError as error:
        # The message begins with a place in sentencepiece's source, in brackets.
        reason = " ".join(str(error).split()).rsplit("] ", 1)[-1]
        raise UserError(
            f"sentencepiece with --bpe {operations}: {reason} (run it again with another --bpe; "
            "what is done is kept)"
        ) from error
    return model.getvalue()


def matcher(protected: Sequence[str]) -> Callable[[str], bool]:
    """A function that tells whether one of these regular expressions matches a whole token."""
    patterns = [re.compile(pattern) for pattern in protected]
    return lambda token: any(pattern.fullmatch(token) for pattern in patterns)


def learn(
    kind: str, operations: int, model: Path, texts: Sequence[Path], protected: Sequence[str] = ()
) -> None:
    """Learn the model from tokenized text of both languages, and write it.

    Args:
        operations: the number of merges, or the size of sentencepiece's vocabulary.
        protected: regular expressions of tokens that are left out.
    """
    whole = matcher(protected)

    def lines() -> Iterator[str]:
        for path in texts:
            for line in pairs.lines(path):
                tokens = line.removesuffix("\n")
                yield (
                    " ".join(token for token in tokens.split(" ") if not whole(token))
                    if protected
                    else tokens
                )

    content = {"subword-nmt": _learn_subword_nmt, "sentencepiece": _learn_sentencepiece}[kind](
        lines(), operations
    )
    model.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(model) as file:
        file.write(content)


def merges(codes: Path) -> list[str]:
    """The lines of subword-nmt's codes, FILE or packed, without their ends.

    Raises:
        UserError: the file is something else.
    """
    content = [line.strip("\r\n") for line in pairs.lines(codes)]
    for number, line in enumerate(content, 1):
        if len(line.split(" ")) != 2:  # the first line, "#version: 0.2", has two words as well
            raise UserError(
                f"{codes}: line {number} is not a merge of subword-nmt, such as 'e n</w>'"
            )
    if not content:
        raise UserError(f"{codes} is empty: it is to have the merges of subword-nmt")
    return content


def count_merges(codes: Path) -> int:
    """The number of merges."""
    return sum(not line.startswith("#version") for line in merges(codes))


def are_in(texts: Iterable[Path]) -> bool:
    """Whether text is in subwords of subword-nmt: 1 token in 1,000, or more, ends in ``@@``."""
    total = continued = 0
    for path in texts:
        for line in pairs.lines(path):
            tokens = line.split()
            total += len(tokens)
            continued += sum(token.endswith("@@") and token != "@@" for token in tokens)
    return continued * 1000 >= max(total, 1)


def join(line: str) -> str:
    """Join subwords into tokens."""
    return f"{line} ".replace("@@ ", "").removesuffix(" ")


def segmenter(kind: str, model: Path, protected: Sequence[str] = ()) -> Callable[[str], str]:
    """The function that turns a line of tokens into a line of subwords.

    ``protected``: regular expressions of tokens that stay whole.
    """
    if not model.is_file():
        raise UserError(
            f"{model} does not exist: the text came in subwords, without the codes (--codes) for "
            "other text"
        )
    if kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        processor, whole = SentencePieceProcessor(model_file=str(model)), matcher(protected)

        def segment(line: str) -> str:
            pieces: list[str] = []
            for is_whole, tokens in itertools.groupby(line.split(" "), whole):
                if is_whole:
                    pieces += (f"\u2581{token}" for token in tokens)
                else:
                    pieces += processor.encode(" ".join(tokens), out_type=str)
            return " ".join(pieces)

        return segment
    from subword_nmt.apply_bpe import BPE

    with model.open(encoding="utf-8") as file:
        return BPE(file, glossaries=[f"(?:{pattern})" for pattern in protected]).process_line
