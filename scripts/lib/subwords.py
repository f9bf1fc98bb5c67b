"""Learn and apply a joint segmentation into subwords.

subwords.py learn KIND OPERATIONS MODEL [--workers N] TEXT [TEXT ...]
subwords.py apply KIND MODEL [--workers N] INPUT OUTPUT [INPUT OUTPUT ...]

KIND is subword-nmt (OPERATIONS merges; subwords that go on are marked with "@@ ") or sentencepiece (its BPE, with
OPERATIONS the size of the vocabulary; white space is marked with U+2581). Both see tokenized text, and gluing the
subwords gives it back. A MODEL or OUTPUT that is there stays as it is.
"""

import io
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from conventions import ArgumentParser, UserError
from text_files import per_line, reduce, step, transform, whole_file


def count_words(text: bytes) -> Counter:
    words = Counter(text.decode("utf-8").replace("\n", " ").split(" "))
    del words[""]
    return words


def learn_subword_nmt(texts: list[Path], operations: int, workers: int) -> bytes:
    """The codes that `subword-nmt learn-bpe` prints: the words are counted by all cores, the merges found by one."""
    from learn_merges import learn_merges

    words = Counter()
    for part in reduce(texts, count_words, workers, "counting words"):
        words.update(part)
    if not any(len(word) > 1 for word in words):
        raise UserError(f"{texts[0]}: there is no word of two characters to learn BPE from")
    merges = "".join(f"{first} {second}\n" for first, second in learn_merges(words, operations))
    return f"#version: 0.2\n{merges}".encode()


def lines(texts: list[Path]) -> Iterator[str]:
    for path in texts:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                yield line.removesuffix("\n")


def learn_sentencepiece(texts: list[Path], operations: int, _: int) -> bytes:
    """A serialised model."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            # Not by name: the trainer splits names at commas.
            sentence_iterator=lines(texts),
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
        raise UserError(f"sentencepiece: {' '.join(str(error).split())}") from error
    return model.getvalue()


def subword_nmt(model: Path) -> Callable[[bytes], bytes]:
    from subword_nmt.apply_bpe import BPE

    with model.open(encoding="utf-8") as file:
        return per_line(BPE(file).process_line)


def sentencepiece(model: Path) -> Callable[[bytes], bytes]:
    from sentencepiece import SentencePieceProcessor

    encode = SentencePieceProcessor(model_file=str(model)).encode
    return per_line(lambda line: " ".join(encode(line, out_type=str)))


LEARN = {"subword-nmt": learn_subword_nmt, "sentencepiece": learn_sentencepiece}
APPLY = {"subword-nmt": subword_nmt, "sentencepiece": sentencepiece}


def main(argv: list[str] | None) -> None:
    parser = ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=ArgumentParser)
    learn, apply = commands.add_parser("learn"), commands.add_parser("apply")
    for command in (learn, apply):
        command.add_argument("kind", choices=LEARN)
        if command is learn:
            command.add_argument("operations", type=int)
        command.add_argument("model", type=Path)
        command.add_argument("--workers", type=int, default=1)
        command.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args(argv)
    if args.command == "learn":
        if not args.model.exists():
            model = LEARN[args.kind](args.files, args.operations, args.workers)
            with whole_file(args.model) as file:
                file.write(model)
        return
    jobs = [(source, output) for source, output in zip(args.files[::2], args.files[1::2], strict=True)]
    jobs = [(source, output) for source, output in jobs if not output.exists()]
    transform(jobs, lambda: APPLY[args.kind](args.model), args.workers, "applying BPE")


step("subwords.py", main)
