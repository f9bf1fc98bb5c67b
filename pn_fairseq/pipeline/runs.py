"""Reading a training run: a folder of ``pn train``, of a job of ``fairseq-hydra-train``, or of
``fairseq-train``.

A run of ``pn train`` is a directory:
  config.yaml    every setting
  data           the absolute path of the prepared data
  data.settings  the data's settings when the run was trained
  starts.jsonl   when, where and with what the run was started
  train.log      fairseq's log
  tensorboard/   the same for TensorBoard
  checkpoints/   fairseq's checkpoints, and averaged.pt
  made.txt       the stamp of a finished training (pipeline/stamp.py)
  generate/      hypotheses and scores
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from pn_fairseq.common.checkpoint_files import SETTINGS
from pn_fairseq.common.command import UserError, shown
from pn_fairseq.common.files import check_folders, is_locked
from pn_fairseq.pipeline import outdated
from pn_fairseq.pipeline.data.settings import Settings, read
from pn_fairseq.pipeline.training_log import TrainingLog, read_log


@dataclass(frozen=True)
class Run:
    """A training run. Each property reads its file on first access, and raises :class:`UserError`
    if the file is damaged.
    """

    path: Path

    @cached_property
    def ours(self) -> bool:
        """Whether ``pn train`` wrote the folder; a run that failed at once contains only the last
        of these files.
        """
        names = ("config.yaml", "data", "data.settings", "starts.jsonl", "failed")
        return any((self.path / name).is_file() for name in names)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints; for fairseq-train, --save-dir is the run itself."""
        folder = self.path / "checkpoints"
        return folder if folder.is_dir() else self.path

    @property
    def lock(self) -> Path:
        """The file that ``pn train`` locks while it trains."""
        return self.path / ".lock"

    @property
    def in_training(self) -> bool:
        """Whether another process is training the run now."""
        return is_locked(self.lock)

    @cached_property
    def config(self) -> DictConfig:
        """All settings, from config.yaml, hydra's file, or a checkpoint.

        Raises:
            UserError: none of these exists, or it is damaged.
        """
        for name in SETTINGS:
            if (self.path / name).is_file():
                return load_config(self.path / name)
        # The values of fairseq-train's Namespace can have any type.
        return OmegaConf.create(self._settings_of_a_checkpoint(), flags={"allow_objects": True})

    def _settings_of_a_checkpoint(self) -> dict:
        files = sorted(self.checkpoints.glob("checkpoint*.pt"))  # checkpoint_last.pt comes last
        if not files:
            raise UserError(
                f"'{self.path}' is not a training run: it has no config.yaml and no checkpoint (pn "
                "train)"
            )
        from pn_fairseq.common.checkpoints import load_checkpoint  # needs torch

        cfg = load_checkpoint(files[-1]).get("cfg")
        if not cfg:
            raise UserError(f"{files[-1]} has no settings: an older fairseq wrote it")
        settings = {name: getattr(section, "__dict__", section) for name, section in cfg.items()}
        # The model section of fairseq-train contains every flag: those of other sections are left
        # out.
        others = {"arch", *settings}
        for name, section in settings.items():
            if name != "model" and isinstance(section, dict):
                others |= section.keys()
        others.discard("_name")
        model = settings.get("model") or {}
        settings["model"] = {key: value for key, value in model.items() if key not in others}
        return settings

    @cached_property
    def settings_by_name(self) -> dict[str, object]:
        """All settings by dotted name."""
        return flat(OmegaConf.to_container(self.config))

    def get(self, key: str, default: object = None) -> object:
        """A setting by its dotted name, as in ``generation.beam``."""
        value = OmegaConf.select(self.config, key)
        return default if value is None else value

    @cached_property
    def bin(self) -> Path:
        """The folder of the binarized data, which may be gone."""
        place = self.path / "data"
        if place.is_file():
            data = place.read_text("utf-8", errors="replace").removesuffix("\n")
            return Path(data) / "bin"
        folders = self.get("task.data")
        if not folders:
            raise UserError(f"the settings of '{self.path}' do not name its data")
        return Path(str(folders).split(":")[0])  # fairseq accepts several folders

    @cached_property
    def data(self) -> Path | None:
        """The prepared data around ``bin``, with tok/ and settings; None if only fairseq-preprocess
        made the data.
        """
        ours = (self.path / "data").is_file() and (self.path / "config.yaml").is_file()
        return self.bin.parent if ours or (self.bin.parent / "settings.txt").is_file() else None

    def settings_of_data(self) -> Settings:
        """How the text was prepared, as its folder now states; only the languages if
        fairseq-preprocess made the data.

        Raises:
            UserError: neither the settings nor the names of the data's files tell the languages.
        """
        if self.data:
            return read(self.data / "settings.txt")
        source, target = self.get("task.source_lang"), self.get("task.target_lang")
        if not (source and target):
            source, target = infer_languages(self.bin)
        return Settings(source=source, target=target)

    @cached_property
    def log_file(self) -> Path | None:
        """train.log, or else the file in the folder that is fairseq's log with the most updates;
        None if there is none.

        Raises:
            OSError: a file cannot be read.
        """
        if (self.path / "train.log").is_file():
            return self.path / "train.log"
        longest, most = None, 0
        for file in sorted(self.path.glob("*")):
            if file.suffix in (".log", ".out", ".txt") and file.is_file():
                updates = read_log(file).updates
                if updates > most:
                    longest, most = file, updates
        return longest

    @cached_property
    def log(self) -> TrainingLog | None:
        """What fairseq logged; None without a log.

        Raises:
            OSError: the file cannot be read.
        """
        return read_log(self.log_file) if self.log_file else None

    @property
    def averaged(self) -> Path:
        """The file of ``pn average``."""
        return self.checkpoints / "averaged.pt"

    def checkpoint_files(self, given: list[Path] | None, step: str) -> list[Path]:
        """``given``, or else averaged.pt; ``step`` prints a note about those that are outdated."""
        paths = given or [self.averaged]
        for path in paths:
            if path.is_file():
                continue
            message = f"there is no checkpoint '{path}' (pn average makes averaged.pt)"
            others = sorted(file.name for file in self.checkpoints.glob("*.pt"))[-3:]
            if others:
                names = ", ".join(reversed(others))
                message += f"; {self.checkpoints} has {names} (--checkpoint FILE)"
            raise UserError(message)
        outdated.note_on_average(step, paths)
        return paths


def infer_languages(folder: Path) -> tuple[str, str]:
    """Source and target of binarized data, by the name of a file SPLIT.SOURCE-TARGET.LANG.bin, as
    fairseq infers them.

    Raises:
        UserError: no file has such a name.
    """
    for file in sorted(folder.glob("*.*-*.*")):
        languages = file.name.split(".")[1].split("-")
        if len(languages) == 2:
            return languages[0], languages[1]
    raise UserError(
        f"the languages are not known: no file in {folder} is named SPLIT.SOURCE-TARGET.LANG.bin, "
        "as those of fairseq-preprocess are, and the training had no --source-lang and "
        "--target-lang"
    )


def parts_of(architecture: str) -> tuple[str, str, str] | None:
    """Model, norm (by its abbreviation) and size of ``MODEL_NORM_SIZE``; None if the name does not
    have this form.
    """
    from pn_fairseq.norms import NORMS  # needs torch

    norms = "|".join(entry.short for entry in NORMS.values())
    parts = re.fullmatch(
        rf"(transformer|transformer_lm|tensorized_lm)_({norms})_(\w+)", architecture
    )
    return parts and parts.groups()


def is_run(path: Path) -> bool:
    """Whether a folder contains the settings of a training run."""
    has_settings = any((path / name).is_file() for name in SETTINGS)
    return has_settings or any(Run(path).checkpoints.glob("checkpoint*.pt"))


def check_run_folder(path: Path) -> None:
    """Refuse a path near a run, and name the run: a misspelt name, a checkpoint, the folder of the
    checkpoints, or of several runs.
    """
    if path.is_file():
        for folder in path.parents[:2]:
            if is_run(folder) and path.suffix == ".pt" and folder.name != "checkpoints":
                raise UserError(
                    f"'{path}' is a checkpoint; name its run '{folder}' (pn generate, pn translate "
                    "and pn evaluate-lm take the file as --checkpoint)"
                )
    check_folders([path])
    if path.name == "checkpoints" and Run(path.parent).ours:
        raise UserError(f"'{path}' is inside of a run, did you mean '{path.parent}'?")
    if is_run(path):
        return
    runs = [folder.name for folder in sorted(path.glob("*")) if folder.is_dir() and is_run(folder)]
    if runs:
        raise UserError(
            f"'{path}' is not a training run; it is a folder of runs, name one: {', '.join(runs)}"
        )


def open_run(path: Path, same_data: bool = False) -> Run:
    """Read the run in ``path``, which must have settings and data.

    ``same_data``: refuse the run if its prepared data has changed since it was trained.
    """
    check_run_folder(path)
    run = Run(path)
    run.config  # noqa: B018 (a folder that is not a run is reported before its data)
    if not run.bin.is_dir():
        raise UserError(f"the data of '{path}' is gone: {run.bin}")
    kept, present = path / "data.settings", run.bin.parent / "settings.txt"
    both_known = kept.is_file() and present.is_file()
    if same_data and both_known and kept.read_bytes() != present.read_bytes():
        raise UserError(
            f"'{run.data}' was prepared again, with other settings or other text, after '{path}' "
            f"was trained (compare {kept})"
        )
    return run


def check_translates(run: Run) -> None:
    """Refuse the run of a language model where translations are made or scored."""
    if run.get("task._name") == "language_modeling":
        command = shown(["evaluate-lm", "--run", run.path])
        raise UserError(f"'{run.path}' is the run of a language model: {command}")


def load_config(file: Path) -> DictConfig:
    """Read the settings in a YAML file.

    Raises:
        UserError: the file is not YAML, or contains no settings.
    """
    try:
        config = OmegaConf.load(file)
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise UserError(
            f"{file} cannot be read as settings ({_yaml_fault(file, error)})"
        ) from error
    if not OmegaConf.is_dict(config) or not config:
        raise UserError(f"{file} holds no settings")
    return config


def _yaml_fault(file: Path, error: Exception) -> str:
    """What is wrong with a YAML file, and in which line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return ": ".join(line.strip() for line in str(error).splitlines()[:2])
    twice = re.fullmatch("found duplicate key (.+)", error.problem)
    if twice:
        lines = file.read_text("utf-8").splitlines()
        place = re.compile(f"{' ' * mark.column}{re.escape(twice[1])} *:")
        same = [number for number, line in enumerate(lines, 1) if place.match(line)]
        first = max((number for number in same if number <= mark.line), default=None)
        where = f"in lines {first} and {mark.line + 1}" if first else f"in line {mark.line + 1}"
        return f"{twice[1]} occurs twice, {where}: write one of them with all its keys"
    if "'\\t'" in error.problem:
        return f"line {mark.line + 1} has a tab, which YAML does not allow there: use blanks"
    return f"line {mark.line + 1}: {error.problem}"


def flat(settings: dict, prefix: str = "") -> dict[str, object]:
    """Settings by dotted name."""
    values = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values
