"""What a run directory holds, read for a report."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pn_fairseq.scoring import Scores, ScoringError, read_scores
from pn_fairseq.training_log import TrainingLog, read_training_log

#: Any of these makes a directory a run; a run that failed at once has the last one alone.
MARKS = ("config.yaml", "train.log", "failed")

#: What an absent key of a data directory's settings means (scripts/prepare_*.sh).
DATA_DEFAULTS = {"segmentation": "subword-nmt", "tokenizer": "sacremoses"}


#: What generate.sh notes about a decoding that says what was decoded, not how.
_PLACES_OF_DECODING = ("checkpoint", "data", "subset")


class NoRun(Exception):
    """A path that is no run directory; the text is one line that says what is wrong."""


@dataclass
class Run:
    """One training run.

    Attributes:
        path: the directory, as it was named.
        name: a short name, different from those of all other runs of the report.
        settings: flat name -> value of ``config.yaml``; None if there is none that can be read.
        data: settings of the prepared data that are not off, and ``sha256 FILE`` -> checksum; None if unknown.
        data_path: where the prepared data was; None if unknown.
        log: what ``train.log`` says; None if there is none.
        starts: the records of ``starts.jsonl``.
        failed: the line in ``failed``; None if there is none.
        decoded: number of hypotheses; None if the run was not decoded.
        decoding: how it was decoded, places left out, as generate.sh noted it; None if unknown.
        scores: None if it was not scored.
        checkpoints: names of the files in ``checkpoints/``.
        problems: what failed or is missing, one sentence each.
    """

    path: Path
    name: str = ""
    settings: dict[str, object] | None = None
    data: dict[str, str] | None = None
    data_path: Path | None = None
    log: TrainingLog | None = None
    starts: list[dict] = field(default_factory=list)
    failed: str | None = None
    decoded: int | None = None
    decoding: str | None = None
    scores: Scores | None = None
    checkpoints: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def setting(self, name: str, default=None):
        """A setting by its dotted name."""
        value = (self.settings or {}).get(name)
        return default if value is None else value

    @property
    def seed(self) -> int | None:
        return self.setting("common.seed")

    @property
    def workers(self) -> int:
        """Data-parallel processes of the last start."""
        recorded = [start.get("workers") for start in self.starts if isinstance(start.get("workers"), int)]
        logged = [start.workers for start in self.log.starts if start.workers] if self.log else []
        return (recorded or logged or [self.setting("distributed_training.distributed_world_size", 1)])[-1]

    @property
    def max_update(self) -> int | None:
        limit = self.setting("optimization.max_update")
        return limit if isinstance(limit, int) and limit > 0 else None

    @property
    def best_valid(self) -> tuple[float, int] | None:
        """Lowest validation loss (bits per token, without label smoothing) and its update."""
        finite = [(loss, update) for update, loss in (self.log.curve.valid if self.log else {}).items()]
        return min((pair for pair in finite if math.isfinite(pair[0])), default=None)


def is_bare(run: Run) -> bool:
    """Whether nothing is known of a run but that it was to be."""
    return run.settings is None and run.log is None


def flatten(settings: dict, prefix: str = "") -> dict[str, object]:
    """Nested settings by dotted name."""
    flat: dict[str, object] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def read_runs(paths: Sequence[Path], subset: str) -> list[Run]:
    """Read run directories.

    Args:
        paths: the directories, all different.
        subset: which decoded subset to look at.

    Raises:
        NoRun: a path is no run directory, or is given twice.
    """
    seen: dict[Path, Path] = {}
    for path in paths:
        # All before the first is read: a misspelt name is not to show after minutes of work.
        try:
            if not path.is_dir():
                raise NoRun(f"there is no directory '{path}'")
            if not any((path / mark).is_file() for mark in MARKS):
                raise NoRun(f"'{path}' is no run: it has none of {', '.join(MARKS)} (scripts/train.sh makes runs)")
        except OSError as error:
            raise NoRun(f"cannot look at '{path}': {error.strerror}") from error
        other = seen.setdefault(path.resolve(), path)
        if other is not path:
            raise NoRun(f"'{path}' is given twice (also as '{other}')")
    runs = [read_run(path, subset) for path in paths]
    for run, name in zip(runs, _names([path.resolve() for path in paths]), strict=True):
        run.name = name
    return runs


def _names(paths: list[Path]) -> list[str]:
    """The last parts of each path, as few as tell the paths apart."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def read_run(path: Path, subset: str) -> Run:
    """Read one run directory. What is missing or damaged in it becomes a sentence in ``problems``."""
    run = Run(path)
    run.failed = _text(run, path / "failed")
    _read_settings(run)
    _read_data(run)
    _read_log(run)
    _read_starts(run)
    run.checkpoints = sorted(file.name for file in path.glob("checkpoints/*.pt"))
    _read_result(run, path / "generate" / subset, subset)
    run.problems[:0] = _training_problems(run)
    if is_bare(run):
        run.problems = ["never began: there is neither config.yaml nor train.log"]
    if run.failed is not None:
        run.problems.insert(0, f"failed: {run.failed or '(the file is empty)'}")
    return run


def _text(run: Run, file: Path) -> str | None:
    """The text of a small file, on one line; None if it is not there."""
    try:
        return " ".join(file.read_text("utf-8", errors="replace").split())
    except FileNotFoundError:
        return None
    except OSError as error:
        run.problems.append(f"{file.name} cannot be read: {error.strerror}")
        return None


def _read_settings(run: Run) -> None:
    file = run.path / "config.yaml"
    if not file.is_file():
        run.problems.append("no settings: there is no config.yaml")
        return
    try:
        settings = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        if not isinstance(settings, dict):
            raise ValueError("it holds no settings")
        run.settings = flatten(settings)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        run.problems.append(f"no settings: config.yaml cannot be read: {' '.join(str(error).split())}")


def _read_data(run: Run) -> None:
    if place := _text(run, run.path / "data"):
        run.data_path = Path((run.path / "data").read_text("utf-8", errors="replace").rstrip("\n"))
    elif place is None:
        run.problems.append("the place of the data is not recorded: the file data is missing")
    try:
        text = (run.path / "data.settings").read_text("utf-8", errors="replace")
    except OSError:
        run.problems.append("the data is not known: there is no data.settings, so the run is compared with no other")
        return
    run.data = dict(DATA_DEFAULTS)
    for line in text.splitlines():
        if match := re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line):
            run.data[f"sha256 {match[2]}"] = match[1]
        elif line.strip():
            key, _, value = line.partition("=")
            run.data[key] = value
    # An absent key means that a step was off; `lower` and `bpe` are always there.
    run.data = {key: value for key, value in run.data.items() if value not in ("", "0") or key in ("lower", "bpe")}


def _read_log(run: Run) -> None:
    file = run.path / "train.log"
    if not file.is_file():
        run.problems.append("not trained: there is no train.log")
        return
    try:
        run.log = read_training_log(file)
    except OSError as error:
        run.problems.append(f"train.log cannot be read: {error.strerror}")
        return
    if run.log.unreadable:
        lines = "1 line" if run.log.unreadable == 1 else f"{run.log.unreadable} lines"
        run.problems.append(f"{lines} of train.log cannot be read (cut off?); what they said is missing here")


def _read_starts(run: Run) -> None:
    try:
        lines = (run.path / "starts.jsonl").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        run.problems.append("versions and hardware are not recorded: there is no starts.jsonl")
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("no object")
            run.starts.append(record)
        except ValueError:
            run.problems.append(f"line {number} of starts.jsonl cannot be read")


def count_lines(file: Path) -> int | None:
    """Lines of a text file, a last one without a newline included; None if it cannot be read."""
    try:
        count, last = 0, b"\n"
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                count += block.count(b"\n")
                last = block[-1:]
        return count + (last != b"\n")
    except OSError:
        return None


def _read_result(run: Run, folder: Path, subset: str) -> None:
    run.decoded = count_lines(folder / "hyp.tok")
    if run.decoded is None:
        averaged = "averaged.pt" in run.checkpoints
        missing = "" if averaged else f", and {'not averaged' if run.checkpoints else 'there is no checkpoint'}"
        run.problems.append(f"not decoded: there is no {folder.relative_to(run.path)}/hyp.tok{missing}")
        return
    if made := _text(run, folder / "made"):
        words = re.findall(r"\b([a-z_0-9]+)=(\S+)", made)
        run.decoding = " ".join(f"{key}={value}" for key, value in words if key not in _PLACES_OF_DECODING) or None
    sentences = count_lines(folder / "ref.tok")
    if sentences is not None and sentences != run.decoded:
        run.problems.append(f"{run.decoded} hypotheses but {sentences} references of {subset}")
    try:
        scores = read_scores(folder)
    except ScoringError as error:
        there = (folder / "scores.json").exists()
        run.problems.append(f"not scored: {error if there else 'there is no scores.json (scripts/score.sh makes it)'}")
        return
    numbers = [getattr(scores, measure).score for measure in ("tokenized", "detokenized", "chrf")]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        run.problems.append("not scored: a score in scores.json is no number (scripts/score.sh makes it anew)")
    elif scores.sentences != run.decoded:
        run.problems.append(
            f"not scored: scores.json is about {scores.sentences} sentences, but {run.decoded} were decoded"
        )
    elif (folder / "scores.json").stat().st_mtime < (folder / "hyp.tok").stat().st_mtime:
        run.problems.append("not scored: scores.json is older than hyp.tok (scripts/score.sh makes it anew)")
    else:
        run.scores = scores


def _training_problems(run: Run) -> list[str]:
    problems = []
    log = run.log
    if log is None:
        return problems
    if not log.curve.train and not log.curve.valid:
        return ["not trained: train.log holds no record"]
    last = log.starts[-1]
    done = f"update {log.updates:,} of {run.max_update:,}" if run.max_update else f"update {log.updates:,}"
    short = run.max_update is not None and log.updates < run.max_update
    if not log.ended:
        if short or run.max_update is None:
            problems.append(f"training not finished: {done} (interrupted, failed or still running)")
        else:
            problems.append(f"training did not end by itself, but reached {done}")
    elif short and last.reason == "patience":
        patience = run.setting("checkpoint.patience")
        problems.append(f"stopped early, as set: no better validation loss {patience} times in a row, at {done}")
    elif short:
        why = {"stop_time_hours": "the limit of time", "max_update": "an earlier max_update"}.get(
            last.reason, "max_epoch, or not said"
        )
        problems.append(f"training ended at {done} ({why})")
    for kind, values in (("training", log.curve.train), ("validation", log.curve.valid)):
        if faulty := sorted(update for update, loss in values.items() if not math.isfinite(loss)):
            problems.append(
                f"the {kind} loss is not finite (NaN or infinity) in {len(faulty)} of {len(values)} records, "
                f"first at update {faulty[0]:,}"
            )
    if log.faults:
        problems.append(f"fairseq reports a NaN or an infinity in {log.faults} lines of train.log")
    if not log.curve.valid:
        problems.append("never validated")
    return problems
