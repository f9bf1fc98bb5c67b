"""Grouping runs: by the data they were trained on, and by the settings that make a system."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas

from pn_fairseq import norms
from pn_fairseq.common.files import read_settings
from pn_fairseq.pipeline.metrics import METRICS
from pn_fairseq.pipeline.runs import parts_of
from pn_fairseq.report.runs import LM_MEASURES, Run

#: Where things are. Not compared, and named in no table.
_PLACES = {
    "task.data",
    "checkpoint.save_dir",
    "common.log_file",
    "common.tensorboard_logdir",
    "common.user_dir",
    "common.plasma_path",
    "model.norm_probe",
}

#: How a run is logged and distributed. Shown where it differs, but two runs that differ by nothing
#: else are of one system. What the distribution means for the result is in ``tokens_per_update``.
_HOW = re.compile(
    r"distributed_training\.|bmuf\.|common\.(log_interval|log_format|cpu|no_progress_bar|all_gather_list_size)$"
    r"|dataset\.(num_workers|data_buffer_size|max_tokens|batch_size|max_tokens_valid|batch_size_valid)$|optimization\.update_freq$"
    r"|model\.(compile_layers|norm_(stats_interval|probe_(interval|layers)))$"
)

#: Options of norms.
_OF_A_NORM = re.compile(r"model\.(norm_|(encoder_|decoder_)?(norm|layer_scale))")

#: The size of a mini-batch, a setting of norms with statistics of the batch; of others it is how a
#: run is distributed.
_BATCH = ("dataset.max_tokens", "dataset.batch_size")

#: Copies that hydra makes of a setting under another name; the last one in the task
#: language_modeling.
_COPIES = {
    "optimizer.lr": "optimization.lr",
    "lr_scheduler.lr": "optimization.lr",
    "task.seed": "common.seed",
}

NORM, SIZE = "encoder norm", "size"
#: The norm of language models.
LM_NORM = "model.decoder_norm"
#: pn train distributes these tokens over the ranks; for other runs it is computed from their
#: settings.
TOKENS, SENTENCES = "tokens_per_update", "sentences per update"
SEED = "common.seed"
#: A label names at most so many settings; the table of the settings that differ has them all.
_MOST_DETAILS = 4


def norm_labels() -> dict[str, str]:
    """Name of each norm -> its abbreviation, from the registry: the brackets at the end of its
    title.
    """
    brackets = {
        name: re.search(r"\(([^()]+)\)$", entry.title) for name, entry in norms.NORMS.items()
    }
    return {
        name: match[1] if match else norms.NORMS[name].short.upper()
        for name, match in brackets.items()
    }


def norm_and_size(run: Run) -> tuple[str, str]:
    """What ``model._name`` and the setting of the norm say: ("PN", "tiny") of
    ``transformer_pn_tiny``.

    An architecture that is not this plugin's has itself as its norm, and no size.
    """
    arch = str(run.get("model._name", "architecture not known"))
    parts = ("transformer", "pn", "base") if arch == "transformer_pn" else parts_of(arch)
    if parts is None:
        return arch, "-"
    model, short, size = parts
    names = {entry.short: name for name, entry in norms.NORMS.items()}
    norm = str(run.get("model.encoder_norm" if model == "transformer" else LM_NORM, names[short]))
    return norm_labels().get(norm, norm), size if model == "transformer" else f"{model} {size}"


def _batch(run: Run) -> dict[str, int]:
    """Most tokens (or sentences) in one update, over all ranks; as pn train recorded it, else
    from the settings.
    """
    update_freq = run.get("optimization.update_freq", [1])
    # fairseq uses the entry of the epoch; later epochs use the last entry.
    mini_batches = run.world_size * (
        update_freq[-1] if isinstance(update_freq, list) and update_freq else 1
    )
    settings = {TOKENS: "dataset.max_tokens", SENTENCES: "dataset.batch_size"}
    sizes = {name: run.get(setting) for name, setting in settings.items()}
    most = {name: size * mini_batches for name, size in sizes.items() if isinstance(size, int)}
    recorded = [start[TOKENS] for start in run.starts if isinstance(start.get(TOKENS), int)]
    return most | ({TOKENS: recorded[-1]} if recorded else {})


def comparable(run: Run) -> dict[str, object]:
    """The settings by which a run differs from others, with norm, size and batch under names of
    their own.
    """
    left_out = _PLACES | {"model._name", LM_NORM if run.language_model else "model.encoder_norm"}
    left_out |= {copy for copy, name in _COPIES.items() if run.get(copy) == run.get(name)}
    norm, size = norm_and_size(run)
    settings = {NORM: norm, SIZE: size, **_batch(run), **run.settings_by_name}
    # A setting that is null and one that is not there mean the same: the default.
    return {
        name: value
        for name, value in settings.items()
        if value is not None and name not in left_out
    }


@dataclass
class Corpus:
    """Runs on the same prepared data. Runs on different data are compared nowhere.

    ``frame`` has a row for each run, by norm (LN first) and seed: ``run``, the label of its
    ``system``, ``seed``, and its :attr:`Run.measures`.
    """

    # its settings; None if they are not known (then there is a single run)
    data: dict[str, str] | None
    frame: pandas.DataFrame
    # label of a system -> its settings, without the seed and how it was run
    settings: dict[str, dict[str, object]]

    @property
    def runs(self) -> list[Run]:
        return list(self.frame["run"])

    def data_folders(self) -> list[Path]:
        """Where the prepared data is; a study trained elsewhere has several."""
        return list(dict.fromkeys(run.data_folder for run in self.runs if run.data_folder))

    def counts(self) -> dict[str, float]:
        """Of the prepared data: pairs or tokens of each part; empty if the data is gone."""
        files = [folder / "counts.txt" for folder in self.data_folders()]
        counts = next((read_settings(file) for file in files if file.is_file()), {})
        return {name: float(count) for name, count in counts.items()}

    def members(self, label: str) -> list[Run]:
        """The runs of a system."""
        return list(self.frame.loc[self.frame["system"] == label, "run"])

    def norm(self, label: str) -> str:
        return str(self.settings[label][NORM])

    def scores(self) -> pandas.DataFrame:
        """(system, seed) -> measures, if there are any.

        A seed that was run twice counts once, by its mean.
        """
        measures = [*METRICS, *LM_MEASURES]
        measured = self.frame.reindex(columns=["system", "seed", *measures]).dropna(
            subset=measures, how="all"
        )
        return measured.groupby(["system", "seed"], sort=False, dropna=False)[measures].mean()

    @cached_property
    def setting_values(self) -> pandas.DataFrame:
        """The settings of each run as text, in the order of :attr:`runs`, a column for each;
        without the seed.
        """
        rows = [
            {name: as_text(value) for name, value in comparable(run).items() if name != SEED}
            for run in self.runs
        ]
        return pandas.DataFrame(rows).fillna(as_text(None))

    @cached_property
    def baselines(self) -> dict[str, str]:
        """System -> the LN system to compare it with: the one from which it differs in the fewest
        settings.

        Other LN systems are compared with the first, which has the fewest settings of its own.
        Language models are compared only with LN in the same model.
        """
        baselines, controls = (
            {},
            [label for label in self.settings if self.norm(label) == norm_labels().get("layer")],
        )
        for label, settings in self.settings.items():
            candidates = [ln for ln in controls if self._model(ln) == self._model(label)]
            if label in candidates:
                candidates = [ln for ln in candidates[:1] if ln != label]
            if candidates:
                baselines[label] = min(
                    candidates, key=lambda ln: len(differing([settings, self.settings[ln]]))
                )
        return baselines

    def _model(self, label: str) -> tuple:
        """What language models that are compared have in common: the model, and whether it is
        causal.
        """
        settings = self.settings[label]
        language_model = self.members(label)[0].language_model
        return (
            (settings[SIZE], bool(settings.get("model.tensorized_unmasked")))
            if language_model
            else ()
        )

    def beside_the_norm(self, label: str, baseline: str) -> list[str]:
        """The settings in which two systems differ, without the norms and their options."""
        names = differing([self.settings[label], self.settings[baseline]])
        # The size of a mini-batch is a setting of systems with batch statistics only.
        both = self.settings[label].keys() & self.settings[baseline].keys()
        return [
            name.rpartition(".")[2]
            for name in names
            if name != NORM
            and not _OF_A_NORM.match(name)
            and not (name in _BATCH and name not in both)
        ]


def differing(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """Names of the settings that are not the same in all."""
    names = dict.fromkeys(name for of_system in settings for name in of_system)
    return [
        name
        for name in names
        if any(of_system.get(name) != settings[0].get(name) for of_system in settings[1:])
    ]


def group(runs: Sequence[Run]) -> list[Corpus]:
    """Runs by data, and within the data by system.

    A run whose data or settings are not known is alone.
    """
    corpora: dict[object, list[Run]] = {}
    for run in runs:
        known = run.data_settings is not None and run.settings_by_name
        key = frozenset(run.data_settings.items()) if known else run.path
        corpora.setdefault(key, []).append(run)
    return [_corpus(members) for members in corpora.values()]


def names(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Of each run the label of its system, and the one that it has where the size of mini-batches
    is no setting.

    Of runs on different data both are the name of the run.
    """
    first, *others = group(runs)
    if others:
        return [(run.name, run.name) for run in runs]
    labels = []
    for corpus in (first, _corpus(runs, batch_is_a_setting=False)):
        labels.append(
            {run.path: label for label in corpus.settings for run in corpus.members(label)}
        )
    return [tuple(of_runs[run.path] for of_runs in labels) for run in runs]


def _corpus(runs: Sequence[Run], batch_is_a_setting: bool = True) -> Corpus:
    systems, rows, order = [], [], list(norm_labels().values())
    with_statistics = {
        label
        for name, label in norm_labels().items()
        if issubclass(norms.NORMS[name].cls, norms.RunningNorm)
    }
    sizes = {(norm_and_size(run)[0], name, run.get(name)) for run in runs for name in _BATCH}
    several = Counter((norm, name) for norm, name, _ in sizes if norm in with_statistics)
    for run in runs:
        settings = {
            name: value
            for name, value in comparable(run).items()
            if name != SEED and not _HOW.match(name)
        }
        if batch_is_a_setting:
            settings |= {
                name: run.get(name) for name in _BATCH if several[settings[NORM], name] > 1
            }
        if settings not in systems:
            systems.append(settings)
        rank = order.index(settings[NORM]) if settings[NORM] in order else len(order)
        seed = run.seed if isinstance(run.seed, int) else None
        rows.append(
            {
                "run": run,
                "rank": rank,
                "number": systems.index(settings),
                "seed": seed,
                **run.measures,
            }
        )
    details = _details(systems)
    frame = pandas.DataFrame(rows).astype({"seed": "Int64"})
    frame["details"] = [len(details[number]) for number in frame["number"]]
    frame = frame.sort_values(
        ["rank", "details", "number", "seed"], kind="stable", ignore_index=True
    )
    labels = {number: _label(number, systems, details) for number in frame["number"].unique()}
    frame["system"] = frame["number"].map(labels)
    return Corpus(
        runs[0].data_settings, frame, {label: systems[number] for number, label in labels.items()}
    )


def _details(systems: Sequence[dict[str, object]]) -> list[list[str]]:
    """For each system the settings that differ from the most common value.

    Where no value is the most common, every value that is not the default is named; the size only
    where the systems of one norm differ in it.
    """
    details: list[list[str]] = [[] for _ in systems]
    for name in sorted(set(differing(systems)) - {NORM}):
        values = [as_text(system.get(name)) for system in systems]
        (most_common, count), *others = Counter(values).most_common(2)
        decided = not others or count > others[0][1]
        for labels, system, value in zip(details, systems, values, strict=True):
            if name == SIZE:
                sizes = {as_text(like.get(SIZE)) for like in systems if like[NORM] == system[NORM]}
                differs = len(sizes) > 1
            else:
                differs = value != most_common if decided else system.get(name) is not None
            if differs:
                labels.append(value if name == SIZE else f"{name.rpartition('.')[2]}={value}")
    return details


def _label(number: int, systems: Sequence[dict[str, object]], details: Sequence[list[str]]) -> str:
    """The norm and the details; if they are many, the place among the systems of the norm, or
    their number.
    """
    norm, labels = str(systems[number][NORM]), details[number]
    if len(labels) > _MOST_DETAILS:
        of_norm = [index for index, system in enumerate(systems) if system[NORM] == norm]
        several = len(of_norm) > 1
        labels = [
            f"settings {of_norm.index(number) + 1}" if several else f"{len(labels)} settings differ"
        ]
    return f"{norm} ({', '.join(labels)})" if labels else norm


def as_text(value: object) -> str:
    """A setting's value as text;

    one that is not set is the default of fairseq or of the architecture.
    """
    if isinstance(value, list) and len(value) == 1:  # such as a learning rate
        return as_text(value[0])
    return "default" if value is None else '""' if value == "" else str(value)
