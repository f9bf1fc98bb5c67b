"""pn report: what became of each run, of any command and machine, and which runs are one system."""

import argparse
import dataclasses
import html
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pandas
import pytest
import torch
import yaml

from pn_fairseq import norms
from pn_fairseq.report import translation
from pn_fairseq.report.runs import read_runs
from pn_fairseq.report.systems import labels_of

from ..fixtures.reports import (
    DATA,
    ERRORS,
    START,
    corpus_text,
    make_run,
    make_runs,
    report,
    scores_of,
    settings,
    train_log,
    with_score,
    write_scores,
)
from ..scripts_helpers import assert_refused, in_process

HYPOTHESES = "generate/test/hyp.tok"
BROKEN = '{"loss": "1", "num_up\n'
PATIENCE = """\
early stop since valid performance hasn't improved for last 5 runs
done training in 3.0 seconds
"""
NAN = re.sub(r'"loss": "[0-9.]+"(?=.*"num_updates": "[34]0")', '"loss": "nan"', train_log(5))
NOT_VALIDATED = "".join(line for line in train_log(5).splitlines(True) if "valid" not in line)


class Damage(NamedTuple):
    """A file of a run that is missing or damaged, and what the report makes of it."""

    file: str
    text: str | None  # None: it is missing
    state: str
    says: tuple[str, ...]


LOG, SCORES, STARTS = "train.log", "generate/test/scores.json", "starts.jsonl"
COMPLETE, UNDECODED, UNSCORED = "complete", "trained, not decoded", "decoded, not scored"
DAMAGES = {}


def damage(what: str, file: str, text: str | None, state: str, *says: str) -> None:
    DAMAGES[what] = Damage(file, text, state, says)


damage("failed", "failed", "train: boom <b>\n", "failed: train: boom <b>", "failed: train")
unfinished = train_log(5, 20, done=None)
damage("unfinished", LOG, unfinished, "not finished", "not finished: update 20 of 40")
damage("patience", LOG, unfinished + PATIENCE, COMPLETE, "20 of 40 (patience 5)")
cut_off = train_log(5, done=None)
damage("cut off", LOG, cut_off, COMPLETE, "training cut off, but at update 40 of 40")
two_of_four = "2 of 4 records, first at update 30"
damage("nan", LOG, NAN, COMPLETE, "the training loss is not finite", two_of_four)
faults = train_log(5) + "NaN detected in output of fc1\n"
damage("faults", LOG, faults, COMPLETE, "an infinity in 1 lines")
damage("never validated", LOG, NOT_VALIDATED, COMPLETE, "never validated")
damage("no log", LOG, None, "not trained", "not trained: there is no train.log")
damage("empty log", LOG, "nothing\n", "not trained", "train.log has no record")
broken = train_log(5) + BROKEN
damage("broken line", LOG, broken, COMPLETE, "1 line of train.log cannot be read")
averaged = "checkpoints/averaged.pt"
damage("no checkpoint", averaged, None, UNDECODED, ", and there is no checkpoint")
damage("not decoded", HYPOTHESES, None, UNDECODED, "there is no generate/test/hyp.tok")
damage("not scored", SCORES, None, UNSCORED, "scores.json' (pn score writes it)")
damage("bad scores", SCORES, "{}", UNSCORED, "is not a file of pn score")
of_others = "scores.json belongs to other hypotheses"
damage("old scores", f"{SCORES}.made.txt", "hypotheses=0\n", UNSCORED, of_others)
damage("no starts", STARTS, None, COMPLETE, "there is no starts.jsonl", "Not recorded")
half = json.dumps(START) + "\n{\n"
damage("bad start", STARTS, half, COMPLETE, "line 2 of starts.jsonl cannot be read")
no_settings = "data.settings does not exist"
damage("no data.settings", "data.settings", None, COMPLETE, no_settings, "Data not known")
damage("bad config", "config.yaml", "a: [", COMPLETE, "config.yaml cannot be read")


def test_no_hole(tmp_path):
    runs = {}
    for what, made in DAMAGES.items():
        runs[what] = make_run(tmp_path / what)
        if made.text is None:
            (runs[what] / made.file).unlink()
        else:
            (runs[what] / made.file).write_text(made.text)
    (runs["no checkpoint"] / HYPOTHESES).unlink()
    with_patience = settings() | {"checkpoint": {"patience": 5}}
    (runs["patience"] / "config.yaml").write_text(yaml.safe_dump(with_patience))
    page = report(*runs.values())
    states = {}
    for titles, *rows in page.tables:
        if titles[3:4] == ["state"]:
            states |= {row[2]: row[3] for row in rows}
    bullets = re.findall(r"^- `(.+?)`: (.+)$", html.unescape(page.text), re.M)
    for what, made in DAMAGES.items():
        assert states[what] == made.state
        problems = [text for path, text in bullets if path == str(runs[what])]
        sentences = " ".join(problems).replace("\\", "")
        for words in made.says:
            assert words in sentences or page.says(words), words
        assert bool(sentences) == (what != "patience")
    assert not page.says("Nothing: every run")


def test_a_log_that_cannot_be_read_ends_no_report(tmp_path):
    broken, fine = make_run(tmp_path / "broken"), make_run(tmp_path / "fine", "ln")
    (broken / LOG).unlink()
    (broken / LOG).symlink_to("/proc/self/mem")  # an error even for root
    made = "averaged=update 1\nup_to=30\ntrained_to=30\n"
    (broken / f"{averaged}.made.txt").write_text(made)
    page = report(broken, fine)
    assert page.says("the log cannot be read: [Errno 5]")
    states = {row["run"]: row["state"] for row in page.table("state", "wall time")}
    assert states == {"broken": "not trained", "fine": COMPLETE}


@pytest.mark.parametrize(
    "file, problem",
    {"config.yaml": "no settings: ", "generate/test/scores.json": "not scored: "}.items(),
)
def test_a_file_that_cannot_be_read_ends_no_report(file, problem, tmp_path):
    broken, fine = make_run(tmp_path / "broken"), make_run(tmp_path / "fine", "ln")
    (broken / file).unlink()
    (broken / file).symlink_to("/proc/self/mem")  # an error even for root
    assert report(broken, fine).says(problem)


def test_a_run_that_never_began_is_named(tmp_path):
    (tmp_path / "pn_1").mkdir()
    (tmp_path / "pn_1/failed").write_text("train: no such norm\n")
    page = report(tmp_path / "pn_1", make_run(tmp_path / "ln_1", "ln"))
    assert page.says("pn_1: failed: train: no such norm")
    assert page.says("pn_1: never began: there is neither")
    page = report(tmp_path / "pn_1")  # and without others
    assert page.says("failed: train: no such norm")


def test_restarts_are_added_up(tmp_path):
    # The first start was cut off after update 30, the second resumed from update 20 and finished.
    log = train_log(5, updates=30, done=None) + train_log(5, first=30, done=4.0)
    page = report(make_run(tmp_path / "run", log=log))
    row = page.table("state", "wall time")[0]
    assert row["updates"] == "40 of 40" and row["state"] == "complete"
    written = pandas.read_csv(tmp_path / "out/report.csv")
    assert list(written["tokens"]) == [5000]  # 30 updates, and 20 more
    cut_off = sum(10 * 100 / (1000 + update) for update in (10, 20, 30))
    assert cut_off < 3  # fairseq's own clock, "wall", counted 3 seconds
    assert row["wall time"] == "at least 0:00:07"
    # of 50 updates of 100 tokens, the median of 1010, ..., 1030, 1030, 1540
    assert row["time per update"] == "0.10 s"


def test_a_validation_alone_is_a_training_that_began(tmp_path):
    log = '{"valid_nll_loss": "9.5", "valid_num_updates": "20"}\n'
    page = report(make_run(tmp_path / "run", log=log))
    row = page.table("state", "wall time")[0]
    assert row["updates"] == "20 of 40"
    for name in ("tokens/s", "wall time", "parameters"):
        assert row[name] == "not logged"


def test_machines(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=2)]
    page = report(*runs)
    rows = page.column("what", "all starts")
    assert rows["torch"] == "2.13.0" and rows["starts"] == "2"
    later = {"torch": "2.14.0", "started": "2026-01-03T00:00:00+00:00"}
    for run, changes in zip(runs, ({"torch": ""}, later), strict=True):
        with (run / "starts.jsonl").open("a") as file:
            file.write(json.dumps(START | changes) + "\n")
    page = report(*runs)
    first, second, third = (page.column("what", f"machine {number}") for number in (1, 2, 3))
    assert first["runs"] == "a, b"
    assert second["torch"] == "none"
    assert third["torch"] == "2.14.0" and third["runs"] == "b"
    assert third["last start"] == "2026-01-03T00:00:00+00:00"


def test_a_bleu_below_1_is_a_problem(tmp_path, monkeypatch):
    page = report(with_score(make_run(tmp_path / "run"), 0.03))
    assert page.says("tokenized BLEU is 0.03, below 1: the model has hardly learned")
    assert page.says("1 of the runs was trained, decoded and scored; 1 has problems, listed below.")
    baseline = SimpleNamespace(score=20.0, p_value=0.01)
    system = SimpleNamespace(score=0.9, p_value=0.01)
    comparison = SimpleNamespace(results={"baseline": baseline, "system": system})
    compared = {"tokenized": comparison, "chrf": comparison}
    monkeypatch.setattr(translation, "compare_folders", lambda folders, resamples: compared)
    (run,) = read_runs([tmp_path / "run"])
    texts = translation.bootstrap_texts(run, run, 1, 1)
    assert texts["chrf"] == "−19.10, not tested (BLEU below 1)"
    system.score = 1.0
    for comparisons, p in ((3, "0.030"), (200, "1.000")):
        assert translation.bootstrap_texts(run, run, 1, comparisons)["chrf"] == f"−19.00, p = {p}"


def plain_run(folder: Path, norm: str, seed: int, data: Path) -> Path:
    """A folder of fairseq-train: saved output and checkpoints; decoded and scored."""
    folder.mkdir()
    (folder / "output.txt").write_text(train_log(5))
    changes = {"task__data": str(data), "task__source_lang": None, "task__target_lang": None}
    cfg = settings(norm, seed, **changes)
    # The model of fairseq-train has the flags of all sections, also those that differ between the
    # runs.
    flags = {"seed": seed, "save_dir": str(folder), "betas": (0.9, 0.98)}
    cfg["model"] = argparse.Namespace(**flags, **cfg["model"])
    cfg["checkpoint"] = {"save_dir": str(folder)}
    torch.save({"cfg": cfg, "model": {"w": torch.zeros(1)}}, folder / "checkpoint_last.pt")
    write_scores(folder / "generate/test", *reversed(corpus_text(ERRORS[norm], seed)))
    return folder


def test_folders_of_fairseq_train(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/train.es-en.es.bin").touch()
    runs = []
    for norm, seed in (("ln", 1), ("ln", 2), ("pn", 1), ("pn", 2)):
        runs.append(plain_run(tmp_path / f"{norm}{seed}", norm, seed, tmp_path / "bin"))
    page = report(*runs)
    assert page.column("norm", "seeds scored") == {"LN": "2 (1, 2)", "PN": "2 (1, 2)"}
    assert page.says("es to en") and page.says("Nothing: every run was trained to its end")
    assert page.table("state", "updates")[0]["updates"] == "40 of 40"
    # Prepared by the scripts: comparable with runs of pn train.
    (tmp_path / "settings.txt").write_text(DATA)
    page = report(*runs, make_run(tmp_path / "other", "bn"))
    assert [norm.split()[0] for norm in page.systems] == ["LN", "BN", "PN"]


def test_jobs_of_a_sweep(tmp_path):
    sweep = tmp_path / "sweep"
    for norm in ("ln", "pn"):
        job = sweep / f"model._name=transformer_{norm}_tiny"
        (job / ".hydra").mkdir(parents=True)
        config = json.dumps(settings(norm, task__data=str(tmp_path)))
        (job / ".hydra/config.yaml").write_text(config)
        (job / "train.log").write_text(train_log(5))
    (sweep / "multirun.yaml").touch()
    (sweep / ".hydra").mkdir()
    for given in ([sweep], [path for path in sweep.iterdir() if path.name != ".hydra"]):
        page = report(*given, output=tmp_path / "out")
        assert [row["norm"] for row in page.table("norm", "state")] == ["LN", "PN"]
        (problem,) = re.findall(r"^- all 2 runs: (.*)", page.text, re.M)
        lacking = "there is no generate/test/hyp.tok, and there is no checkpoint"
        assert problem == f"not decoded: {lacking}"


# --- Which runs are one system, and how it is named ---


def test_settings_that_differ(tmp_path):
    runs = [make_run(tmp_path / norm, norm) for norm in ("ln", "pnv")]
    page = report(*runs)
    (row,) = page.table("setting", "LN")
    assert row == {"setting": "encoder norm", "LN": "LN", "PN-V": "PN-V"}
    runs = [
        make_run(tmp_path / "a", "pn", 1, log=train_log(5)),
        make_run(tmp_path / "b", "pn", 2, dataset__num_workers=3, common__log_interval=50),
        make_run(tmp_path / "c", "pn", 1, model__dropout=0.3),
        make_run(tmp_path / "d", "pn", 1, model__norm_variant="release"),
    ]
    page = report(*runs)
    assert [*page.systems] == ["PN", "PN (dropout=0.3)", "PN (norm_variant=release)"]
    assert page.systems["PN"]["seeds scored"] == "2 (1, 2)"
    differing = {row["setting"]: row for row in page.table("setting", "PN")}
    assert differing["model.dropout"]["PN (dropout=0.3)"] == "0.3"
    assert differing["dataset.num_workers"]["PN"] == "default, 3"
    assert not {"common.seed", "task.data", "common.log_file", "optimizer.lr"} & set(differing)
    assert page.says("Nothing to compare: LN, or every other system, is missing")


def test_runs_are_compared_by_what_they_were_decoded_with(tmp_path):
    """An option of pn generate replaces the setting of the run."""
    for name in "ab":
        run = make_run(tmp_path / name, "ln")
        with (run / "config.yaml").open("a") as config:
            config.write("generation: {beam: 5}\n")
    for decoded_with, expected in (((2, 2), {2}), ((1, 2), {1, 2})):
        for name, beam in zip("ab", decoded_with, strict=True):
            made = tmp_path / name / "generate/test/made.txt"
            made.write_text(f"checkpoint=abc\ndata=def\nbeam={beam}\nlenpen=1.0\n")
        runs = read_runs([tmp_path / "a", tmp_path / "b"])
        assert {run.settings_by_name["generation.beam"] for run in runs} == expected


def test_variants_are_named_by_what_differs_from_most_runs(tmp_path):
    """Norms with several seeds and norms with one, variants of a norm, and a learning rate for
    two norms.
    """
    runs = []

    def add(norm: str, seed: int = 1, **changes) -> None:
        runs.append(make_run(tmp_path / f"{len(runs)}_{norm}", norm, seed, **changes))

    for norm, seed in (("ln", 1), ("ln", 2), ("bn", 1), ("pn", 1), ("pn", 2)):
        add(norm, seed)
    for norm in ("ln", "pn"):
        add(norm, optimization__lr=[0.01], optimizer__lr=[0.01])
    add("pn", model__norm_alpha_fwd=0.99)
    add("pn", model__norm_alpha_fwd=0.9, model__norm_alpha_bwd=0.95)
    add("bn", model__norm_variant="release")
    add("ln", model__layer_scale_groups=4)
    page = report(*sorted(runs))
    against = {
        "LN (lr=0.01)": "LN",
        "LN (layer_scale_groups=4)": "LN",
        "BN": "LN",
        "BN (norm_variant=release)": "LN",
        "PN": "LN",
        "PN (lr=0.01)": "LN (lr=0.01)",
        "PN (norm_alpha_fwd=0.99)": "LN",
        "PN (norm_alpha_bwd=0.95, norm_alpha_fwd=0.9)": "LN",
    }
    seeds = page.column("norm", "seeds scored")
    assert list(seeds)[0] == "LN" and seeds.keys() == {"LN", *against}
    several = [label for label, which in seeds.items() if which == "2 (1, 2)"]
    assert several == ["LN", "PN"]
    tests = page.column("system", "tokenized BLEU")
    assert tests.keys() == against.keys()
    for label, other in against.items():
        assert page.says(f"{label} is compared with {other}.")
        assert tests[label].startswith("not tested: ") == (label != "PN")
    assert page.says("1 system and LN, up to 2 blocks; noise")
    assert page.says("corrected by Bonferroni for 8 systems")
    # LN with five others, LN and LN (lr=0.01) with the rest.
    pictures = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert pictures == ["report-curves-1.png", "report-curves-2.png", "report-intervals-1.png"]


def test_a_batch_is_the_same_on_any_number_of_ranks(tmp_path):
    runs = []
    for workers, update_freq in ((1, 2), (2, 1)):
        # The task language_modeling has a copy of the seed.
        changes = {"optimization__update_freq": [update_freq], "task__seed": workers}
        start = {"world_size": workers, "tokens_per_update": 4096}
        runs.append(make_run(tmp_path / str(workers), seed=workers, start=start, **changes))
    page = report(*runs)
    assert page.column("norm", "seeds scored") == {"PN": "2 (1, 2)"}
    # Without a record it follows from the settings and the log: 2048 tokens x 2 x 1 rank in one, x
    # 1 in the other.
    for run in runs:
        (run / "starts.jsonl").unlink()
    page = report(*runs)
    assert [*page.systems] == ["PN (tokens_per_update=4096)", "PN (tokens_per_update=2048)"]


def test_a_mini_batch_is_a_setting_of_norms_that_read_it(tmp_path):
    """LN is the same with any; BN is not."""
    runs = []
    for norm, tokens in itertools.product(("ln", "bn"), (1024, 4096)):
        folder, start = tmp_path / f"{norm}{tokens}", {"tokens_per_update": 4096}
        runs.append(make_run(folder, norm, start=start, dataset__max_tokens=tokens))
    systems = [*report(*runs).systems]
    assert systems == ["LN", "BN (max_tokens=1024)", "BN (max_tokens=4096)"]
    with_batch, without = zip(*labels_of(read_runs(runs)), strict=True)
    assert with_batch == ("LN", *systems)
    assert without == ("LN", "LN", "BN", "BN")
    other = make_run(tmp_path / "other", data=DATA.replace("4000", "8000"))
    *_, last = mixed = read_runs([*runs, other])
    assert labels_of(mixed)[-1] == (last.name, last.name)


def test_seeds_on_one_side_and_seeds_not_known(tmp_path):
    runs = make_runs(tmp_path, ("ln", 1), ("ln", 2), ("pn", 2), ("pn", 3))
    for norm in ("ln", "pn"):
        runs.append(make_run(tmp_path / norm, norm, common__seed=None))
    page = report(*runs)
    first, *_ = page.table("measure", "difference and p, per seed")
    expected = r"seed 2: \S+, p [<=] \S+; seed not known: \S+, p [<=] \S+"
    assert re.fullmatch(expected, first["difference and p, per seed"])
    seeds = {"LN": "3 (1, 2, not known)", "PN": "3 (2, 3, not known)"}
    assert page.column("norm", "seeds scored") == seeds


def test_a_seed_that_was_run_twice_counts_once(tmp_path):
    runs = [make_run(tmp_path / name, "pn", seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    references, hypotheses = corpus_text(0.5, 5)
    write_scores(runs[1] / "generate/test", hypotheses, references)
    page = report(*runs)
    a, b, c = scores_of(runs, "tokenized")
    row, mean = page.systems["PN"], ((a + b) / 2 + c) / 2
    assert row["seeds scored"] == "2 (1, 2)" and row["tokenized BLEU"] == f"{mean:.2f}"
    assert page.says("PN, seed 1 was run more than once (a, b)")


def test_odd_names_are_shown_as_they_are(tmp_path):
    odd = ["a <b> & c", "pipe|and`tick`", "_x_ *y* [z](w)", "$x$ %20#?", "ünï 'quote\" \\ back"]
    runs = [make_run(tmp_path / norm, norm) for norm in ("ln", "pn")]
    runs += [make_run(tmp_path / name / f"pn{name}", "pn", model__note=name) for name in odd]
    page = report(*runs, output=tmp_path / f"out {' '.join(odd)}")
    assert [*page.systems] == ["LN", "PN", *(f"PN (note={name})" for name in odd)]
    assert {f"pn{name}" for name in odd} < {row["run"] for row in page.table("norm", "seed", "run")}
    # A bar ends a cell unless a backslash stands before it.
    bar = re.compile(r"(?<!\\)\|")
    for table in re.findall(r"(?:^\|.*\n)+", page.text, re.M):
        assert len({len(bar.findall(line)) for line in table.splitlines()}) == 1


def test_settings_without_text_are_shown(tmp_path):
    runs = [make_run(tmp_path / name, "pn", task__name=name * (name == "a")) for name in ("a", "b")]
    for run in runs:
        (run / "data.settings").write_text(DATA.replace("lower=1", "lower=") + "=1\n")
    page = report(*runs)
    (row,) = page.table("setting", "PN (name=a)")
    assert row["setting"] == "task.name" and row['PN (name="")'] == '""'


def test_more_than_the_norm_differs(tmp_path):
    """The first sentence says so, and the labels show it; options of norms are part of the norm."""
    control = make_run(tmp_path / "a", "ln")
    few = make_run(tmp_path / "b", "pn", model__dropout=0.3, model__norm_alpha_fwd=0.5)
    six = {f"model__x{number}": number for number in range(6)}
    many = make_run(tmp_path / "c", "pn", **six)
    for run, sentence in (
        (few, "PN (dropout=0.3, norm_alpha_fwd=0.5) differs from LN (dropout=0.1) in dropout."),
        (many, "PN (6 settings differ) differs from LN in x0, x1, x2, x3, x4, x5."),
    ):
        page = report(control, run)
        assert f"**Not only the norms differ:** {sentence}" in page.headline
    others = make_run(tmp_path / "d", "pn", **dict.fromkeys(six, -1))
    page = report(many, others, output=tmp_path / "o")
    assert [*page.systems] == ["PN (settings 1)", "PN (settings 2)"]
    assert page.table("setting", "PN (settings 2)")[5]["PN (settings 1)"] == "5"


def test_norms_from_outside_the_package(tmp_path, monkeypatch):
    layer = norms.NORMS["layer"]
    mine = dataclasses.replace(layer, short="mn", label="")
    yours = dataclasses.replace(layer, short="yn", label="YOURS")
    monkeypatch.setattr(norms, "NORMS", norms.NORMS | {"mine": mine, "yours": yours})
    runs = []
    for short in ("yn", "mn"):
        runs.append(make_run(tmp_path / short, model___name=f"transformer_{short}_tiny"))
    runs.append(make_run(tmp_path / "ln", "ln"))
    assert [*report(*runs).systems] == ["LN", "MN", "YOURS"]


def test_a_test_set_that_was_added_later_is_named_with_its_size(tmp_path):
    """docs/decoding.md, Another test set: counts.txt does not have it."""
    data = tmp_path / "data"
    (data / "bin").mkdir(parents=True)
    (data / "counts.txt").write_text("train=100\nvalid=10\ntest=20\n")
    run = make_run(tmp_path / "run")
    (run / "data").write_text(f"{data}\n")
    (run / "generate/test").rename(run / "generate/test2017")
    page = report(run, options=("--resamples", "10", "--subset", "test2017"))
    rows = page.column("data", "value")
    assert rows["sentence pairs, test2017"] == "30" and rows["sentence pairs, test"] == "20"


def test_a_subset_without_results_is_refused(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "evaluate_lm").mkdir()
    for name in ("valid", "valid-context8"):
        (run / f"evaluate_lm/{name}.json").touch()
    words = ("report", run, "--output", tmp_path / "out", "--subset", "tset")
    assert_refused(
        in_process(*words, check=False), "'tset', did you mean 'test'?; there are test, valid"
    )
    assert not (tmp_path / "out").exists()


def test_equal_problems_are_listed_once(tmp_path):
    runs = [make_run(tmp_path / f"run{number}", seed=number) for number in (1, 2, 3)]
    for run in runs:
        (run / STARTS).unlink()
    for run in runs[1:]:
        (run / LOG).unlink()
    text = report(*runs).text
    problem = "versions and hardware are not recorded: there is no starts.jsonl"
    assert text.count(problem) == 1 and f"- all 3 runs: {problem}\n" in text
    named = ", ".join(f"`{run}`" for run in runs[1:])
    assert f"- 2 of 3 runs ({named}): not trained: there is no train.log\n" in text
    rows = pandas.read_csv(tmp_path / "out/report.csv")
    assert rows["problems"].str.contains(problem).all()


def test_corpora_of_the_same_languages_are_told_apart(tmp_path):
    runs = []
    for name in ("news", "talks"):
        (tmp_path / name / "bin").mkdir(parents=True)
        for seed in (1, 2):
            run = make_run(tmp_path / f"{name}{seed}", seed=seed, data=f"{DATA}folder={name}\n")
            (run / "data").write_text(f"{tmp_path / name}\n")
            runs.append(run)
    text = report(*runs).text
    headings = re.findall(r"(?m)^## (es to en.*)$", text)
    for name, heading in zip(("news", "talks"), headings, strict=True):
        assert name in heading and f"- {heading}. **" in text
