"""``fairseq-eval-lm`` refuses blocks that are longer than the model's.

fairseq skips them with a warning and prints the perplexity of the rest, which is 1.00 where all are skipped.
"""

from fairseq.tasks.language_modeling import LanguageModelingTask

from pn_fairseq.common.errors import one_line_errors
from pn_fairseq.fairseq_patches import patch

PARAMETERS = (
    "self dataset max_tokens batch_size max_positions num_shards shard_id num_workers data_buffer_size context_window"
)


@patch(LanguageModelingTask, "eval_lm_dataloader", PARAMETERS)
def eval_lm_dataloader(original, task, dataset, *args, max_positions=None, context_window=0, **kwargs):
    longest = int(dataset.sizes.max(initial=0)) + context_window
    with one_line_errors(ValueError):
        if max_positions is not None and longest > max_positions:
            raise ValueError(
                f"there are blocks of {longest} tokens, and the model takes {max_positions}: give --tokens-per-sample "
                f"{max_positions}, a smaller --context-window, or shorter sentences"
            )
    return original(task, dataset, *args, max_positions=max_positions, context_window=context_window, **kwargs)
