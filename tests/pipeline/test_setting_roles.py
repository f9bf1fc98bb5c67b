"""setting_roles.py: what a setting is to a run; tests/test_configs.py has the settings of all
configurations.
"""

import pytest

from pn_fairseq.pipeline.setting_roles import (
    PLACE,
    RESULT,
    RUNNING,
    STARTED,
    WEIGHTS,
    is_main,
    listed_role,
    role_of,
)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("task.data", PLACE),
        ("common.tensorboard_logdir", PLACE),
        ("model.norm_probe", PLACE),
        ("model.norm_probe_interval", RUNNING),
        ("dataset.max_tokens", RUNNING),
        ("dataset.batch_size", STARTED),
        ("distributed_training.ddp_backend", RUNNING),
        ("optimization.max_update", RESULT),
        ("checkpoint.keep_interval_updates", RESULT),
        ("common.fp16_no_flatten_grads", RESULT),
        ("model.norm_module", RESULT),
        ("model.norm_options.unified.window", WEIGHTS),
        ("common.fp16", WEIGHTS),
        ("checkpoint.finetune_from_model", WEIGHTS),
        ("tokens_per_update", WEIGHTS),
    ],
)
def test_roles(name, role):
    assert listed_role(name) is role


def test_a_setting_of_another_component_decides_the_weights():
    assert listed_role("moe.experts") is None and role_of("moe.experts") is WEIGHTS


def test_the_settings_that_a_report_always_shows():
    assert is_main("model.dropout") and is_main("encoder norm") and is_main("common.seed")
    assert not is_main("common.seeds") and not is_main("dataset.num_workers")
