"""Grouping runs: by the data they were trained on, and by the settings that make a system."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from pn_fairseq.norms import NORMS
from pn_fairseq.report.runs import Run

#: Where things are. In no comparison, and named in no table.
PLACES = {
    "task.data",
    "checkpoint.save_dir",
    "common.log_file",
    "common.tensorboard_logdir",
    "common.user_dir",
    "common.plasma_path",
}

#: How a run is logged and spread over a machine. Shown where it differs, but two runs that differ by nothing else are
#: of one system. What the spreading means for the result is in ``tokens_per_update``.
HOW = re.compile(
    r"distributed_training\.|bmuf\.|common\.(log_interval|log_format|cpu|no_progress_bar|all_gather_list_size)$"
    r"|dataset\.(num_workers|data_buffer_size|max_tokens|batch_size|max_tokens_valid|batch_size_valid)$|optimization\.update_freq$"
    r"|model\.norm_stats_interval$"
)

#: Copies that hydra makes of a setting under another name.
COPIES = {"optimizer.lr": "optimization.lr", "lr_scheduler.lr": "optimization.lr"}

NORM, SIZE = "encoder norm", "size"
#: scripts/train.sh spreads what this says over the workers; older runs are reckoned up.
TOKENS, SENTENCES = "tokens_per_update", "sentences per update"
SEED = "common.seed"

#: Name of a norm in reports, in the order of the paper's table.
LABELS = {name: re.search(r"\((.+)\)$", entry.title)[1] for name, entry in NORMS.items()}


def norm_and_size(run: Run) -> tuple[str, str]:
    """What ``model._name`` and ``model.encoder_norm`` say: ("PN", "tiny") of ``transformer_pn_tiny``.

    An architecture that is not this plugin's has itself as its norm, and no size.
    """
    arch = str(run.setting("model._name", "architecture not known"))
    if arch == "transformer_pn":
        norm, size = "power", "base"
    else:
        match = re.fullmatch(r"transformer_([a-z]+)_(.+)", arch)
        norm = next((name for name, entry in NORMS.items() if match and match[1] == entry.short), None)
        if norm is None:
            return arch, "-"
        size = match[2]
    return LABELS.get(run.setting("model.encoder_norm", norm), str(run.setting("model.encoder_norm"))), size


def _batch(run: Run) -> dict[str, int | None]:
    """Most tokens (or sentences) in one update, over all workers; as train.sh recorded it, else from the settings."""
    update_freq = run.setting("optimization.update_freq", [1])
    # fairseq takes the entry of the epoch, and the last one from there on.
    times = run.workers * (update_freq[-1] if isinstance(update_freq, list) and update_freq else 1)
    found = {}
    for name, setting in ((TOKENS, "dataset.max_tokens"), (SENTENCES, "dataset.batch_size")):
        most = run.setting(setting)
        found[name] = most * times if isinstance(most, int) else None
    recorded = [start[TOKENS] for start in run.starts if isinstance(start.get(TOKENS), int)]
    return found | ({TOKENS: recorded[-1]} if recorded else {})


def comparable(run: Run) -> dict[str, object]:
    """The settings of a run by which it is told from others, with norm, size and batch in words of their own."""
    values = {
        name: value
        for name, value in (run.settings or {}).items()
        if name not in PLACES
        and name not in ("model._name", "model.encoder_norm")
        and not (name in COPIES and value == run.setting(COPIES[name]))
    }
    norm, size = norm_and_size(run)
    # A setting that is null and one that is not there mean the same: the default.
    return {
        name: value for name, value in {NORM: norm, SIZE: size, **_batch(run), **values}.items() if value is not None
    }


@dataclass
class System:
    """Runs that differ by their seed alone.

    Attributes:
        label: what the report calls it, different from those of all other systems of its corpus.
        norm: ``LN``, ``BN``, ``PN-V``, ``PN``, or an architecture's name.
        settings: its settings, without seed and :data:`HOW`.
        runs: its runs, by seed.
    """

    label: str
    norm: str
    settings: dict[str, object]
    runs: list[Run] = field(default_factory=list)

    def scores(self, measure: str) -> dict[object, float]:
        """Seed -> score (``tokenized``, ``detokenized`` or ``chrf``); of a seed that was run twice the mean."""
        by_seed: dict[object, list[float]] = {}
        for run in self.runs:
            if run.scores is not None:
                by_seed.setdefault(run.seed, []).append(getattr(run.scores, measure).score)
        return {seed: sum(values) / len(values) for seed, values in by_seed.items()}


@dataclass
class Corpus:
    """Runs on the same prepared data. Runs on different data are compared nowhere.

    Attributes:
        data: the data's settings; None if they are not known (then it holds a single run).
        systems: in the order of the norms, LN first.
    """

    data: dict[str, str] | None
    systems: list[System]

    @property
    def runs(self) -> list[Run]:
        return [run for system in self.systems for run in system.runs]

    def baseline(self, system: System) -> System | None:
        """The LN system to compare ``system`` with: the one from which it differs in the fewest settings."""
        candidates = [other for other in self.systems if other.norm == LABELS["layer"]]
        if system in candidates or not candidates:
            return None
        return min(candidates, key=lambda other: len(differing([system.settings, other.settings])))


def differing(settings: Sequence[dict[str, object]]) -> list[str]:
    """Names of the settings that are not the same in all."""
    names = dict.fromkeys(name for one in settings for name in one)
    return [name for name in names if any(one.get(name) != settings[0].get(name) for one in settings)]


def group(runs: Sequence[Run]) -> list[Corpus]:
    """Runs by data, and within the data by system. Every run is in one system of one corpus."""
    corpora: dict[object, list[Run]] = {}
    for run in runs:
        key = frozenset(run.data.items()) if run.data is not None else run.path
        corpora.setdefault(key, []).append(run)
    return [Corpus(members[0].data, _systems(members)) for members in corpora.values()]


def _systems(runs: Sequence[Run]) -> list[System]:
    systems: list[System] = []
    for run in runs:
        settings = {name: value for name, value in comparable(run).items() if name != SEED and not HOW.match(name)}
        if run.settings is None:
            # Of a run without settings nothing is known by which it could be put beside another.
            systems.append(System(f"unknown ({run.name})", "unknown", {}, [run]))
            continue
        system = next((one for one in systems if one.norm != "unknown" and one.settings == settings), None)
        if system is None:
            systems.append(system := System("", str(settings[NORM]), settings))
        system.runs.append(run)
    order = list(LABELS.values())
    systems.sort(key=lambda one: order.index(one.norm) if one.norm in order else len(order))
    for system in systems:
        system.runs.sort(key=lambda run: (not isinstance(run.seed, int), run.seed if isinstance(run.seed, int) else 0))
    _label(systems)
    return systems


def _label(systems: list[System]) -> None:
    for system in systems:
        if system.norm == "unknown":
            continue
        same = [other for other in systems if other.norm == system.norm]
        names = differing([other.settings for other in same])
        details = [
            str(system.settings[name])
            if name == SIZE
            else f"{name.rpartition('.')[2]}={shown(system.settings.get(name))}"
            for name in names
        ]
        system.label = f"{system.norm} ({', '.join(details)})" if details else system.norm


def shown(value: object) -> str:
    """A setting's value as text; one that is not set is the default of fairseq or of the architecture."""
    if value is None:
        return "default"
    if isinstance(value, list):
        return "[" + ", ".join(str(item) for item in value) + "]"
    return str(value)
