"""Grouping runs by the data they were trained on, and by the settings that define a system."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas

from pn_fairseq import norms
from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import read_settings
from pn_fairseq.pipeline.metrics import METRICS, Measure
from pn_fairseq.pipeline.runs import parts_of
from pn_fairseq.pipeline.setting_roles import COPIES, role_of
from pn_fairseq.report.measures import LM_MEASURES, measures_of
from pn_fairseq.report.runs import ReportedRun

#: The size of a mini-batch: a setting for norms with batch statistics; for others it only describes
#: how a run is distributed.
_BATCH = ("dataset.max_tokens", "dataset.batch_size")

NORM = "encoder norm"
SIZE = "size"
#: The norm of language models.
LM_NORM = "model.decoder_norm"
#: pn train distributes this number of tokens over the ranks; for other runs the number is computed
#: from their settings.
TOKENS = "tokens_per_update"
SENTENCES = "sentences per update"
SEED = "common.seed"
#: A label names at most this many settings; the table of the settings that differ lists them all.
_MOST_DETAILS = 4


def norm_labels() -> dict[str, str]:
    """Name of each norm -> its label, in the order of the registry."""
    return {name: entry.label for name, entry in norms.NORMS.items()}


def norm_and_size(run: ReportedRun) -> tuple[str, str]:
    """Norm and size by ``model._name`` and the setting of the norm: ("PN", "tiny") for
    ``transformer_pn_tiny``.

    The name of an architecture of another package counts as its norm, and it has no size.
    """
    arch = str(run.get("model._name", "architecture not known"))
    if arch == "transformer_pn":
        parts = ("transformer", "pn", "base")
    else:
        parts = parts_of(arch)
    if parts is None:
        return arch, "-"
    model, short, size = parts
    translates = model == "transformer"
    names = {entry.short: name for name, entry in norms.NORMS.items()}
    norm = str(run.get("model.encoder_norm" if translates else LM_NORM, names[short]))
    return norm_labels().get(norm, norm), size if translates else f"{model} {size}"


def _batch(run: ReportedRun) -> dict[str, int]:
    """Most tokens (or sentences) in one update, over all ranks, as pn train recorded them, else
    from the settings.
    """
    update_freq = run.get("optimization.update_freq", [1])
    mini_batches = run.world_size
    if isinstance(update_freq, list) and update_freq:
        # fairseq uses the entry for the epoch; later epochs use the last entry.
        mini_batches *= update_freq[-1]
    most = {}
    for name, setting in ((TOKENS, "dataset.max_tokens"), (SENTENCES, "dataset.batch_size")):
        size = run.get(setting)
        if isinstance(size, int):
            most[name] = size * mini_batches
    for start in run.starts:
        if isinstance(start.get(TOKENS), int):
            most[TOKENS] = start[TOKENS]
    return most


def comparable(run: ReportedRun) -> dict[str, object]:
    """The settings by which runs are told apart; norm, size and batch have names of their own."""
    left_out = {"model._name", LM_NORM if run.language_model else "model.encoder_norm"}
    left_out |= {copy for copy, name in COPIES.items() if run.get(copy) == run.get(name)}
    norm, size = norm_and_size(run)
    settings = {NORM: norm, SIZE: size, **_batch(run), **run.settings_by_name}
    # A null setting and a missing one mean the same: the default.
    shown = {}
    for name, value in settings.items():
        if value is not None and name not in left_out and role_of(name).shown:
            shown[name] = value
    return shown


@dataclass
class CorpusRuns:
    """Runs on the same prepared data. Runs on different data are never compared.

    ``frame`` has a row for each run, by norm (LN first) and seed: ``run``, the label of its
    ``system``, ``seed``, and a column for each of the ``measures``, NaN without a value.
    """

    data: dict[str, str] | None  # settings of the data; None if unknown: a single run
    frame: pandas.DataFrame
    settings: dict[str, dict[str, object]]  # by the label of the system
    measures: dict[str, Measure]  # by name

    @property
    def runs(self) -> list[ReportedRun]:
        return list(self.frame["run"])

    def data_folders(self) -> list[Path]:
        """Where the prepared data is; a study trained elsewhere has several."""
        return list(dict.fromkeys(run.data_folder for run in self.runs if run.data_folder))

    def counts(self) -> dict[str, float]:
        """Pairs or tokens of each part of the prepared data; empty if the data is gone."""
        for folder in self.data_folders():
            if (folder / "counts.txt").is_file():
                counts = read_settings(folder / "counts.txt")
                return {name: float(count) for name, count in counts.items()}
        return {}

    @property
    def decoded(self) -> int | None:
        """The number of sentences of the decoded subset; None if no run was decoded."""
        return next((run.decoded for run in self.runs if run.decoded), None)

    def members(self, label: str) -> list[ReportedRun]:
        """The runs of a system."""
        return list(self.frame.loc[self.frame["system"] == label, "run"])

    def norm(self, label: str) -> str:
        return str(self.settings[label][NORM])

    def scores(self) -> pandas.DataFrame:
        """(system, seed) -> measures, if there are any.

        A repeated seed counts once, by its mean.
        """
        names = list(self.measures)
        measured = self.frame.dropna(subset=names, how="all")
        return measured.groupby(["system", "seed"], sort=False, dropna=False)[names].mean()

    @cached_property
    def setting_values(self) -> pandas.DataFrame:
        """The settings of each run as text, in the order of :attr:`runs`: a column for each setting
        except the seed.
        """
        rows = []
        for run in self.runs:
            settings = comparable(run)
            settings.pop(SEED, None)
            rows.append({name: as_text(value) for name, value in settings.items()})
        return pandas.DataFrame(rows).fillna(as_text(None))

    @cached_property
    def baselines(self) -> dict[str, str]:
        """System -> the LN system to compare it with: the one from which it differs in the fewest
        settings.

        Other LN systems are compared with the first, which has the fewest settings of its own.
        Language models are compared only with LN in the same model.
        """
        ln = norm_labels()["layer"]
        controls = [label for label in self.settings if self.norm(label) == ln]
        baselines = {}
        for label, settings in self.settings.items():
            model = self._model(label)
            candidates = [control for control in controls if self._model(control) == model]
            if label in candidates[:1]:
                continue
            if label in candidates:
                candidates = candidates[:1]
            if candidates:
                counts = []
                for control in candidates:
                    counts.append(len(differing([settings, self.settings[control]])))
                baselines[label] = candidates[counts.index(min(counts))]
        return baselines

    def _model(self, label: str) -> tuple | None:
        """What compared language models must share: the model, and whether it is causal."""
        settings = self.settings[label]
        if not self.members(label)[0].language_model:
            return None
        return settings[SIZE], bool(settings.get("model.tensorized_unmasked"))

    def beside_the_norm(self, label: str, baseline: str) -> list[str]:
        """The settings in which two systems differ, except the norms and their options."""
        own = self.settings[label]
        other = self.settings[baseline]
        names = []
        for name in differing([own, other]):
            # The size of a mini-batch is a setting only of systems with batch statistics.
            of_one = name in _BATCH and not (name in own and name in other)
            if not role_of(name).of_norms and not of_one:
                names.append(_short(name))
        return names


def _short(setting: str) -> str:
    return setting.rpartition(".")[2]


def differing(systems: Sequence[Mapping[str, object]]) -> list[str]:
    """Names of the settings that are not the same in all systems."""
    names: dict[str, None] = {}
    for settings in systems:
        names |= dict.fromkeys(settings)
    several = []
    for name in names:
        first, *others = [settings.get(name) for settings in systems]
        if any(value != first for value in others):
            several.append(name)
    return several


def group(runs: Sequence[ReportedRun]) -> list[CorpusRuns]:
    """Runs by data, and within the data by system.

    A run whose data or settings are unknown forms its own group.

    Raises:
        UserError: runs on the same data disagree on a measure, or it is named like a setting.
    """
    corpora: dict[object, list[ReportedRun]] = {}
    for run in runs:
        known = run.data_settings is not None and run.settings_by_name
        if known:
            key = frozenset(run.data_settings.items())
        else:
            key = run.path
        corpora.setdefault(key, []).append(run)
    return [_corpus_runs(members) for members in corpora.values()]


def labels_of(runs: Sequence[ReportedRun]) -> list[tuple[str, str]]:
    """For each run, the label of its system, and its label if the size of mini-batches does not
    count as a setting.

    For runs on different data, both are the name of the run.
    """
    corpus, *others = group(runs)
    if others:
        return [(run.name, run.name) for run in runs]
    of_runs = []
    for grouped in (corpus, _corpus_runs(runs, batch_is_a_setting=False)):
        of_runs.append(grouped.frame.set_index("run")["system"].reindex(runs))
    return list(zip(*of_runs, strict=True))


def _corpus_runs(runs: Sequence[ReportedRun], batch_is_a_setting: bool = True) -> CorpusRuns:
    measures = measures_of({run.name: run.values.values() for run in runs})
    own = LM_MEASURES if runs[0].language_model else METRICS
    measures = dict(own) | measures
    order = list(norm_labels().values())
    mini_batches = _mini_batches_that_count(runs) if batch_is_a_setting else []
    systems: list[dict[str, object]] = []
    rows = []
    for run in runs:
        all_settings = comparable(run)
        for name in all_settings.keys() & measures.keys():
            raise UserError(f"{run.name} has a measure '{name}', which is a setting: rename it")
        settings = {}
        for name, value in all_settings.items():
            if name != SEED and role_of(name).identity:
                settings[name] = value
        norm = settings[NORM]
        for name in _BATCH:
            if (norm, name) in mini_batches:
                settings[name] = run.get(name)
        if settings not in systems:
            systems.append(settings)
        row = {"run": run, "number": systems.index(settings)}
        row["rank"] = order.index(norm) if norm in order else len(order)
        row["seed"] = run.seed if isinstance(run.seed, int) else None
        for name in measures:
            row[name] = run.values[name].value if name in run.values else math.nan
        rows.append(row)
    details = _details(systems)
    frame = pandas.DataFrame(rows).astype({"seed": "Int64"})
    frame["details"] = [len(details[number]) for number in frame["number"]]
    frame = frame.sort_values(
        ["rank", "details", "number", "seed"], kind="stable", ignore_index=True
    )
    labels = {number: _label(number, systems, details) for number in frame["number"].unique()}
    frame["system"] = frame["number"].map(labels)
    settings_by_label = {label: systems[number] for number, label in labels.items()}
    return CorpusRuns(runs[0].data_settings, frame, settings_by_label, measures)


def _mini_batches_that_count(runs: Iterable[ReportedRun]) -> set[tuple[str, str]]:
    """(norm, setting) of the sizes of mini-batches in which the runs of a norm with batch
    statistics differ.
    """
    names = {label: name for name, label in norm_labels().items()}
    sizes: dict[tuple[str, str], set] = {}
    for run in runs:
        norm, _ = norm_and_size(run)
        if norm in names and issubclass(norms.NORMS[names[norm]].cls, norms.RunningNorm):
            for name in _BATCH:
                sizes.setdefault((norm, name), set()).add(run.get(name))
    return {of_norm for of_norm, found in sizes.items() if len(found) > 1}


def _details(systems: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """For each system the settings that differ from the most common value.

    If no value is the most common, every value other than the default is named; the size only if
    the systems of one norm differ in it.
    """
    details: list[list[str]] = [[] for _ in systems]
    for name in sorted(set(differing(systems)) - {NORM}):
        values = [as_text(system.get(name)) for system in systems]
        counted = Counter(values).most_common(2)
        most_common = counted[0][0]
        is_decided = len(counted) == 1 or counted[0][1] > counted[1][1]
        for labels, system, value in zip(details, systems, values, strict=True):
            if name == SIZE:
                if _several_sizes(system[NORM], systems):
                    labels.append(value)
                continue
            if is_decided:
                is_named = value != most_common
            else:
                is_named = system.get(name) is not None
            if is_named:
                labels.append(f"{_short(name)}={value}")
    return details


def _several_sizes(norm: object, systems: Sequence[Mapping[str, object]]) -> bool:
    sizes = {system[SIZE] for system in systems if system[NORM] == norm}
    return len(sizes) > 1


def _label(
    number: int, systems: Sequence[Mapping[str, object]], details: Sequence[list[str]]
) -> str:
    """The norm and the details; if there are many, instead the place among the systems of the norm,
    or the number of the details.
    """
    norm = str(systems[number][NORM])
    labels = details[number]
    if len(labels) > _MOST_DETAILS:
        of_norm = [index for index, system in enumerate(systems) if system[NORM] == norm]
        if len(of_norm) > 1:
            labels = [f"settings {of_norm.index(number) + 1}"]
        else:
            labels = [f"{len(labels)} settings differ"]
    if labels:
        return f"{norm} ({', '.join(labels)})"
    return norm


def as_text(value: object) -> str:
    """A setting's value as text; an unset value means the default of fairseq or of the
    architecture.
    """
    if isinstance(value, list) and len(value) == 1:  # such as a learning rate
        return as_text(value[0])
    if value is None:
        return "default"
    return str(value) or '""'
