"""``fairseq-eval-lm`` scores every token: it uses shorter blocks, or refuses blocks that are longer
than the model's.

fairseq skips such blocks with a warning and prints the perplexity of the rest, which is 1.00 if all
are skipped. Blocks of fairseq's default length, 1,024 tokens, become as long as the model allows,
with one line in the log. Blocks of another length, and sentences that are too long, are refused.
"""

import logging

from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from pn_fairseq.common.errors import one_line_errors
from pn_fairseq.fairseq_patches import patch

logger = logging.getLogger(__name__)


@patch(
    LanguageModelingTask,
    "eval_lm_dataloader",
    "self dataset max_tokens batch_size max_positions num_shards shard_id num_workers "
    "data_buffer_size context_window",
)
def eval_lm_dataloader(
    original, task, dataset, *args, max_positions=None, context_window=0, **kwargs
):
    # fairseq-eval-lm has subtracted the context
    block = task.args.tokens_per_sample + context_window
    default = block == LanguageModelingConfig().tokens_per_sample
    split = next((name for name, loaded in task.datasets.items() if loaded is dataset), None)
    if (
        max_positions is not None
        and context_window < max_positions < block
        and default
        and split is not None
    ):
        logger.warning(
            f"blocks of {max_positions} tokens instead of {block}: the model takes no more"
        )
        task.args.tokens_per_sample = max_positions - context_window
        task.load_dataset(split)
        dataset = task.dataset(split)
    longest = int(dataset.sizes.max(initial=0)) + context_window
    with one_line_errors(ValueError):
        if max_positions is not None and longest > max_positions:
            raise ValueError(
                f"there are blocks of {longest} tokens, and the model takes {max_positions}: give "
                f"--tokens-per-sample {max_positions}, a smaller --context-window, or shorter "
                "sentences"
            )
    return original(
        task, dataset, *args, max_positions=max_positions, context_window=context_window, **kwargs
    )
