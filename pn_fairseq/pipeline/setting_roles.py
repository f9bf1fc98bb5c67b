"""What each setting of a training run means for the run: the only place that defines this.

``pn train`` asks which settings may change when a run is resumed, and which of them are limits or
belong to decoding; ``pn report`` asks whether runs with different values are different systems, and
which settings its tables show.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import NamedTuple


class Role(NamedTuple):
    """What a setting means for a run."""

    identity: bool  # runs with different values belong to different systems
    may_change: bool  # when a run is resumed
    shown: bool = True  # in reports, if runs differ in it
    main: bool = False  # in reports even if runs do not differ: readers ask for it first
    of_norms: bool = False  # systems with different norms may differ in it
    limit: bool = False
    decoding: bool = False


#: Determines the weights.
WEIGHTS = Role(identity=True, may_change=False)
#: What to save and validate.
RESULT = Role(identity=True, may_change=True)
#: When a run is finished.
LIMIT = RESULT._replace(limit=True)
#: What pn average and pn generate read.
DECODING = RESULT._replace(decoding=True)
#: How a run is logged and distributed. Of the distribution, only ``tokens_per_update`` counts as
#: part of the system; it stays the same on any number of ranks.
RUNNING = Role(identity=False, may_change=True)
#: The same, but a resumed run would have other updates or other rounding.
STARTED = Role(identity=False, may_change=False)
#: Where things are.
PLACE = Role(identity=False, may_change=True, shown=False)

#: Role -> patterns of dotted names, and of values that a report computes from them; the first match
#: counts. Each flag of this project's models is listed.
ROLES: Mapping[Role, tuple[str, ...]] = {
    PLACE: (
        r"task\.data",
        r"checkpoint\.save_dir",
        r"common\.(log_file|tensorboard_logdir|user_dir|plasma_path)",
        r"model\.norm_probe",
    ),
    RUNNING._replace(main=True): (
        r"dataset\.max_tokens",
        r"model\.norm_(stats_interval|probe_(interval|layers))",
    ),
    RUNNING: (
        r"(distributed_training|bmuf)\..*",
        r"common\.(log_interval|log_format|cpu|no_progress_bar|all_gather_list_size)",
        r"dataset\.(num_workers|data_buffer_size|(max_tokens|batch_size)_valid)",
        r"optimization\.update_freq",
    ),
    STARTED._replace(main=True): (r"model\.compile_layers",),
    STARTED: (r"dataset\.batch_size",),
    LIMIT._replace(main=True): (r"optimization\.max_(update|epoch)", r"checkpoint\.patience"),
    LIMIT: (r"optimization\.stop_time_hours",),
    DECODING._replace(main=True): (r"average_last", r"generation\.(beam|lenpen)"),
    DECODING: (r"generation(\..*)?",),
    RESULT._replace(main=True, of_norms=True): (r"model\.norm_module",),
    RESULT._replace(main=True): (
        r"checkpoint\.(keep_last_epochs|(keep|save)_interval_updates)",
        r"dataset\.validate_interval_updates",
        r"scoring\._name",
    ),
    RESULT: (
        r"(common_eval|eval_lm|interactive|scoring)(\..*)?",
        r"checkpoint\.((save|keep|maximize|best)_.*|no_(epoch|last|save).*)",
        r"checkpoint\.write_checkpoints_asynchronously",
        r"common\.((wandb|aim)_.*|azureml_logging|fp16_no_flatten_grads)",
        r"dataset\.(max_valid_steps|(validate|fixed_validation|disable_validation).*)",
    ),
    WEIGHTS._replace(main=True, of_norms=True): (
        r"encoder norm",
        r"model\.(encoder|decoder)_norm(_last|_placement|alize_before)?",
        r"model\.(norm_(variant|eps|alpha_fwd|alpha_bwd|sync|ignore_mask)|norms_folded)",
        r"model\.(norm_options(\..*)?|layer_scale_groups)",
    ),
    WEIGHTS._replace(main=True): (
        r".*\._name|size|tokens_per_update|sentences per update",
        r"model\.(qk_norm|decoder_final_norm|post_norm|convert_norms|no_average_norm_stats)",
        r"model\.(psi_warmup_updates|attention_init|init_seed|tensorized_unmasked)",
        r"model\.(cores|core_rank|core_softmax)",
        r"(model|criterion|optimizer|lr_scheduler)\..*",
        r"optimization\.(lr|clip_norm|stop_min_lr)",
        r"dataset\.required_batch_size_multiple",
        r"common\.(seed|fp16|bf16|amp|memory_efficient_fp16)",
    ),
    WEIGHTS: (
        r"_name|bpe|tokenizer",
        r"(task|ema)\..*",
        r"optimization\.(sentence_avg|use_bmuf|debug_param_names|skip_remainder_batch)",
        r"dataset\.(dataset_impl|curriculum|train_subset|valid_subset|gen_subset)",
        r"dataset\.(combine_valid_subsets|ignore_unused_valid_subsets|grouped_shuffling)",
        r"dataset\.(num_shards|shard_id|required_.*|skip_.*|update_.*)",
        r"checkpoint\.(checkpoint_.*|continue_once|finetune_from_model|reset_.*)",
        r"checkpoint\.(load_.*|model_parallel_size|optimizer_overrides|restore_file)",
        r"common\.(profile|reset_logging|suppress_crashes|quantization_config_path)",
        r"common\.(tpu|amp.*|fp16.*|memory_efficient_.*|.*_loss_scale|use_plasma_view)",
        r"common\.(empty_cache_freq|model_parallel_size|on_cpu_convert_precision)",
    ),
}

#: Copies that hydra makes of a setting under another name, which a report does not show beside the
#: setting; the last copy occurs in the task language_modeling.
COPIES = {
    "optimizer.lr": "optimization.lr",
    "lr_scheduler.lr": "optimization.lr",
    "task.seed": "common.seed",
}


def listed_role(name: str) -> Role | None:
    """The role of a setting in :data:`ROLES`; None if it has none."""
    for role, patterns in ROLES.items():
        if any(re.fullmatch(pattern, name) for pattern in patterns):
            return role
    return None


@functools.cache
def role_of(name: str) -> Role:
    """The role of a setting, by its dotted name. A setting that is not listed, such as one of
    another fairseq component, determines the weights.
    """
    return listed_role(name) or WEIGHTS
