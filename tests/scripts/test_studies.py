"""pn reproduce compare_masks, compare_placements and compare_adanorm: the commands that they make."""

import re
import shlex

from pn_fairseq.pipeline import experiments

from ..scripts_helpers import script


def trainings(printed: str) -> dict[str, list[str]]:
    """The words of each training by the name of its run."""
    commands = [shlex.split(line) for line in printed.splitlines() if line.startswith("pn train")]
    by_run = {"/".join(words[words.index("--run") + 1].split("/")[-2:]): words for words in commands}
    assert len(by_run) == len(commands)
    return by_run


def test_each_system_is_trained_in_both_kinds_of_batches(tmp_path):
    of_runs = trainings(script("compare_masks.sh", "--dry-run", "--runs", tmp_path).stdout)
    assert len(of_runs) == 5 * 2 * 3
    for name, words in of_runs.items():
        assert f"model.norm_probe='{tmp_path}/{name}/norm_probe'" in words
        assert ("task._name=translation_random_batches" in words) == name.startswith("masks_random/")
        assert ("model.norm_ignore_mask=true" in words) == ("+norm_ignore_mask" in name)
    assert not any("norm_ignore_mask" in name for name in of_runs if "/ln" in name)


def test_rows_of_adanorms_tables_everywhere_and_after_the_last_layers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(experiments, "check_training", lambda *words: None)
    experiments.study("compare_adanorm", ["--dry-run", "--runs", str(tmp_path)])
    of_runs = trainings(capsys.readouterr().out)
    assert len(of_runs) == (7 + 4) * 3 + 3  # and LN
    norms = {"none": "none", "lns": "layer-simple", "dn": "detach", "ada": "ada"}
    last = set()
    for name, words in of_runs.items():
        short = re.search("/([a-z]+)", name)[1]
        settings = dict(word.split("=", 1) for word in words if word.startswith("model."))
        assert settings.pop("model._name") == f"transformer_{short}_tiny"
        sides = [settings.pop(f"model.{side}coder_norm_last", None) for side in ("en", "de")]
        assert sides[0] == sides[1] and settings.pop("model.decoder_norm", None) == norms.get(short)
        last |= {(sides[0], *settings.values())} if sides[0] else set()
        assert not settings or [*settings] in (["model.norm_options.detach"], ["model.norm_options.ada_scale"])
    assert last == {("none",), ("layer-simple",), ("ada",), ("ada", "2.0")}
    seeds = {re.search(r"_seed(\d)$", name)[1] for name in of_runs}
    assert seeds == {"5", "6", "7"} and "adanorm/ln_seed5" in of_runs


def test_each_placement_is_trained_with_three_seeds_and_once_deep(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(experiments, "check_training", lambda *words: None)  # takes a second for each system
    experiments.study("compare_placements", ["--dry-run", "--runs", str(tmp_path)])
    of_runs = trainings(capsys.readouterr().out)
    assert len(of_runs) == 13 * 3 + 13
    for name, words in of_runs.items():
        sides = [word.partition("=")[2] for word in words if re.match(r"model\.(en|de)coder_norm_placement=", word)]
        assert len(sides) in (0, 2) and len(set(sides)) < 2 and (sides or "/ln_seed" in name)
        assert ("model.encoder_layers=18" in words) == name.startswith("placements_deep/")
