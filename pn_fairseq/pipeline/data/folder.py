"""A folder of prepared data, and the steps that fill it, which the recipes call in their order.

The steps fill the folders raw, tok, bpe and bin, which ``pn prepare CORPUS --help`` describes, with
the same sentences, line by line, and write
  settings.txt  the settings of the data, name=value, then the checksums of the text (settings.py)
  counts.txt    name=value: SPLIT, the pairs in it; after a cleaning train.read and train.removed
  removed.tsv   after a cleaning each removed pair: split, line in text/, reason, tokens of both
                sides
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from pn_fairseq.common.command import UserError, absolute, say, whole
from pn_fairseq.common.files import (
    checksum,
    count_lines,
    read_settings,
    write_lines,
    write_settings,
)
from pn_fairseq.pipeline import stamp
from pn_fairseq.pipeline.data import archives, pairs, subwords, tokens
from pn_fairseq.pipeline.data.binarize import (
    SPLITS,
    fault,
    make_bin,
    unknown_shares,
    words_in,
)
from pn_fairseq.pipeline.data.parallel import Work, per_line, transform
from pn_fairseq.pipeline.data.restored import note_on
from pn_fairseq.pipeline.data.settings import MOSES, NONE, LanguageModelSettings, Settings, check
from pn_fairseq.pipeline.data.suspicious import notes_on

#: Options of several recipes: flag -> arguments of argparse's ``add_argument``.
CORPUS = {
    "--corpus": {
        "metavar": "DIR",
        "type": absolute,
        "required": True,
        "help": "the folder with the text",
    }
}
KEEP_CASE = {"--keep-case": {"action": "store_true", "help": "do not lower-case"}}
ARCHIVED = (
    "a folder with the published files, or the only file, in place of a download to DIR/download"
)
ARCHIVE = {"--archive": {"metavar": "PATH", "type": absolute, "help": ARCHIVED}}


def bpe(default: int) -> dict[str, dict]:
    """The option for the size of the subwords."""
    text = f"merge operations of the joint BPE (default {default})"
    return {"--bpe": {"metavar": "N", "type": whole, "default": default, "help": text}}


@contextlib.contextmanager
def locked(dest: Path) -> Iterator[None]:
    """Create the folder ``dest``, and keep other preparations out of it until the block ends."""
    while True:
        dest.mkdir(parents=True, exist_ok=True)
        with (dest / ".lock").open("a") as lock:
            # the lock also waits for a child process that outlives a kill -9 of this one
            os.set_inheritable(lock.fileno(), True)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("prepare", f"another process prepares {dest}; waiting for it to end")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.fstat(lock.fileno()).st_nlink:  # the other process has removed the lock file
                continue
            try:
                yield
                return
            finally:
                (dest / ".lock").unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # the folder is not empty
                    dest.rmdir()


@dataclass
class DataFolder:
    """The folder ``dest``, and the steps that fill it.

    Names of folders mean folders in ``dest``; DEST/partial is removed at the end.
    """

    dest: Path  # the prepared data; an absolute path
    settings: Settings | LanguageModelSettings
    workers: int = 1  # processes
    moses: Path | None = None  # a checkout of mosesdecoder, whose scripts replace sacremoses
    mirror: str | None = None  # a folder, or the URL of one, that contains the files to download
    # the user's folder with the published files, or the file, instead of a download
    archive: Path | None = None
    like: Path | None = None  # prepared data that supplies the subwords and dictionaries
    splits: Sequence[str] = SPLITS  # further test sets are test1, test2, ..., as fairseq calls them
    files_published: Sequence[Path] = ()

    @property
    def partial(self) -> Path:
        return self.dest / "partial"

    def files(self, of: Sequence[str] = ()) -> list[str]:
        """The names of the files of these splits, by default all: SPLIT.LANG, or SPLIT.txt for
        language models.
        """
        return [
            f"{split}.{ending}" for split in of or self.splits for ending in self.settings.endings
        ]

    # --- the published text ---

    def published(self, known: Mapping[str, str]) -> list[Path]:
        """The files at these addresses, downloaded to DEST/download; none if DEST/text was already
        made from them.

        Args:
            known: address -> the checksum that a download must have ("": unknown).
        """
        folder = self.archive or self.dest / "download"
        files = [folder / url.rsplit("/", 1)[-1] for url in known]
        if folder.is_file():
            files = [folder for _ in known]
        self.files_published = files
        sums = self.dest / "text/archives"
        if sums.is_file():
            all_there = all(map(Path.is_file, files))
            if not all_there or sums.read_text("utf-8") == self._sums():
                return []
        for file, url in zip(files, known, strict=True):
            if not self.archive:
                archives.fetch(url, file, known[url], self.mirror)
            elif not file.is_file():
                raise UserError(
                    f"there is no {file.name} in '{file.parent}' (--archive); it comes from {url}"
                )
        return files

    def _sums(self) -> str:
        """What sha256sum prints for the published files."""
        return "".join(f"{checksum(file)}  {file.name}\n" for file in self.files_published)

    def unpack(self, archive: Path, members: Sequence[str]) -> list[Path]:
        """Extract members of an archive to DEST/partial/unpacked/ARCHIVE."""
        return archives.unpack(archive, self.partial / "unpacked" / archive.name, members)

    def take(
        self, reader: pairs.Reader, split: str, files: Sequence[Path], expect: int = 0, to: str = ""
    ) -> None:
        """Append the sentences of published files to the text of a split.

        Args:
            files: source and target in turn; both files of a pair must contain the same number of
                sentences.
            expect: the number of pairs in the published files (0: unknown).
            to: a folder within the text.
        """
        to_source, to_target = (self.partial / "text" / to / name for name in self.files([split]))
        total = 0
        for source, target in zip(files[::2], files[1::2], strict=True):
            count = pairs.append(reader, source, to_source)
            of_target = pairs.append(reader, target, to_target)
            if count != of_target:
                lines = "line" if count == 1 else "lines"
                raise UserError(
                    f"{source} has {count} {lines} and {target} {of_target}: they are not "
                    "translations of each other"
                )
            total += count
        if expect and total != expect:
            common = os.path.commonprefix([path.name for path in files])
            name = re.sub("[.-][^.-]*$", "", common)  # train.es and train.en share train.e
            say(
                "prepare",
                f"note: {name} has {total} sentence pairs here; the published one has {expect}",
            )

    def begin(self, to: str, codes: Path | None = None) -> bool:
        """Begin to make DEST, or :meth:`finish` it if all of it is there already.

        The text that was read becomes the folder ``to``, unless that exists. The folder also gets
        the checksums of the published files.

        The text, the settings and the subwords' codes that the user gave, which go to bpe/, must be
        those that DEST was begun with.

        Returns:
            Whether a step is left to do.
        """
        if codes and self.settings.segmentation != "subword-nmt":
            raise UserError("--codes has merges of subword-nmt: leave out --segmentation")
        new, folder = self.partial / "text", self.dest / to
        texts = [(new if new.exists() else folder) / name for name in self.files()]
        sums = {path.name: checksum(path) for path in texts if path.exists()}
        given = self.partial / "codes"
        if codes:
            write_lines(given, subwords.merges(codes))
        elif self.like and self._model_in(self.like).is_file():
            shutil.copyfile(self._model_in(self.like), given)
        if given.exists():
            sums["codes"] = checksum(given)
        for path in self._dictionaries_like():
            sums[path.name] = checksum(path)
        settings = self.settings.as_text()
        check(self.dest, settings, sums)
        self._note_on_text()
        self._remove_damaged()
        outputs = self.dest / "bin", self.dest / "counts.txt"
        if stamp.done("prepare", self.dest / "settings.txt", settings | sums, *outputs):
            self.finish({})
            return False
        write_settings(self.dest / "settings.txt", settings, sums)
        if given.exists():
            (self.dest / "bpe").mkdir(exist_ok=True)
            given.replace(self._model_in(self.dest))
        if not folder.exists():
            if self.files_published:
                (new / "archives").write_text(self._sums(), encoding="utf-8")
            new.rename(folder)
        return True

    def _binary(self) -> dict[str, str]:
        """The names of the binary data of all splits -> the names of their texts."""
        if len(self.settings.endings) == 1:
            return {split: self.files([split])[0] for split in self.splits}
        source, target = self.settings.endings
        names = {}
        for name in self.files():
            split, lang = name.split(".")
            names[f"{split}.{source}-{target}.{lang}"] = name
        return names

    def _fault(self) -> str:
        """What is wrong with the binary data of the splits, or "", as pn train checks it."""
        folder = self.dest / "bin"
        for name, text in self._binary().items():
            lang = text.rpartition(".")[2]
            dictionary = folder / ("dict.txt" if name in self.splits else f"dict.{lang}.txt")
            problem = fault(folder, name, words_in(dictionary))
            if problem:
                return problem
        return ""

    def _remove_damaged(self) -> None:
        """Remove bin/ if one of its files is missing or damaged; :func:`make_bin` remakes it."""
        folder = self.dest / "bin"
        problem = self._fault() if folder.is_dir() else ""
        if not problem:
            return
        say("prepare", f"{problem}; making {folder} again")
        for made in sorted(self.dest.glob("*.made.txt")):
            name = made.name.removesuffix(".made.txt")
            say("prepare", f"note: add the test set {name} again by the same command with --test")
        shutil.rmtree(folder)

    def _model_in(self, data: Path) -> Path:
        """The file with the subword model of prepared data."""
        return data / "bpe" / subwords.MODELS[self.settings.segmentation]

    def _note_on_text(self) -> None:
        """Say what is suspicious about the text that was read."""
        read, kept = self.partial / "text", self.dest / "raw"
        if (self.dest / "text").is_dir():
            kept = self.dest / "text"
        texts = {}
        for split in dict.fromkeys(["train", *self.splits]):
            folder = read if split in self.splits else kept  # --test NAME reads no other split
            files = [folder / name for name in self.files([split])]
            if all(file.exists() for file in files):
                texts[split] = files
        for text in notes_on(texts, [split for split in self.splits if split in texts]):
            say("prepare", f"note: {text}")

    def prepare_folder(
        self,
        folder: Path,
        test: str = "test",
        expect: Sequence[int] = (),
        codes: Path | None = None,
    ) -> None:
        """:meth:`prepare_texts` for the text of train, valid and ``test`` in a folder."""
        texts = {}
        names = ("train", "valid", test, *self.splits[3:])
        for split, name in zip(self.splits, names, strict=True):
            texts[split] = [folder / f"{name}.{lang}" for lang in self.settings.endings]
        self.prepare_texts(texts, expect, codes)

    def prepare_texts(
        self, texts: Mapping[str, Sequence[Path]], expect: Sequence[int], codes: Path | None
    ) -> None:
        """All steps for text that is plain, or consists of tokens or of subwords (``@@``), which
        are used as they are.

        For text in tokens, DEST/text contains these tokens, and DEST/raw the plain text that the
        detokenizer makes of them.

        Args:
            texts: split -> the files of source and target.
            expect: the numbers of pairs of the published text, as far as they are known (0:
                unknown).
            codes: the merges of the subwords; None: learn them.
        """
        reader, first = self._form()
        for split, count in itertools.zip_longest(texts, expect, fillvalue=0):
            self.take(reader, split, texts[split], count)
        if self.begin(first, codes):
            self._to_subwords()
            self.binarize()

    def _form(self) -> tuple[pairs.Reader, str]:
        """How the text is read, and the folder that keeps the original text."""
        if self.settings.tokenizer != NONE:
            return pairs.as_is, "raw"
        return pairs.lower_cased_tokens if self.settings.lower else pairs.own_tokens, "text"

    def _to_subwords(self) -> None:
        """Make tok/ and bpe/ from plain text in raw/, or tok/, bpe/ and raw/ from tokens or
        subwords in text/.
        """
        if self.settings.tokenizer != NONE:
            self.tokenize("raw", "tok")
            self.segment()
            return
        in_subwords = subwords.are_in(self.dest / "text" / name for name in self.files(["train"]))
        say(
            "prepare",
            f"the text comes in {'subwords' if in_subwords else 'tokens'}, which are taken as they "
            "are",
        )
        join = per_line(subwords.join) if in_subwords else bytes
        self.transform("copying tokens", "text", "tok", lambda *_: join)
        self.detokenize("tok", "raw")
        if in_subwords:
            self.transform("copying subwords", "text", "bpe", lambda *_: bytes)
        else:
            self.segment()

    def add_test(self, folder: Path) -> None:
        """Add a test set, the only one of ``splits``, to prepared data: text NAME.LANG in
        ``folder``.

        settings.txt stays unchanged, so that the runs on this data remain valid. NAME.made.txt
        contains the set's checksum.

        Raises:
            UserError: the data contains another text with this name.
        """
        (name,) = self.splits
        if self.files()[0] in read_settings(self.dest / "settings.txt"):
            raise UserError(
                f"{self.dest} has a {name} since it was prepared; give this one another name "
                "(--test)"
            )
        reader, first = self._form()
        self.take(reader, name, [folder / file for file in self.files()])
        self._note_on_text()
        texts = [self.partial / "text" / file for file in self.files()]
        languages = f"{self.settings.source}-{self.settings.target}"
        made, wanted = self.dest / f"{name}.made.txt", stamp.made_from({}, {name: texts})
        if made.is_file() and stamp.differences(made, wanted):
            raise UserError(
                f"{self.dest} has another text as {name}; give this one another name (--test)"
            )
        problem = self._fault()
        index = self.dest / f"bin/{name}.{languages}.{self.settings.target}.idx"
        if problem and made.is_file():
            say("prepare", f"{problem}; making it again")
        elif stamp.done("prepare", made, wanted, index):
            return
        write_settings(made, wanted)
        for text in texts:
            text.replace(self.dest / first / text.name)
        self._to_subwords()
        # fairseq-preprocess calls the set test. The dictionaries are those of the data.
        flags = [*self._flags(self._dictionaries(self.dest)), f"--testpref=bpe/{name}"]
        texts_of = {}
        for lang in self.settings.endings:
            texts_of[f"test.{languages}.{lang}"] = f"bpe/{name}.{lang}"
        make_bin(self.dest, self.workers, flags, texts_of, to="partial/bin")
        self._note_on_unknown(self.dest / "partial/bin", self.dest)
        for new in self.partial.glob("bin/test.*"):
            new.replace(self.dest / "bin" / new.name.replace("test", name, 1))
        pairs_of_set = count_lines(self.dest / f"raw/{name}.{self.settings.source}")
        say("prepare", f"{self.dest} has the test set {name}: {pairs_of_set:,} pairs")

    # --- the steps after the published text ---

    def transform(
        self,
        label: str,
        source: str,
        to: str,
        work: Callable[[str, str], Work],
        splits: Sequence[str] = (),
    ) -> None:
        """Make the files that a folder lacks; ``work`` is called with the split and the language of
        each.
        """
        say("prepare", label)
        for name in self.files(splits):
            path, output = self.dest / source / name, self.dest / to / name
            if path.exists() and not output.exists():
                transform(path, output, work(*name.split(".")), self.workers, f"{label}: {name}")

    def detokenize(self, source: str, to: str) -> None:
        """Turn tokens into plain text with the detokenizer that ``pn score`` uses for
        translations.
        """

        def work(_: str, lang: str) -> Work:
            return per_line(lambda line: tokens.detokenize([line], lang)[0])

        self.transform("detokenizing", source, to, work)

    def tokenize(
        self, source: str, to: str, splits: Sequence[str] = (), without: Sequence[str] = ()
    ) -> None:
        """Tokenize ``splits`` (default: all) with the settings ``without`` turned off."""
        used = replace(self.settings, **dict.fromkeys(without, False))

        def work(split: str, lang: str) -> Work:
            return tokens.tokenizer(used, lang, split in used.straighten, self.moses)

        tool = self.moses if used.tokenizer == MOSES else "sacremoses"
        self.transform(f"tokenizing with {tool}", source, to, work, splits)
        for lang in self.settings.endings:
            self._note_on_tokens(source, to, lang, splits or self.splits)

    def _note_on_tokens(self, source: str, to: str, lang: str, splits: Sequence[str]) -> None:
        """Print a note if the text of a language cannot be restored from its tokens."""
        for split in splits:
            raw = self.dest / source / f"{split}.{lang}"
            if split == "train" or not raw.exists():
                continue
            note = note_on(raw, self.dest / to / raw.name, self.settings)
            if note:
                say("prepare", note)
                return

    def select(self) -> None:
        """Write raw/ and tok/, the pairs of text/ and stages/tok/ that are kept, removed.tsv and
        counts.txt.

        The setting ``clean`` says which training pairs are removed. With ``valid_every=N`` each
        N-th training pair that is kept becomes one of the validation set.
        """
        if (self.dest / "counts.txt").exists():
            return
        say("prepare", "selecting pairs")
        made = self.partial / "selected"
        sources = {"raw": self.dest / "text", "tok": self.dest / "stages/tok"}
        for stage, folder in sources.items():
            (made / stage).mkdir(parents=True)
            for name in self.files(["valid", "test"]):
                if (folder / name).exists():
                    shutil.copy(folder / name, made / stage)
        counts = self._select_from(sources, made)
        for split in SPLITS:
            counts[split] = count_lines(made / "raw" / self.files([split])[0])
        for split in SPLITS:
            if not counts[split]:
                numbers = ", ".join(f"{name}={count}" for name, count in counts.items())
                raise UserError(f"no sentence pair of {split} is left ({numbers})")
        write_settings(made / "counts.txt", counts)
        # the counts are moved last: their presence means that all files are there
        for name in (*sources, "removed.tsv", "counts.txt"):
            shutil.rmtree(self.dest / name, ignore_errors=True)
            os.replace(made / name, self.dest / name)

    def _select_from(self, sources: Mapping[str, Path], made: Path) -> dict[str, int]:
        """Write the training pairs that are kept to raw/ and tok/ in ``made``, and the removed
        pairs to removed.tsv; return the numbers of both.

        ``sources``: raw and tok -> the folder with the text.
        """
        valid_every, number, reasons = self.settings.valid_every, 0, Counter()
        with contextlib.ExitStack() as stack:

            def opened(split: str, mode: str, folders: Iterable[Path]) -> list[BinaryIO]:
                paths = [folder / name for folder in folders for name in self.files([split])]
                return [stack.enter_context(path.open(mode)) for path in paths]

            results = [made / stage for stage in sources]
            train, valid = opened("train", "ab", results), opened("valid", "ab", results)
            texts = opened("train", "rb", sources.values())
            removed = stack.enter_context((made / "removed.tsv").open("w", encoding="utf-8"))
            languages = self.settings.endings
            removed.write("split\tline\treason\ttokens {}\ttokens {}\n".format(*languages))
            for number, lines in enumerate(zip(*texts, strict=True), 1):
                source, target = (line.decode("utf-8").split() for line in lines[2:])  # the tokens
                reason = pairs.objection(source, target, *self.settings.clean)
                if reason:
                    reasons[reason] += 1
                    removed.write(f"train\t{number}\t{reason}\t{len(source)}\t{len(target)}\n")
                    continue
                kept = number - reasons.total()
                files = valid if valid_every and kept % valid_every == 0 else train
                for file, line in zip(files, lines, strict=True):
                    file.write(line)
        counts = {"train.read": number, "train.removed": reasons.total()}
        for reason in sorted(reasons):
            counts[f"train.removed.{reason.replace(' ', '_')}"] = reasons[reason]
        return counts

    def segment(self) -> None:
        """Learn subwords on the tokens of both languages, unless given, and apply them."""
        kind, size, protect = self.settings.segmentation, self.settings.bpe, self.settings.protect
        model = self._model_in(self.dest)
        if not model.exists():
            say("prepare", f"learning {size} BPE operations on both languages with {kind}")
            train = [self.dest / "tok" / name for name in self.files(["train"])]
            subwords.learn(kind, size, model, train, protect)
        work = per_line(subwords.segmenter(kind, model, protect))
        self.transform("applying BPE", "tok", "bpe", lambda *_: work)

    def _dictionaries(self, data: Path) -> list[Path]:
        """The dictionaries of prepared data: one, or one for each language."""
        languages = self.settings.endings[: 2 if self.settings.separate_dictionaries else 1]
        return [data / f"bin/dict.{lang}.txt" for lang in languages]

    def _dictionaries_like(self) -> list[Path]:
        """The dictionaries of the data in ``like``; none without such data."""
        return self._dictionaries(self.like) if self.like else []

    def _flags(self, dictionaries: Sequence[Path]) -> list[str]:
        """Flags of fairseq-preprocess for the languages, and for these or new dictionaries."""
        flags = ["--source-lang", self.settings.source, "--target-lang", self.settings.target]
        if not self.settings.separate_dictionaries:
            flags.append("--joined-dictionary")
        for flag, file in zip(("--srcdict", "--tgtdict"), dictionaries, strict=False):
            flags.append(f"{flag}={file}")
        return flags

    def binarize(self, expected: str = "") -> None:
        """Make fairseq's binary data, bin/, from bpe/.

        ``expected``: the counts that the original text results in.
        """
        source, _ = self.settings.endings
        tests = ",".join(f"bpe/{split}" for split in self.splits[2:])
        flags = [*self._flags(self._dictionaries_like()), f"--testpref={tests}"]
        flags += ["--trainpref=bpe/train", "--validpref=bpe/valid"]
        texts = {name: f"bpe/{text}" for name, text in self._binary().items()}
        make_bin(self.dest, self.workers, flags, texts)
        if self.like:
            self._note_on_unknown(self.dest / "bin", self.like)
        counts = {}
        for split in self.splits:
            counts[split] = count_lines(self.dest / f"raw/{split}.{source}")
        self.finish(counts, expected)

    def _note_on_unknown(self, binary: Path, data: Path) -> None:
        """Print which shares of the binary text are missing from the dictionary of ``data``."""
        for text, share in unknown_shares(binary).items():
            if share != "0.0":
                what = f"{share}% of the subwords of {text}"
                say("prepare", f"note: {what} are not in the dictionary of {data}")

    def finish(self, counts: Mapping[str, object], expected: str = "") -> None:
        """Write the counts, unless the cleaning has done so, remove what is no longer needed, and
        print the counts.
        """
        if not (self.dest / "counts.txt").exists():
            write_settings(self.dest / "counts.txt", counts)
        shutil.rmtree(self.dest / "stages", ignore_errors=True)
        kept = read_settings(self.dest / "counts.txt")
        if "train.removed" in kept:
            removed = (
                f"cleaning removed {kept['train.removed']} of {kept['train.read']} training pairs"
            )
            say("prepare", f"{removed} (which and why: {self.dest}/removed.tsv)")
        made = ", ".join(f"{int(kept[split]):,} {split}" for split in self.splits)
        if expected:
            made += f" (expected: {expected})"
        say("prepare", f"{self.dest} is complete: {made}")
