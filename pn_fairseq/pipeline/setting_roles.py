"""What each setting of a training run is to the run: the only place that says it.

``pn train`` asks whether a setting may change when a run is resumed, ``pn report`` whether two runs
with other values are two systems, and which settings its tables show.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import NamedTuple


class Role(NamedTuple):
    """What a setting is to a run."""

    identity: bool  # runs with other values are runs of another system
    may_change: bool  # when a run is resumed
    shown: bool = True  # in reports, where runs differ


#: Decides the weights.
WEIGHTS = Role(identity=True, may_change=False)
#: When to stop, what to save and validate, how to decode.
RESULT = Role(identity=True, may_change=True)
#: How a run is logged and distributed. What the distribution means for the result is in
#: ``tokens_per_update``, which stays the same on any number of ranks.
RUNNING = Role(identity=False, may_change=True)
#: The same, but a resumed run would have other updates or other rounding.
STARTED = Role(identity=False, may_change=False)
#: Where things are.
PLACE = Role(identity=False, may_change=True, shown=False)

#: Role -> patterns of dotted names; the first that matches counts.
ROLES: Mapping[Role, tuple[str, ...]] = {
    PLACE: (
        r"task\.data",
        r"checkpoint\.save_dir",
        r"common\.(log_file|tensorboard_logdir|user_dir|plasma_path)",
        r"model\.norm_probe",
    ),
    RUNNING: (
        r"(distributed_training|bmuf)\..*",
        r"common\.(log_interval|log_format|cpu|no_progress_bar|all_gather_list_size)",
        r"dataset\.(num_workers|data_buffer_size|max_tokens(_valid)?|batch_size_valid)",
        r"optimization\.update_freq",
        r"model\.norm_(stats_interval|probe_(interval|layers))",
    ),
    STARTED: (r"dataset\.batch_size", r"model\.compile_layers"),
    RESULT: (
        r"(generation|common_eval|eval_lm|interactive|scoring)(\..*)?",
        r"average_last",
        r"optimization\.(max_update|max_epoch|stop_time_hours)",
        r"checkpoint\.(patience|(save|keep|maximize|best)_.*|no_(epoch|last|save).*)",
        r"checkpoint\.write_checkpoints_asynchronously",
        r"common\.((wandb|aim)_.*|azureml_logging|fp16_no_flatten_grads)",
        r"dataset\.(max_valid_steps|(validate|fixed_validation|disable_validation).*)",
        r"model\.norm_module",
    ),
    WEIGHTS: (
        r"_name|bpe|tokenizer|tokens_per_update",
        r"(model|criterion|optimizer|lr_scheduler|task|ema)\..*",
        r"optimization\.(_name|lr|clip_norm|sentence_avg|stop_min_lr|use_bmuf|debug_param_names)",
        r"optimization\.skip_remainder_batch",
        r"dataset\.(_name|dataset_impl|curriculum|train_subset|valid_subset|gen_subset)",
        r"dataset\.(combine_valid_subsets|ignore_unused_valid_subsets|grouped_shuffling)",
        r"dataset\.(num_shards|shard_id|required_.*|skip_.*|update_.*)",
        r"checkpoint\.(_name|checkpoint_.*|continue_once|finetune_from_model|reset_.*)",
        r"checkpoint\.(load_.*|model_parallel_size|optimizer_overrides|restore_file)",
        r"common\.(_name|seed|profile|reset_logging|suppress_crashes|quantization_config_path)",
        r"common\.(tpu|amp.*|bf16|fp16.*|memory_efficient_.*|.*_loss_scale|use_plasma_view)",
        r"common\.(empty_cache_freq|model_parallel_size|on_cpu_convert_precision)",
    ),
}

#: The settings that one asks for first, with what a report computes of them; a report shows the
#: others where runs differ.
MAIN = (
    r".*\._name|encoder norm|size|average_last|tokens_per_update|sentences per update",
    r"(model|criterion|optimizer|lr_scheduler)\..*",
    r"optimization\.(max_update|max_epoch|lr|stop_min_lr|clip_norm)",
    r"dataset\.(max_tokens|required_batch_size_multiple|validate_interval_updates)",
    r"checkpoint\.(keep_last_epochs|keep_interval_updates|save_interval_updates|patience)",
    r"common\.(seed|fp16|bf16|amp|memory_efficient_fp16)|generation\.(beam|lenpen)",
)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def listed_role(name: str) -> Role | None:
    """The role of a setting in :data:`ROLES`; None if it has none."""
    for role, patterns in ROLES.items():
        if _matches(name, patterns):
            return role
    return None


@functools.cache
def role_of(name: str) -> Role:
    """The role of a setting, by its dotted name. One that is not listed, as of another component of
    fairseq, decides the weights.
    """
    return listed_role(name) or WEIGHTS


@functools.cache
def is_main(name: str) -> bool:
    """Whether a report always shows a setting."""
    return _matches(name, MAIN)
