"""pn reproduce compare_norms: what its manifest lists, and the commands that it makes of it."""

import pytest

from pn_fairseq.norms import NORMS
from pn_fairseq.pipeline.experiments import manifest

from ..scripts_helpers import assert_refused, script

#: Corpus, folder, seed and norm of every run.
PLANNED = [(part.corpus, part.folder, part.seed, norm) for part in manifest() for norm in part.norms.split()]


def test_every_norm_is_compared_and_no_run_is_made_twice():
    assert len(set(PLANNED)) == len(PLANNED)
    verses = {norm.partition("+")[0] for corpus, _, _, norm in PLANNED if corpus == "verses"}
    assert verses == {entry.short for entry in NORMS.values()}


def test_the_norms_of_the_papers_table_have_three_seeds_or_more():
    for norm, most in {"ln": 8, "bn": 8, "brn": 5, "mabn": 5, "gn": 3, "pnv": 8, "pn": 8}.items():
        seeds = [seed for _, folder, seed, name in PLANNED if (folder, name) == ("verses", norm)]
        assert seeds == list(range(1, most + 1)), norm


def test_every_norm_is_in_the_language_model_with_three_seeds():
    for norm in (entry.short for entry in NORMS.values()):
        assert [seed for corpus, _, seed, name in PLANNED if (corpus, name) == ("verses_lm", norm)] == [1, 2, 3]
    assert {part.models for part in manifest() if part.corpus == "verses_lm"} == {"transformer_lm"}


def test_data_orders_and_initial_weights_are_crossed():
    """With the runs of seeds 1 to 3, which have the same number for both."""
    for norm in ("ln", "pn"):
        crossed = {(seed, name) for _, folder, seed, name in PLANNED if folder == "verses_init" and name[:2] == norm}
        pairs = {(order, f"{norm}+init_seed={weights}") for order in (1, 2, 3) for weights in (1, 2, 3)}
        assert crossed == pairs - {(seed, f"{norm}+init_seed={seed}") for seed in (1, 2, 3)}


def test_commands_of_language_models(tmp_path):
    run = script("compare_norms.sh", "--dry-run", "--only", "verses_lm", "--runs", tmp_path)
    trainings = [line for line in run.stdout.splitlines() if line.startswith("pn train")]
    assert len(trainings) == 54 and len(set(trainings)) == 54
    assert all(f"--run {tmp_path}/verses_lm/transformer_lm_" in line for line in trainings)


def test_commands(tmp_path):
    options = ("--dry-run", "--only", "multi30k", "--multi30k", tmp_path, "--runs", tmp_path)
    run = script("compare_norms.sh", *options)
    trainings = [line for line in run.stdout.splitlines() if line.startswith("pn train")]
    assert len(trainings) == 30
    (training,) = (line for line in trainings if f"--run {tmp_path}/multi30k/pn+layer_scale_groups=0_seed3 " in line)
    settings = "model._name=transformer_pn_tiny common.seed=3 model.layer_scale_groups=0"
    short = "optimization.max_update=800 lr_scheduler.warmup_updates=200 tokens_per_update=2048"
    assert training.endswith(f"{settings} {short} checkpoint.save_interval_updates=50")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "iwslt14"], "'verses', 'multi30k', 'verses_lm'"),
        (["--only", "multi30k"], "needs --multi30k DIR"),
        (["--multi30k", "/nowhere"], "/nowhere is not a directory"),
    ],
)
def test_mistakes_get_one_line(options, message):
    assert_refused(script("compare_norms.sh", *options, check=False), message)
