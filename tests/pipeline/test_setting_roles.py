"""setting_roles.py: what a setting is to a run; tests/test_configs.py has the settings of all
configurations.
"""

import dataclasses
import itertools
import re

from fairseq.models import MODEL_REGISTRY
from omegaconf import OmegaConf

from pn_fairseq.fairseq_patches.convert_norms import SETTINGS
from pn_fairseq.models.norm_options import NormOptions
from pn_fairseq.pipeline import setting_roles, training_settings
from pn_fairseq.pipeline.setting_roles import WEIGHTS, listed_role, role_of

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
            assert listed_role(name)[:3] == getattr(setting_roles, role)[:3], name
    for name in ("optimization.max_epoch", "optimization.stop_time_hours", "checkpoint.patience"):
        assert role_of(name).limit, name
    assert role_of("average_last").decoding and role_of("generation.nbest").decoding
    assert role_of("model.encoder_norm_last").of_norms and not role_of("model.cores").of_norms


def test_a_setting_of_another_component_decides_the_weights():
    assert listed_role("moe.experts") is None and role_of("moe.experts") is WEIGHTS


def test_the_settings_that_a_report_always_shows():
    for name in ("model.dropout", "encoder norm", "common.seed"):
        assert role_of(name).main
    assert not role_of("common.seeds").main and not role_of("dataset.num_workers").main


def test_each_flag_of_this_projects_models_is_named():
    """Patterns that match any name are for fairseq's flags."""
    ours, fairseqs = set(), set()
    for name, model in MODEL_REGISTRY.items():
        if model.__module__.startswith("pn_fairseq."):
            ours |= training_settings.keys_of("model", model)
        elif name in ("transformer", "transformer_lm"):
            fairseqs |= training_settings.keys_of("model", model)
    flags = {field.name for field in dataclasses.fields(NormOptions)}
    own = ours - fairseqs | flags - {"run"}  # which is no setting
    assert {"qk_norm", "cores", "norms_folded"} <= own
    patterns = itertools.chain.from_iterable(setting_roles.ROLES.values())
    naming = [pattern for pattern in patterns if not re.fullmatch(pattern, "model.another")]
    for flag in own.union(SETTINGS):
        assert any(re.fullmatch(pattern, f"model.{flag}") for pattern in naming), flag


def test_the_copies_are_those_that_fairseq_makes():
    components = {"optimizer": "adam", "lr_scheduler": "fixed", "task": "language_modeling"}
    cfg = OmegaConf.create({section: {"_name": name} for section, name in components.items()})
    for copy, setting in setting_roles.COPIES.items():
        section, _, key = copy.partition(".")
        assert training_settings._copies(section, cfg)[key] == setting
