"""The steps of a preparation, which the recipes call in their order.

They fill the folders raw, tok, bpe and bin, which ``pn prepare CORPUS --help`` describes, with the same sentences, line
by line, and write
  settings.txt  what it was made with, name=value, then the checksums of the text (settings.py)
  counts.txt    name=value: SPLIT, the pairs in it; train.read and train.removed if there was cleaning
  removed.tsv   (with cleaning) each removed pair: split, line in text/, reason, tokens of both sides
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from pn_fairseq.common.command import UserError, say, whole
from pn_fairseq.common.files import checksum, count_lines, read_settings, scratch_folder, write_lines, write_settings
from pn_fairseq.pipeline import stamp
from pn_fairseq.pipeline.data import archives, languages, pairs, settings, subwords, tokens
from pn_fairseq.pipeline.data.binarize import SPLITS, make_bin, unknown_shares
from pn_fairseq.pipeline.data.parallel import Work, per_line, transform
from pn_fairseq.pipeline.data.restored import note_on

#: Options of several recipes: flag -> arguments of argparse's ``add_argument``.
CORPUS = {"--corpus": {"metavar": "DIR", "required": True, "help": "the folder with the text"}}
KEEP_CASE = {"--keep-case": {"action": "store_true", "help": "do not lower-case"}}
ARCHIVED = "the folder that has the published files, or the only file, instead of the download to DIR/download"
ARCHIVE = {"--archive": {"metavar": "PATH", "help": ARCHIVED}}


def bpe(default: int) -> dict[str, dict]:
    """The option for the size of the subwords."""
    text = f"merge operations of the joint BPE (default {default})"
    return {"--bpe": {"metavar": "N", "type": whole, "default": default, "help": text}}


class Complete(Exception):
    """All steps are done."""


class Preparation(contextlib.ExitStack):
    """The steps for the folder ``dest``. Names of folders are folders in it; DEST/partial is removed at the end.

    Args:
        dest: the prepared data; None: ``runs/data/NAME``, where the recipe names it.
        workers: processes.
        check: only refuse a ``dest`` that was made with other settings.
        moses: a checkout of mosesdecoder, whose scripts replace sacremoses.
        segmentation: the kind of subwords, a key of :data:`subwords.MODELS`.
        mirror: a folder, or the URL of one, that has the files to download.
    """

    def __init__(
        self,
        dest: Path | None,
        workers: int,
        check: bool = False,
        moses: Path | None = None,
        segmentation: str = "subword-nmt",
        mirror: str | None = None,
    ):
        super().__init__()
        self._given, self.workers, self._check = dest, workers, check
        self._moses, self._segmentation, self._mirror = moses, segmentation, mirror
        self.splits: Sequence[str] = SPLITS  # further test sets are test1, test2, ..., as fairseq calls them
        self._archives: Sequence[Path] = ()
        self._like: Path | None = None  # the prepared data whose subwords and dictionaries are used

    def begin(self, name: str, **values: object) -> None:
        """Take the settings of a translation corpus that differ from their defaults, and open ``dest``."""
        if self._moses and "tokenizer" in values:
            raise UserError("--moses: this text comes in tokens; leave the option out")
        values |= {"tokenizer": "moses"} if self._moses else {}
        values = {"segmentation": self._segmentation, **values}
        if unknown := values.keys() - {*settings.DEFAULTS, *settings.OPTIONAL}:
            raise TypeError(f"there is no setting {', '.join(unknown)}")
        complete = {**settings.DEFAULTS, **{name: str(value) for name, value in values.items()}}
        if complete["tokenizer"] == "moses":
            tokens.checkout(complete, self._moses)
        if package := languages.missing_package(complete["target"]):
            say("prepare", f"note: detokenized BLEU of {complete['target']} needs: pip install '{package}'")
        self.open(name, complete)

    def begin_like(self, other: Path, **given: str | None) -> None:
        """Take the settings, subwords and dictionaries of other prepared data, and open ``dest``.

        Args:
            given: settings that the user named and the other data must have.
        """
        self._like, old = other.absolute(), read_settings(other / "settings.txt")
        if not old.get("source") or not (other / "bin").is_dir():
            raise UserError(f"'{other}' is no prepared data of a translation corpus (--like)")
        given |= {"tokenizer": "moses"} if self._moses else {}
        given |= {"segmentation": self._segmentation} if self._segmentation != "subword-nmt" else {}
        for name, value in given.items():
            if value not in (None, old[name]):
                raise UserError(f"'{other}' has {name}={old[name]}, not {value} (--like)")
        # Cleaning and a part for validation are not settings of the model; --moses sets the tokenizer.
        others = {"clean", "valid_every", *(["tokenizer"] if self._moses else [])}
        kept = [name for name in (*settings.DEFAULTS, *settings.OPTIONAL) if name in old and name not in others]
        self.begin("", **{name: old[name] for name in kept})

    def open(self, name: str, made_with: dict[str, str]) -> None:
        """Make ``dest``, by default ``runs/data/NAME``, and keep other preparations out of it until this one ends."""
        self.dest, self.settings = (self._given or Path("runs/data") / name).absolute(), made_with
        settings.check(self.dest, self.settings, {})  # before anything is downloaded
        if self._check:
            raise Complete
        while True:
            self.dest.mkdir(parents=True, exist_ok=True)
            lock = self.enter_context((self.dest / ".lock").open("a"))
            os.set_inheritable(lock.fileno(), True)  # a process of this one that outlives a kill -9 is waited for
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("prepare", f"another process prepares {self.dest}; waiting for it to end")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock.fileno()).st_nlink:  # else the other process has removed it
                break
        self.callback(self._unlock)
        self.partial = self.enter_context(scratch_folder(self.dest / "partial"))

    def _unlock(self) -> None:
        (self.dest / ".lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds something
            self.dest.rmdir()

    def files(self, of: Sequence[str] = ()) -> list[str]:
        """The names of the files of these splits, by default all: SPLIT.LANG, or SPLIT.txt for language models."""
        endings = [self.settings["source"], self.settings["target"]] if "source" in self.settings else ["txt"]
        return [f"{split}.{ending}" for split in of or self.splits for ending in endings]

    # --- the published text ---

    def published(self, known: Mapping[str, str], archive: str | None = None) -> list[Path]:
        """The files of these addresses, downloaded to DEST/download; none if DEST/text was made of them.

        Args:
            known: address -> the checksum that a download must have ("": not known).
            archive: the user's folder with the files, or the file, instead (--archive).
        """
        place = Path(archive).absolute() if archive else self.dest / "download"
        files = [place if place.is_file() else place / url.rsplit("/", 1)[-1] for url in known]
        self._archives, sums = files, self.dest / "text/archives"
        if sums.is_file() and (not all(map(Path.is_file, files)) or sums.read_text("utf-8") == self._sums()):
            return []
        for file, url in zip(files, known, strict=True):
            if not archive:
                archives.fetch(url, file, known[url], self._mirror)
            elif not file.is_file():
                raise UserError(f"there is no {file.name} in '{file.parent}' (--archive); it comes from {url}")
        return files

    def _sums(self) -> str:
        """What sha256sum prints for the published files."""
        return "".join(f"{checksum(file)}  {file.name}\n" for file in self._archives)

    def unpack(self, archive: Path, members: Sequence[str]) -> list[Path]:
        """Extract members of an archive to DEST/partial/unpacked/ARCHIVE."""
        return archives.unpack(archive, self.partial / "unpacked" / archive.name, members)

    def take(self, reader: pairs.Reader, split: str, files: Sequence[Path], expect: int = 0, to: str = "") -> None:
        """Append the sentences of published files to the text of a split.

        Args:
            files: source and target in turn; each pair of files must have as many sentences.
            expect: the number of pairs of the published files (0: not known).
            to: a folder within the text.
        """
        outputs = [self.partial / "text" / to / name for name in self.files([split])]
        total = 0
        for paths in zip(files[::2], files[1::2], strict=True):
            counts = [pairs.append(reader, path, output) for path, output in zip(paths, outputs, strict=True)]
            if counts[0] != counts[1]:
                has = f"{paths[0]} has {counts[0]} lines and {paths[1]} {counts[1]}"
                raise UserError(f"{has}: they are not translations of each other")
            total += counts[0]
        if expect and total != expect:
            common = os.path.commonprefix([path.name for path in files])
            name = re.sub("[.-][^.-]*$", "", common)  # train.es and train.en begin with train.e
            say("prepare", f"note: {name} has {total} sentence pairs here; the published one has {expect}")

    def keep_text(self, to: str, codes: Path | None = None) -> None:
        """The text that was read becomes the folder ``to``, unless that exists; "text" gets its archives' checksums.

        It, the settings and the subwords' codes that the user gave must be those that DEST was begun with.
        """
        if codes and self.settings["segmentation"] != "subword-nmt":
            raise UserError("--codes has merges of subword-nmt: leave out --segmentation")
        new, folder = self.partial / "text", self.dest / to
        texts = [(new if new.exists() else folder) / name for name in self.files()]
        sums = {path.name: checksum(path) for path in texts if path.exists()}
        given = self.partial / "codes"
        if codes:
            write_lines(given, subwords.merges(codes))
        elif self._like and (model := self._like / "bpe" / subwords.MODELS[self.settings["segmentation"]]).is_file():
            shutil.copyfile(model, given)
        sums |= {"codes": checksum(given)} if given.exists() else {}
        sums |= {path.name: checksum(path) for path in self._dictionaries()}
        settings.check(self.dest, self.settings, sums)
        wanted, outputs = {**self.settings, **sums}, (self.dest / "bin", self.dest / "counts.txt")
        if stamp.done("prepare", self.dest / "settings.txt", wanted, *outputs):
            self.finish({})
            raise Complete
        write_settings(self.dest / "settings.txt", self.settings, sums)
        if not folder.exists():
            if self._archives:
                (new / "archives").write_text(self._sums(), encoding="utf-8")
            new.rename(folder)

    def prepare_folder(
        self, folder: Path, test: str = "test", expect: Sequence[int] = (0, 0, 0), codes: Path | None = None
    ) -> None:
        """All steps for the text of train, valid and ``test`` in a folder.

        Args:
            codes: the merges of the subwords, which are learned otherwise.
            expect: the numbers of pairs of the published text (0: not known).
        """
        for split, name, count in zip(SPLITS, ("train", "valid", test), expect, strict=True):
            paths = [folder / f"{name}.{self.settings[side]}" for side in ("source", "target")]
            self.take(pairs.as_is, split, paths, count)
        self.keep_text("raw", codes)
        self.tokenize("raw", "tok")
        self.segment()
        self.binarize()

    def prepare_tokens(
        self, texts: Mapping[str, Sequence[Path]], codes: Path | None, expect: Sequence[int] = ()
    ) -> None:
        """All steps for text that comes in tokens, or in subwords (``@@``) of them, which are taken as they are.

        DEST/text has it as it came, and DEST/raw is the plain text that the detokenizer makes of it.

        Args:
            texts: split -> the files of source and target.
            codes: the merges of the subwords, which are learned otherwise.
            expect: the numbers of pairs of the published text.
        """
        reader = pairs.lower_cased_tokens if self.settings["lower"] == "1" else pairs.own_tokens
        for (split, files), count in zip(texts.items(), expect or [0] * len(texts), strict=True):
            self.take(reader, split, files, count)
        self.keep_text("text", codes)
        in_subwords = subwords.are_in(self.dest / "text" / name for name in self.files(["train"]))
        say("prepare", f"the text comes in {'subwords' if in_subwords else 'tokens'}, which are taken as they are")
        join = per_line(subwords.join) if in_subwords else bytes
        self.transform("copying tokens", "text", "tok", lambda *_: join)
        self.detokenize("tok", "raw")
        if in_subwords:
            self.take_codes()
            self.transform("copying subwords", "text", "bpe", lambda *_: bytes)
        else:
            self.segment()
        self.binarize()

    # --- the steps after it ---

    def transform(
        self, label: str, source: str, to: str, work: Callable[[str, str], Work], splits: Sequence[str] = ()
    ) -> None:
        """Make the files that are missing in a folder; ``work`` is called with the split and the language of each."""
        say("prepare", label)
        for name in self.files(splits):
            path, output = self.dest / source / name, self.dest / to / name
            if path.exists() and not output.exists():
                transform(path, output, work(*name.split(".")), self.workers, f"{label}: {name}")

    def detokenize(self, source: str, to: str) -> None:
        """Turn tokens into plain text, by the detokenizer that ``pn score`` uses for translations."""

        def work(_: str, lang: str) -> Work:
            return per_line(lambda line: tokens.detokenize([line], lang)[0])

        self.transform("detokenizing", source, to, work)

    def tokenize(self, source: str, to: str, splits: Sequence[str] = (), without: Sequence[str] = ()) -> None:
        """Tokenize these splits, without these settings."""
        used, straight = {**self.settings, **dict.fromkeys(without, "0")}, self.settings["straighten"].split()
        tool = self._moses if used["tokenizer"] == "moses" else "sacremoses"

        def work(split: str, lang: str) -> Work:
            return tokens.tokenizer(used, lang, split in straight, self._moses)

        self.transform(f"tokenizing with {tool}", source, to, work, splits)
        for lang in (self.settings["source"], self.settings["target"]):
            names = [f"{split}.{lang}" for split in splits or self.splits if split != "train"]
            texts = [(self.dest / source / name, self.dest / to / name) for name in names]
            notes = (note_on(raw, tok, self.settings) for raw, tok in texts if raw.exists())
            if note := next(filter(None, notes), None):
                say("prepare", note)

    def select(self) -> None:
        """Write raw/ and tok/, the pairs of text/ and stages/tok/ that are kept, removed.tsv and counts.txt.

        The setting ``clean`` says which training pairs are removed. With ``valid_every=N`` each N-th training pair that
        is kept becomes one of the validation set.
        """
        if (self.dest / "counts.txt").exists():
            return
        say("prepare", "selecting pairs")
        made, sources = self.partial / "selected", {"raw": self.dest / "text", "tok": self.dest / "stages/tok"}
        for stage, folder in sources.items():
            (made / stage).mkdir(parents=True)
            for name in self.files(["valid", "test"]):
                if (folder / name).exists():
                    shutil.copy(folder / name, made / stage)
        least, most, ratio = (float(number) for number in self.settings["clean"].split())
        valid_every, number, reasons = int(self.settings["valid_every"]), 0, Counter()
        with contextlib.ExitStack() as stack:

            def opened(split: str, mode: str, folders: Iterable[Path]) -> list[BinaryIO]:
                paths = [folder / name for folder in folders for name in self.files([split])]
                return [stack.enter_context(path.open(mode)) for path in paths]

            train, valid = (opened(split, "ab", [made / stage for stage in sources]) for split in ("train", "valid"))
            removed = stack.enter_context((made / "removed.tsv").open("w", encoding="utf-8"))
            removed.write("split\tline\treason\ttokens {source}\ttokens {target}\n".format_map(self.settings))
            for number, lines in enumerate(zip(*opened("train", "rb", sources.values()), strict=True), 1):
                source, target = (line.decode("utf-8").split() for line in lines[2:])  # the tokens
                if reason := pairs.objection(source, target, least, most, ratio):
                    reasons[reason] += 1
                    removed.write(f"train\t{number}\t{reason}\t{len(source)}\t{len(target)}\n")
                    continue
                for_valid = valid_every and (number - reasons.total()) % valid_every == 0
                for file, line in zip(valid if for_valid else train, lines, strict=True):
                    file.write(line)
        counts = {"train.read": number, "train.removed": reasons.total()}
        counts |= {f"train.removed.{reason.replace(' ', '_')}": reasons[reason] for reason in sorted(reasons)}
        counts |= {split: count_lines(made / "raw" / self.files([split])[0]) for split in SPLITS}
        if empty := [split for split in SPLITS if not counts[split]]:
            numbers = ", ".join(f"{name}={count}" for name, count in counts.items())
            raise UserError(f"no sentence pair of {empty[0]} is left ({numbers})")
        write_settings(made / "counts.txt", counts)
        for name in (*sources, "removed.tsv", "counts.txt"):  # the counts are moved last and say that all is there
            shutil.rmtree(self.dest / name, ignore_errors=True)
            os.replace(made / name, self.dest / name)

    def segment(self) -> None:
        """Learn subwords on the tokens of both languages, unless they were given, and apply them."""
        kind, size = self.settings["segmentation"], int(self.settings["bpe"])
        model = self.dest / "bpe" / subwords.MODELS[kind]
        self.take_codes()
        if not model.exists():
            say("prepare", f"learning {size} BPE operations on both languages with {kind}")
            train = [self.dest / "tok" / name for name in self.files(["train"])]
            subwords.learn(kind, size, model, train, tokens.protected(self.settings))
        work = per_line(subwords.segmenter(kind, model, tokens.protected(self.settings)))
        self.transform("applying BPE", "tok", "bpe", lambda *_: work)

    def take_codes(self) -> None:
        """Move the codes that :meth:`keep_text` was given, if any, to bpe/."""
        given, model = self.partial / "codes", self.dest / "bpe" / subwords.MODELS[self.settings["segmentation"]]
        if given.exists():
            model.parent.mkdir(parents=True, exist_ok=True)
            given.replace(model)

    def _dictionaries(self) -> list[Path]:
        """The dictionaries of the other data that this is prepared like: one, or one for each language."""
        sides = [self.settings["source"], self.settings["target"]] if self._like else []
        joined = self.settings.get("separate_dictionaries") == "0"
        return [self._like / f"bin/dict.{lang}.txt" for lang in sides[: 1 if joined else 2]]

    def binarize(self, expected: str = "") -> None:
        """Make fairseq's binary data, bin/, from bpe/. ``expected``: the counts that the original text gives."""
        source, target = self.settings["source"], self.settings["target"]
        flags = ["--source-lang", source, "--target-lang", target, "--trainpref=bpe/train", "--validpref=bpe/valid"]
        flags += ["--testpref=" + ",".join(f"bpe/{split}" for split in self.splits[2:])]
        flags += ["--joined-dictionary"] if self.settings["separate_dictionaries"] == "0" else []
        flags += [
            f"{flag}={path}" for flag, path in zip(("--srcdict", "--tgtdict"), self._dictionaries(), strict=False)
        ]
        names = (name.split(".") for name in self.files())
        texts = {f"{split}.{source}-{target}.{lang}": f"bpe/{split}.{lang}" for split, lang in names}
        make_bin(self.dest, self.workers, flags, texts)
        if self._like:
            for text, share in unknown_shares(self.dest / "bin").items():
                if share != "0.0":
                    say(
                        "prepare", f"note: {share}% of the subwords of {text} are not in the dictionary of {self._like}"
                    )
        self.finish({split: count_lines(self.dest / f"raw/{split}.{source}") for split in self.splits}, expected)

    def finish(self, counts: Mapping[str, object], expected: str = "") -> None:
        """Write the counts, unless the cleaning has, remove what is not needed any more, and print the counts."""
        if not (self.dest / "counts.txt").exists():
            write_settings(self.dest / "counts.txt", counts)
        shutil.rmtree(self.dest / "stages", ignore_errors=True)
        kept = read_settings(self.dest / "counts.txt")
        if "train.removed" in kept:
            removed = f"cleaning removed {kept['train.removed']} of {kept['train.read']} training pairs"
            say("prepare", f"{removed} (which and why: {self.dest}/removed.tsv)")
        made = ", ".join(f"{int(kept[split]):,} {split}" for split in self.splits)
        say("prepare", f"{self.dest} is complete: {made}{expected and f' (expected: {expected})'}")
