"""setting_roles.py: what a setting is to a run; tests/test_configs.py has the settings of all
configurations.
"""

from pn_fairseq.pipeline import setting_roles
from pn_fairseq.pipeline.setting_roles import WEIGHTS, is_main, listed_role, role_of

ROLES = {
    "PLACE": "task.data common.tensorboard_logdir model.norm_probe",
    "RUNNING": "model.norm_probe_interval dataset.max_tokens distributed_training.ddp_backend",
    "STARTED": "dataset.batch_size",
    "RESULT": "optimization.max_update checkpoint.keep_interval_updates model.norm_module "
    "common.fp16_no_flatten_grads",
    "WEIGHTS": "model.norm_options.unified.window common.fp16 tokens_per_update "
    "checkpoint.finetune_from_model",
}


def test_roles():
    for role, names in ROLES.items():
        for name in names.split():
            assert listed_role(name) is getattr(setting_roles, role), name


def test_a_setting_of_another_component_decides_the_weights():
    assert listed_role("moe.experts") is None and role_of("moe.experts") is WEIGHTS


def test_the_settings_that_a_report_always_shows():
    assert is_main("model.dropout") and is_main("encoder norm") and is_main("common.seed")
    assert not is_main("common.seeds") and not is_main("dataset.num_workers")
