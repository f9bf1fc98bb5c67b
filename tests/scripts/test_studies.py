"""pn reproduce --study: what studies plan, and the commands that they make."""

import itertools
import shlex
from pathlib import Path

import pytest

from pn_fairseq.pipeline import reproduce, steps
from pn_fairseq.pipeline.data.recipes import RECIPES

from ..scripts_helpers import ROOT, assert_refused, in_process, replace_steps

#: Corpus, folder, seed and norm of every run of compare_norms.
PLANNED = []
for part in reproduce.read_study("compare_norms").parts:
    for run in itertools.product([part.corpus], [part.folder], part.seeds, part.norms):
        PLANNED.append(run)


@pytest.fixture
def unchecked(monkeypatch):
    """The settings of the runs are not checked, which takes a second for each system."""
    monkeypatch.setattr(steps, "check_training", lambda *words: [])


def training_commands(*arguments, **environ) -> dict[str, list[str]]:
    """The words of each `pn train` of a dry run, by the name of its run."""
    done = in_process("reproduce", *arguments, "--dry-run", **environ)
    by_run = {}
    for line in done.stdout.splitlines():
        if line.startswith("pn train"):
            words = shlex.split(line)
            folder = Path(words[words.index("--run") + 1])
            name = f"{folder.parent.name}/{folder.name}"
            assert name not in by_run
            by_run[name] = words
    return by_run


def test_every_norm_is_compared_and_no_run_is_made_twice():
    assert len(set(PLANNED)) == len(PLANNED)
    every = "ln bn pnv pn brn mabn un rbn prepbn none lns dn ada rms sn gn dyt derf".split()
    translating = [norm for corpus, _, _, norm in PLANNED if corpus == "verses"]
    assert {norm.partition("+")[0] for norm in translating} == set(every)
    of_texts = [(norm, seed) for corpus, _, seed, norm in PLANNED if corpus == "verses_lm"]
    for norm in every:
        assert [seed for name, seed in of_texts if name == norm] == [1, 2, 3]


@pytest.mark.parametrize(
    ("study", "runs"), [("compare_adanorm", (7 + 4) * 3 + 3), ("compare_placements", 12 * 3 + 13)]
)
def test_the_other_studies_are_planned(study, runs, unchecked):
    assert len(training_commands("--study", study)) == runs


def test_commands_of_each_corpus(unchecked, tmp_path):
    of_runs = training_commands("--study", "compare_norms", "--runs", tmp_path)
    assert len(of_runs) == len(PLANNED)
    assert sum(name.startswith("verses_lm/transformer_lm_") for name in of_runs) == 54
    for name, setting in (
        ("verses/pn+layer_scale_groups=0_seed3", "model.layer_scale_groups=0"),
        ("verses_lr0.01/pn_seed3", "optimization.lr=[0.01]"),
    ):
        settings = ["model._name=transformer_pn_tiny", "common.seed=3", setting]
        assert of_runs[name][-3:] == settings


def test_each_system_is_trained_in_both_kinds_of_batches(tmp_path):
    """The settings are checked here."""
    of_runs = training_commands("--study", "compare_masks", "--runs", tmp_path)
    assert len(of_runs) == 5 * 2 * 3 + 5 * 2  # three seeds, and two more in batches by length
    for name, words in of_runs.items():
        assert f"model.norm_probe='{tmp_path}/{name}/norm_probe'" in words
        mixed = "task._name=translation_random_batches" in words
        assert mixed == name.startswith("masks_random/")
        assert ("model.norm_ignore_mask=true" in words) == ("+norm_ignore_mask" in name)
    assert not any("norm_ignore_mask" in name for name in of_runs if "/ln" in name)


def test_the_same_update_in_mini_batches_of_four_sizes(unchecked, tmp_path):
    of_runs = training_commands(
        "--study", "batch_size", "--runs", tmp_path, "optimization.max_update=7"
    )
    same = ["tokens_per_update=4096", "optimization.max_update=7", "--ranks", "1"]
    for size in (512, 1024, 2048, 4096):
        words = of_runs[f"tokens{size}/pn_seed1"]
        assert words[words.index("common.seed=1") + 1 :] == [f"dataset.max_tokens={size}", *same]
    assert len(of_runs) == 4 * 4 * 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("fails", "count"), [("train", 8), ("prepare", 1)])
def test_a_run_that_fails_stops_no_other(fails, count, unchecked, tmp_path, monkeypatch):
    """Without data nothing can be made."""
    line = f'echo "$*" >>"{tmp_path}/calls"; [ "$1" != {fails} ]'
    replace_steps(monkeypatch, lambda step: ["bash", "-c", line, "pn", *step])
    done = in_process(
        "reproduce", "--study", "batch_size", "--runs", tmp_path / "runs", check=False
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    assert done.returncode == 1 and sum(line.startswith("prepare") for line in calls) == count
    assert sum(line.startswith("report") for line in calls) == (12 if fails == "train" else 0)


STUDY = """
about: mine
parts:
- {corpus: verses, folder: a, seeds: [2, 1], norms: [pn], settings: [optimization.max_update=3]}
- {corpus: verses, seeds: [1], norms: [ln, pn+dropout=0.2]}
"""


def test_a_study_of_your_own(unchecked, tmp_path):
    """A seed is whole before the next one begins."""
    (tmp_path / "mine.yaml").write_text(STUDY)
    of_runs = training_commands("--study", tmp_path / "mine.yaml", "--runs", tmp_path, "--ranks", 2)
    first = ["a/pn_seed1", "verses/ln_seed1", "verses/pn+dropout=0.2_seed1"]
    assert [*of_runs] == [*first, "a/pn_seed2"]
    study = ("--study", tmp_path / "mine.yaml", "--runs", tmp_path)
    dry = in_process("reproduce", *study, "--dry-run")
    # a report on all seeds of a folder is the last one that is written there
    last = {}
    for line in dry.stdout.splitlines():
        words = shlex.split(line)
        if words[1] == "report":
            last[words[-1]] = words[2:-2]
    assert last[f"{tmp_path}/a/report"] == [f"{tmp_path}/a/pn_seed{seed}" for seed in (1, 2)]
    assert len(last[f"{tmp_path}/verses/report"]) == 2
    assert of_runs["a/pn_seed2"][-3:] == ["optimization.max_update=3", "--ranks", "2"]


@pytest.fixture
def corpus(tmp_path) -> Path:
    """The recipe of the verses in a user's file, which has no folder in runs/data."""
    recipe = (ROOT / "pn_fairseq/pipeline/data/recipes/verses.py").read_text("utf-8")
    recipe = recipe.replace('CONFIG = "verses_es_en"', 'CONFIG = ""')
    file = tmp_path / "own_verses.py"
    file.write_text(recipe.replace("Experiment(CONFIG", 'Experiment("verses_es_en"'), "utf-8")
    yield file
    del RECIPES["own_verses"]


def test_a_recipe_of_your_own(corpus, unchecked, tmp_path, monkeypatch):
    """By its path, alone and in the parts of a study."""
    monkeypatch.chdir(tmp_path)
    part = "{corpus: own_verses.py, seeds: [1], norms: [ln]}"
    again = f"{{corpus: {corpus}, seeds: [1], norms: [ln], folder: slow, settings: [a=1]}}"
    (tmp_path / "mine.yaml").write_text(f"about: mine\nparts: [{part}, {again}]\n")
    done = in_process("reproduce", "--study", "mine.yaml", "--dry-run")
    lines = done.stdout.splitlines()
    prepared = "pn prepare own_verses.py --dest runs/data/verses_es_en"
    assert lines.count(prepared) == 2
    reports = [line for line in lines if line.startswith("pn report")][-2:]
    for folder, line in zip(("own_verses", "slow"), reports, strict=True):
        runs = f"runs/mine/{folder}"
        assert line == f"pn report {runs}/ln_seed1 --output {runs}/report"
    alone = in_process("reproduce", "own_verses.py", "--norms", "ln", "--seeds", 1, "--dry-run")
    assert alone.stdout.startswith(f"{prepared}\npn train verses_es_en --data ")


NO_STUDY = "is not a study"
PART = "{corpus: verses, seeds: [1], norms: [ln]}"


def with_settings(value: str) -> str:
    return f"parts: [{{corpus: verses, seeds: [1], norms: [ln], settings: {value}}}]"


def test_a_study_says_its_question(tmp_path):
    (tmp_path / "mine.yaml").write_text(f"parts: [{PART}]")
    refused = in_process("reproduce", "--study", tmp_path / "mine.yaml", "--dry-run", check=False)
    assert_refused(refused, "it has no about; about (its question) and parts (its runs) are needed")


@pytest.mark.parametrize(
    ("study", "needles"),
    [
        ("", [NO_STUDY, "parts"]),
        ("parts: [{corpus: verses, seeds: [1]}]", [NO_STUDY, "norms"]),
        ("parts: [{corpus: verses, seeds: [1], norms: [pn], seed: 1}]", [NO_STUDY, "'seed'"]),
        ("parts: [{corpus: verses, seeds: 1, norms: [pn]}]", [NO_STUDY, "seeds"]),
        (
            "parts: [{corpus: verses, seeds: [1], norms: [pm]}]",
            ["unknown norm 'pm', did you mean 'pn'?"],
        ),
        ("parts: [3]", [NO_STUDY, "parts must be a list of parts"]),
        (
            f"parts: [{PART}, {{setings: []}}]",
            ["part 2 has", "'setings', did you mean 'settings'?"],
        ),
        ("prts: []", [NO_STUDY, "unknown key 'prts', did you mean 'parts'?"]),
        (
            f"parts: [{PART}, {{corpus: verses, seeds: 1, norms: [pn]}}]",
            ["part 2 has seeds: 1, which", "as in 'seeds: [1, 2, 3]'"],
        ),
        (with_settings("a=1"), ["part 1 has settings: a=1", "as in 'settings: [optimiz"]),
        (with_settings("{a: 1}"), ["part 1 has settings: {'a': 1}", "as in 'settings: [optimiz"]),
        (with_settings("[{a: 1}]"), ["part 1 has settings: [{'a': 1}]", "as in 'settings: [opt"]),
        (
            f"parts: [{PART}, {{corpus: verses, seeds: [2, 1], norms: [ln], settings: [a=1]}}]",
            ["parts 1 and 2", "'verses/ln_seed1'", "give one of them another folder"],
        ),
        (
            "parts: [{corpus: verses, seeds: [1], norms: [pn], folder: a/../..}]",
            ["part 1 has its runs in 'a/../..'", "'folder: slow'"],
        ),
        (
            "parts: [{corpus: verses, seeds: [1], norms: [pn], folder: /runs}]",
            ["part 1 has its runs in '/runs'", "'folder: slow'"],
        ),
        ("parts: [", ["cannot be read as settings"]),
    ],
)
def test_mistakes_in_studies(study, needles, tmp_path, unchecked):
    (tmp_path / "mine.yaml").write_text(f"about: a\n{study}")
    refused = in_process("reproduce", "--study", tmp_path / "mine.yaml", "--dry-run", check=False)
    assert_refused(refused, *needles)
