"""The steps of a preparation, which the recipes call in their order.

They leave in DEST
  raw/  the text before tokenization          bpe/  subwords, and codes or sentencepiece.model
  tok/  tokenized, as it is scored            bin/  fairseq's binary data
  settings.txt  what it was made with, name=value, then the checksums of the text (settings.py)
  counts.txt    name=value: SPLIT, the pairs in it; SPLIT.read and SPLIT.removed if there was cleaning
  removed.tsv   (with cleaning) each removed pair: split, line in text/, reason, tokens of both sides
raw, tok, bpe and bin have the same sentences, line by line. Cleaning removes pairs, and nothing else does.

Each step leaves whole files or none and is skipped where its files are there: a preparation that was interrupted is
started again and ends in the same bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pn_fairseq.common.command import UserError, say
from pn_fairseq.common.files import checksum, count_lines, read_settings, recorded, scratch_folder, write_settings
from pn_fairseq.pipeline.data import archives, pairs, settings, subwords, tokens
from pn_fairseq.pipeline.data.binarize import SPLITS, make_bin
from pn_fairseq.pipeline.data.parallel import Job, Work, per_line, transform


@dataclass(frozen=True)
class Option:
    """An option of a recipe; its value is an argument of the recipe's ``prepare``."""

    flag: str  # --some-name
    metavar: str  # "": a flag without a value
    help: str
    default: object = None
    needed: bool = False
    type: Callable = str

    @property
    def name(self) -> str:
        """The name of the argument."""
        return self.flag.removeprefix("--").replace("-", "_")

    def add_to(self, parser) -> None:
        """Add the option to a parser, or to a group of one."""
        kind = {"metavar": self.metavar, "type": self.type, "default": self.default, "required": self.needed}
        parser.add_argument(self.flag, help=self.help, **(kind if self.metavar else {"action": "store_true"}))


#: Options of several recipes.
CORPUS = Option("--corpus", "DIR", "the folder with the text", needed=True)
KEEP_CASE = Option("--keep-case", "", "do not lower-case")


def bpe(default: int) -> Option:
    """The size of the subwords."""
    return Option("--bpe", "N", f"merge operations of the joint BPE (default {default})", default)


class Complete(Exception):
    """All steps are done."""


def need_text(folder: str, *names: str) -> Path:
    """The absolute path of a folder that must have these files, plain or .gz."""
    if not Path(folder).is_dir():
        raise UserError(f"there is no directory '{folder}' (--corpus)")
    for name in names:
        if not (Path(folder, name).is_file() or Path(folder, f"{name}.gz").is_file()):
            raise UserError(f"{folder} has neither {name} nor {name}.gz")
    return Path(folder).absolute()


class Preparation:
    """The steps for the folder ``dest``. Names of folders are folders in it; DEST/partial is removed at the end.

    Args:
        dest: the prepared data; None: ``runs/data/NAME``, where the recipe names it.
        workers: processes.
    """

    def __init__(self, dest: Path | None, workers: int):
        self._given, self.workers, self._stack = dest, workers, contextlib.ExitStack()
        self.settings: dict[str, str] = {}

    def close(self) -> None:
        """Let other preparations have ``dest``."""
        self._stack.close()

    def begin(self, name: str, **values: object) -> None:
        """Check the settings of a translation corpus, those that differ from their defaults, and open ``dest``.

        In the environment, MOSES and BPE choose the tokenizer and the kind of subwords.
        """
        if os.environ.get("MOSES"):
            values = {"tokenizer": "moses", **values}
        self.settings = settings.check({"segmentation": os.environ.get("BPE") or "subword-nmt", **values})
        if self.settings["tokenizer"] == "moses":
            tokens.checkout(self.settings)
        self.open(name)

    def open(self, name: str) -> None:
        """Make ``dest``, by default ``runs/data/NAME``, and keep other preparations out of it until this one ends."""
        self.dest = (self._given or Path("runs/data") / name).absolute()
        try:
            self.dest.mkdir(parents=True, exist_ok=True)
            lock = self._stack.enter_context((self.dest / ".lock").open("a"))
        except OSError as error:
            raise UserError(f"cannot write in the directory '{self.dest}' ({error.strerror}) (--dest)") from None
        os.set_inheritable(lock.fileno(), True)  # a process of this one that outlives a kill -9 is waited for
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("prepare", f"another process prepares {self.dest}; waiting for it to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        self.partial = self._stack.enter_context(scratch_folder(self.dest / "partial"))

    def files(self, of: Sequence[str] = SPLITS) -> list[str]:
        """SPLIT.LANG of these splits."""
        return settings.files(self.settings, of)

    # --- the published text ---

    def published(self, known: Mapping[str, str], archive: str | None = None) -> list[Path]:
        """The files of these addresses, downloaded to DEST/download; none if DEST/text was made of them.

        Args:
            known: address -> the checksum that a download must have ("": not known).
            archive: the user's folder with the files, or the file, instead (--archive).
        """
        place = Path(archive).absolute() if archive else self.dest / "download"
        files = [place if archive and place.is_file() else place / url.rsplit("/", 1)[-1] for url in known]
        self._archives, sums = files, self.dest / "text/archives"
        if sums.is_file() and (not all(map(Path.is_file, files)) or sums.read_text("utf-8") == self._sums()):
            return []
        for file, url in zip(files, known, strict=True):
            if not archive:
                archives.fetch(url, file, known[url])
            elif not file.is_file():
                raise UserError(f"there is no {file.name} in '{file.parent}' (--archive); it comes from {url}")
        return files

    def _sums(self) -> str:
        """What sha256sum prints for the published files."""
        return "".join(f"{checksum(file)}  {file.name}\n" for file in self._archives)

    def unpack(self, archive: Path, members: Sequence[str]) -> list[Path]:
        """Extract members of an archive to DEST/partial/unpacked/ARCHIVE."""
        try:
            return archives.unpack(archive, self.partial / "unpacked" / archive.name, members)
        except archives.Damaged as error:
            if archive.parent != self.dest / "download":
                raise UserError(f"{error}; get it again") from None
            archive.unlink()
            raise UserError(f"{error}; it was removed, and the same command downloads it again") from None

    def take(self, reader: pairs.Reader, split: str, files: Sequence[Path], expect: int = 0, to: str = "") -> None:
        """Append the sentences of published files, in pairs of source and target, to the text of a split.

        Args:
            expect: the number of pairs of the published files (0: not known).
            to: a folder within the text.
        """
        outputs = [self.partial / "text" / to / name for name in self.files([split])]
        both = zip(files[::2], files[1::2], strict=True)
        count = sum(pairs.take(reader, paths, outputs) for paths in both)
        if expect and count != expect:
            name = os.path.commonprefix([path.name for path in files]).rstrip(".-")
            say("prepare", f"note: {name} has {count} sentence pairs here; the published one has {expect}")

    def keep_text(self, to: str) -> None:
        """The text that was read becomes the folder ``to``, unless that exists; "text" gets its archives' checksums.

        It and the settings must be those that DEST was begun with.
        """
        new, folder = self.partial / "text", self.dest / to
        self.settings = settings.keep(self.dest, new if new.exists() else folder, self.settings)
        if not folder.exists():
            if to == "text":
                (new / "archives").write_text(self._sums(), encoding="utf-8")
            new.rename(folder)
        if (self.dest / "bin").is_dir() and recorded(self.dest, "counts").is_file():
            self.finish({})
            raise Complete

    def take_folder(self, folder: Path, test: str = "test", expect: Sequence[int] = ()) -> None:
        """The text of train, valid and ``test`` in a folder, as it came: DEST/raw."""
        for split, name, count in zip(SPLITS, ("train", "valid", test), [*expect, 0, 0, 0], strict=False):
            languages = self.settings["source"], self.settings["target"]
            self.take(pairs.as_is, split, [folder / f"{name}.{lang}" for lang in languages], count)
        self.keep_text("raw")

    # --- the steps after it ---

    def transform(
        self, label: str, source: str, to: str, work: Callable[[str, str], Work], splits: Sequence[str] = SPLITS
    ) -> None:
        """Make the files that are missing in a folder; ``work`` is called with the split and the language of each."""
        paths = [(self.dest / source / name, self.dest / to / name) for name in self.files(splits)]
        jobs = [Job(path, output, work(*path.name.split("."))) for path, output in paths if path.exists()]
        transform(jobs, self.workers, label, self.partial / "pieces")

    def copy(self, source: str, to: str) -> None:
        """Copy text."""
        self.transform("copying", source, to, lambda *_: bytes)

    def detokenize(self, source: str, to: str) -> None:
        """Turn tokens into plain text, by the detokenizer that ``pn score`` uses for translations."""
        from pn_fairseq.pipeline.scoring import detokenize

        say("prepare", "detokenizing")
        self.transform("detokenizing", source, to, lambda _, lang: per_line(lambda line: detokenize([line], lang)[0]))

    def tokenize(self, source: str, to: str, splits: Sequence[str] = (), without: Sequence[str] = ()) -> None:
        """Tokenize these splits (default: all that the text has), without these settings."""
        splits = splits or settings.splits(self.settings)
        moses = self.settings["tokenizer"] == "moses"
        say("prepare", f"tokenizing {' '.join(splits)} with {os.environ['MOSES'] if moses else 'sacremoses'}")
        used, straight = {**self.settings, **dict.fromkeys(without, "0")}, self.settings["straighten"].split()

        def work(split: str, lang: str) -> Work:
            return tokens.tokenizer(used, lang, split in straight)

        self.transform("tokenizing", source, to, work, splits)

    def select(self, **folders: str) -> None:
        """Remove pairs by their length, and take the validation set from the training text: DEST/raw, tok, ..."""
        say("prepare", "selecting pairs")
        paths = {name: self.dest / folder for name, folder in folders.items()}
        pairs.select(self.dest, self.settings, paths, self.partial / "selected")

    def segment(self, source: str = "tok", to: str = "bpe") -> None:
        """Learn subwords on the tokens of both languages, and apply them."""
        kind, folder = self.settings["segmentation"], self.dest / source
        model = self.dest / to / subwords.MODELS[kind]
        say("prepare", f"learning {self.settings['bpe']} BPE operations on both languages with {kind}")
        subwords.learn(kind, int(self.settings["bpe"]), model, [folder / name for name in self.files(["train"])])
        say("prepare", "applying BPE")
        if kind == "sentencepiece":
            for path in (folder / name for name in self.files() if (folder / name).exists()):
                with path.open("rb") as file:
                    if count := sum("▁".encode() in line for line in file):
                        which = f"{count} lines of {path} have U+2581 (▁)"
                        say("prepare", f"note: {which}, which sentencepiece takes for a blank")
        work = per_line(subwords.segmenter(kind, model))
        self.transform("applying BPE", source, to, lambda *_: work)

    def binarize(self) -> None:
        """Make fairseq's binary data, bin/, from bpe/; remove what is not needed any more, and print the counts."""
        say("prepare", "binarizing with fairseq-preprocess")
        source, target = self.settings["source"], self.settings["target"]
        flags = ["--source-lang", source, "--target-lang", target]
        flags += ["--joined-dictionary"] if self.settings["separate_dictionaries"] == "0" else []
        flags += [f"--{split}pref=bpe/{split}" for split in SPLITS]
        names = (name.split(".") for name in self.files())
        texts = {f"{split}.{source}-{target}.{lang}": f"bpe/{split}.{lang}" for split, lang in names}
        make_bin(self.dest, self.workers, flags, texts)
        self.finish({split: count_lines(self.dest / f"raw/{split}.{source}") for split in SPLITS})
        counts = read_settings(recorded(self.dest, "counts"))
        if (self.dest / "removed.tsv").is_file():
            removed = f"cleaning removed {counts['train.removed']} of {counts['train.read']} training pairs"
            say("prepare", f"{removed} (which and why: {self.dest}/removed.tsv)")
        say("prepare", f"{self.dest} is complete: {', '.join(f'{counts[split]} {split}' for split in SPLITS)}")

    def finish(self, counts: Mapping[str, object]) -> None:
        """Write the counts, unless the cleaning has, and remove what is not needed any more."""
        if not recorded(self.dest, "counts").exists():
            write_settings(recorded(self.dest, "counts"), counts)
        shutil.rmtree(self.dest / "stages", ignore_errors=True)
