"""pn reproduce compare_masks: the commands that it makes."""

import shlex

from ..scripts_helpers import script


def test_each_system_is_trained_in_both_kinds_of_batches(tmp_path):
    run = script("compare_masks.sh", "--dry-run", "--runs", tmp_path)
    trainings = [line for line in run.stdout.splitlines() if line.startswith("pn train")]
    assert len(set(trainings)) == len(trainings) == 5 * 2 * 3
    for line in trainings:
        words = shlex.split(line)
        assert f"model.norm_probe='{words[words.index('--run') + 1]}/norm_probe'" in words
        assert ("task._name=translation_random_batches" in line) == ("/masks_random/" in line)
        assert ("model.norm_ignore_mask=true" in line) == ("+norm_ignore_mask" in line)
    assert not any("norm_ignore_mask" in line for line in trainings if "/ln_" in line)
