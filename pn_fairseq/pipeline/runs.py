"""Reading a training run: a folder of scripts/train.sh, of a job of ``fairseq-hydra-train``, or of ``fairseq-train``.

A run of scripts/train.sh is a directory:
  config.yaml   every setting                            data           the prepared data, by absolute path
  train.log     fairseq's log                            data.settings  the data's settings when it was trained
  tensorboard/  the same for TensorBoard                 starts.jsonl   when, where and with what it was started
  checkpoints/  fairseq's checkpoints, and averaged.pt   generate/      hypotheses and scores
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import read_settings, recorded

#: The help of the option --run.
RUN = "a run of scripts/train.sh, fairseq-train or a job of a sweep"


@dataclass
class Run:
    """A training run."""

    path: Path
    checkpoints: Path  # the folder with them
    config: DictConfig  # its settings, all or those that its files tell
    bin: Path  # the binarized data
    data: Path | None  # around it, with tok/ and settings; None where fairseq-preprocess alone made it

    def get(self, key: str, default: object = None) -> object:
        """A setting by its dotted name, as in ``generation.beam``."""
        value = OmegaConf.select(self.config, key)
        return default if value is None else value

    def checkpoint_files(self, given: list[Path] | None) -> list[Path]:
        """``given``, or else averaged.pt."""
        paths = given or [self.checkpoints / "averaged.pt"]
        for path in paths:
            if not path.is_file():
                raise UserError(f"there is no checkpoint '{path}' (scripts/average.sh makes averaged.pt)")
        return paths

    def settings(self) -> dict[str, str]:
        """The settings of the data; source and target language alone where only fairseq-preprocess made it."""
        if self.data is None:
            languages = {"source": self.get("task.source_lang"), "target": self.get("task.target_lang")}
        else:
            languages = read_settings(recorded(self.data, "settings"))
        for key in ("source", "target"):
            if not languages.get(key):
                where = "its settings" if self.data is None else recorded(self.data, "settings")
                raise UserError(f"{where} do not name the {key} language (scripts/prepare_*.sh write it)")
        return languages


def open_run(path: Path | None, same_data: bool = False) -> Run:
    """Read the run in ``path``. ``same_data``: refuse it if the prepared data is not what it was trained on."""
    if path is None:
        raise UserError("--run is needed (see --help)")
    checkpoints = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if (path / "config.yaml").is_file() and (path / "data").is_file():
        config = OmegaConf.load(path / "config.yaml")
        data: Path | None = Path((path / "data").read_text("utf-8").removesuffix("\n"))
        folder = data / "bin"
    else:
        config = _config_of_fairseq(path, checkpoints)
        folder = Path(str(OmegaConf.select(config, "task.data")).split(":")[0])
        data = folder.parent if recorded(folder.parent, "settings").is_file() else None
    if not folder.is_dir():
        raise UserError(f"the data of '{path}' is gone: {folder}")
    kept = path / "data.settings"
    if same_data and data and kept.is_file() and recorded(data, "settings").is_file():
        if kept.read_bytes() != recorded(data, "settings").read_bytes():
            raise UserError(
                f"'{data}' was prepared again, with other settings or other text, after '{path}' was trained "
                f"(compare {kept})"
            )
    return Run(path, checkpoints, config, folder, data)


def flat(settings: dict, prefix: str = "") -> dict[str, object]:
    """Settings by dotted name."""
    values = {}
    for key, value in settings.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return values


def _config_of_fairseq(path: Path, checkpoints: Path) -> DictConfig:
    if (path / ".hydra/config.yaml").is_file():
        return OmegaConf.load(path / ".hydra/config.yaml")
    present = [*checkpoints.glob("checkpoint_last.pt"), *sorted(checkpoints.glob("checkpoint*.pt"))]
    if not present:
        raise UserError(f"'{path}' is not a training run: it has no config.yaml and no checkpoint (scripts/train.sh)")
    from pn_fairseq.common.checkpoints import load_checkpoint  # needs torch

    cfg = load_checkpoint(present[0]).get("cfg") or {}
    # The sections that fairseq's command line fills in as a Namespace are not needed here.
    plain = {key: vars(value) if hasattr(value, "__dict__") else value for key, value in cfg.items() if key != "model"}
    return OmegaConf.create(plain, flags={"allow_objects": True})
