"""A run that resumes after its first epoch has the batches of a run that was never stopped.

fairseq makes the batches of a data set once and keeps them for all epochs, but draws the order of
sentences of equal length from the seed and the epoch in which it makes the batches. So a run that
was resumed in epoch 2 got other batches.
"""

from fairseq.tasks import FairseqTask

from pn_fairseq.fairseq_patches import patch


@patch(
    FairseqTask,
    "get_batch_iterator",
    "self dataset max_tokens max_sentences max_positions ignore_invalid_inputs "
    "required_batch_size_multiple seed num_shards shard_id num_workers epoch data_buffer_size "
    "disable_iterator_cache skip_remainder_batch grouped_shuffling update_epoch_batch_itr",
)
def get_batch_iterator(original, task, dataset, *args, **settings):
    epoch = settings.get("epoch", 1)
    made_for_each_epoch = settings.get("disable_iterator_cache") or settings.get(
        "update_epoch_batch_itr"
    )
    if (
        made_for_each_epoch
        or not task.can_reuse_epoch_itr(dataset)
        or dataset in task.dataset_to_epoch_iter
    ):
        return original(task, dataset, *args, **settings)
    iterator = original(task, dataset, *args, **{**settings, "epoch": 1})
    iterator.epoch = epoch
    dataset.set_epoch(epoch)
    return iterator
