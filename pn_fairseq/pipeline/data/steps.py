"""``python -m pn_fairseq data --dest DEST STEP ...``: the steps that ``scripts/prepare_*.sh`` call one after the other.

The arguments of a step say which files it reads and writes, as paths in DEST; DEST/settings says what it does to them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pn_fairseq.common.command import ArgumentParser, UserError, command, say
from pn_fairseq.common.files import checksum, count_lines, write_settings
from pn_fairseq.pipeline.data import archives, language_model, pairs, settings, subwords
from pn_fairseq.pipeline.data.binarize import SPLITS, make_bin
from pn_fairseq.pipeline.data.parallel import per_line, transform


def check(args) -> None:
    """refuse settings that cannot be used"""
    settings.parse(args.settings)


def fetch(args) -> None:
    """download a file, or check one that is there"""
    archives.fetch(args.url, args.dest / args.file, args.sha256, args.md5)


def unpack(args) -> None:
    """extract members of an archive to unpacked/ARCHIVE"""
    archive = args.dest / args.archive
    try:
        archives.unpack(archive, args.dest / "unpacked" / archive.name, args.members)
    except archives.Damaged as error:
        if archive.parent != args.dest / "download":
            raise UserError(f"{error}; get it again") from None
        for name in (archive.name, f"{archive.name}.sha256"):
            archive.with_name(name).unlink(missing_ok=True)
        raise UserError(f"{error}; it was removed, and the same command downloads it again") from None


def take(args) -> None:
    """append sentences of published files, in pairs of source and target, to two files of text"""
    outputs = args.dest / args.outputs[0], args.dest / args.outputs[1]
    files = [args.dest / name for name in args.files]
    if len(files) % 2:
        raise UserError(f"{files[-1]} has no file of the other language")
    count = sum(pairs.take(args.kind, paths, outputs) for paths in zip(files[::2], files[1::2], strict=True))
    if args.expect and count != args.expect:
        name = os.path.commonprefix([path.name for path in files]).rstrip(".-")
        say("data", f"note: {name} has {count} sentence pairs here; the published one has {args.expect}")


def detokenize(args) -> None:
    """turn tokens into plain text, by the detokenizer that scripts/score.sh uses for translations"""
    from pn_fairseq.pipeline.scoring import detokenize as plain

    for path in sorted((args.dest / args.source).iterdir()):
        work = per_line(lambda line, lang=path.suffix[1:]: plain([line], lang)[0])
        job = (path, args.dest / args.to / path.name)
        transform([job], lambda work=work: work, args.workers, f"detokenizing {path.name}")


def keep_text(args) -> None:
    """record the settings and text.partial, or refuse them; text.partial becomes the folder TO"""
    chosen = settings.parse(args.settings)
    new, folder = args.dest / "text.partial", args.dest / args.to
    if not new.exists():
        settings.keep(args.dest, folder, chosen)
        return
    settings.keep(args.dest, new, chosen)
    if args.made_of:
        sums = "".join(f"{checksum(args.dest / name)}  {Path(name).name}\n" for name in args.made_of)
        (new / "archives").write_text(sums, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        new.rename(folder)


def copy(args) -> None:
    """copy text"""
    names = settings.files(settings.read(args.dest))
    jobs = [(args.dest / args.source / name, args.dest / args.to / name) for name in names]
    transform(jobs, lambda: bytes, args.workers, "copying")


def tokenize(args) -> None:
    """tokenize text"""
    from pn_fairseq.pipeline.data.tokens import tokenizer

    chosen = settings.read(args.dest)
    used = {**chosen, **dict.fromkeys(args.without, "0")}
    source, straight = args.dest / args.source, chosen["straighten"].split()
    for lang in (chosen["source"], chosen["target"]):
        for straighten in (False, True):
            names = [f"{split}.{lang}" for split in args.splits or SPLITS if (split in straight) == straighten]
            jobs = [(source / name, args.dest / args.to / name) for name in names if (source / name).exists()]

            def make(lang=lang, straighten=straighten):
                return tokenizer(used, lang, straighten, os.environ.get("MOSES", ""))

            transform(jobs, make, args.workers, f"tokenizing {lang}")


def select(args) -> None:
    """remove pairs by their length, and take the validation set from the training text"""
    folders = {name: args.dest / folder for name, folder in (word.split("=", 1) for word in args.folders)}
    chosen = settings.read(args.dest)
    pairs.select(args.dest, chosen, settings.splits(chosen), folders)


def learn_bpe(args) -> None:
    """learn subwords from the tokens of both languages"""
    chosen = settings.read(args.dest)
    kind, folder = chosen["segmentation"], args.dest / args.source
    texts = [folder / name for name in settings.files(chosen, ["train"])]
    subwords.learn(kind, int(chosen["bpe"]), args.dest / args.to / subwords.MODELS[kind], texts)


def apply_bpe(args) -> None:
    """segment tokens into subwords"""
    chosen = settings.read(args.dest)
    kind, source, to = chosen["segmentation"], args.dest / args.source, args.dest / args.to
    names = [name for name in settings.files(chosen, SPLITS) if (source / name).exists()]
    if kind == "sentencepiece":
        for name in names:
            with (source / name).open("rb") as file:
                if count := sum("▁".encode() in line for line in file):
                    which = f"{count} lines of {source / name} have U+2581 (▁)"
                    say("data", f"note: {which}, which sentencepiece takes for a blank")
    model = to / subwords.MODELS[kind]
    jobs = [(source / name, to / name) for name in names]
    transform(jobs, lambda: per_line(subwords.segmenter(kind, model)), args.workers, "applying BPE")


def binarize(args) -> None:
    """make fairseq's binary data, bin/, from bpe/"""
    chosen = settings.read(args.dest)
    pair = f"{chosen['source']}-{chosen['target']}"
    flags = ["--source-lang", chosen["source"], "--target-lang", chosen["target"], "--joined-dictionary"]
    flags += [f"--{split}pref=bpe/{split}" for split in SPLITS]
    names = (name.split(".") for name in settings.files(chosen, SPLITS))
    texts = {f"{split}.{pair}.{lang}": f"bpe/{split}.{lang}" for split, lang in names}
    make_bin(args.dest, args.workers, flags, texts)


def finish(args) -> None:
    """write counts, and remove what is not needed any more"""
    source = settings.read(args.dest)["source"]
    if not (args.dest / "counts").exists():
        counts = {split: count_lines(args.dest / f"raw/{split}.{source}") for split in SPLITS}
        write_settings(args.dest / "counts", counts)
    shutil.rmtree(args.dest / "stages", ignore_errors=True)
    for partial in (path for folder in ("tok", "bpe") for path in (args.dest / folder).glob("*.partial")):
        partial.unlink()


def lm_verses(args) -> None:
    """write the English verses, split by book, to the folder TO"""
    language_model.verses(args.corpus, args.dest / args.to)


def unzip(args) -> None:
    """extract members of a zip archive to the folder TO"""
    language_model.unzip(args.dest / args.archive, args.dest / args.to, args.members)


def lm_text(args) -> None:
    """make the data of a language model from the texts of train, valid and test"""
    texts = [args.dest / text for text in args.texts]
    options = (args.name, args.tokenize, args.lower, args.min_count, args.expect, args.workers)
    language_model.prepare(args.dest, texts, *options)


#: Step -> its arguments, as argparse takes them.
STEPS = {
    check: [("settings", {"nargs": "+"})],
    fetch: [("url", {}), ("file", {}), ("--sha256", {"default": ""}), ("--md5", {"default": ""})],
    unpack: [("archive", {}), ("members", {"nargs": "+"})],
    take: [
        ("kind", {"choices": [*pairs.READERS, "sgml-segments"]}),
        ("outputs", {"nargs": 2}),
        ("files", {"nargs": "+"}),
        ("--expect", {"type": int, "help": "the number of pairs of the published files"}),
    ],
    detokenize: [("source", {}), ("to", {})],
    keep_text: [("to", {}), ("settings", {"nargs": "+"}), ("--made-of", {"nargs": "+"})],
    copy: [("source", {}), ("to", {})],
    tokenize: [("source", {}), ("to", {}), ("splits", {"nargs": "*"}), ("--without", {"nargs": "+", "default": []})],
    select: [("folders", {"nargs": "+", "metavar": "NAME=FOLDER"})],
    learn_bpe: [("source", {}), ("to", {})],
    apply_bpe: [("source", {}), ("to", {})],
    binarize: [],
    finish: [],
    lm_verses: [("corpus", {"type": Path}), ("to", {})],
    unzip: [("archive", {}), ("to", {}), ("members", {"nargs": "+"})],
    lm_text: [
        ("name", {}),
        ("texts", {"nargs": 3}),
        ("--tokenize", {"default": "", "metavar": "LANG"}),
        ("--lower", {"action": "store_true"}),
        ("--min-count", {"type": int, "default": 1}),
        ("--expect", {"type": int, "nargs": 3, "default": ()}),
    ],
}


@command("pn-data")
def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m pn_fairseq data", description=__doc__.split("\n")[0])
    parser.add_argument("--dest", type=Path, required=True, help="the prepared data")
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    steps = parser.add_subparsers(required=True, metavar="STEP", parser_class=ArgumentParser)
    for function, arguments in STEPS.items():
        step = steps.add_parser(function.__name__.replace("_", "-"), help=function.__doc__)
        step.set_defaults(function=function)
        for name, options in arguments:
            step.add_argument(name, **options)
    args = parser.parse_args(argv)
    args.function(args)
