"""The mean of several checkpoints of one training run, as one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pn_fairseq.common.checkpoint_files import CheckpointError, check_input_path
from pn_fairseq.common.checkpoints import load_checkpoint
from pn_fairseq.common.command import say


def num_updates(state: dict) -> int:
    """Number of updates before a checkpoint was written;

    -1 if the checkpoint does not record it.
    """
    history = state.get("optimizer_history") or [{}]
    return history[-1].get("num_updates", -1)


@torch.no_grad()
def average_checkpoints(paths: Sequence[Path]) -> dict:
    """The arithmetic mean of fairseq checkpoints, as a checkpoint that fairseq loads.

    Every floating-point tensor of ``state["model"]`` is summed in float64, divided by the number of
    checkpoints and cast back to its dtype. Everything else is copied from the newest checkpoint:
    integer and boolean buffers (``num_batches_tracked``), ``cfg``, ``extra_state``. The newest
    checkpoint is the one with the most updates. A checkpoint that records no updates counts as
    older than one that does; among equals the last in ``paths`` is the newest. Except for that tie,
    and for float64's rounding, the order of ``paths`` has no influence. The result has no optimizer
    state, which would belong to weights that it does not contain. Tensors that share memory in the
    newest checkpoint (tied embeddings) and have the same mean share memory in the result. Memory
    holds one checkpoint at a time and the float64 sums. Prints a line for each checkpoint.

    Args:
        paths: the files, all different, at least one.

    Raises:
        CheckpointError: a file appears twice, cannot be loaded, differs from the first in its keys,
            shapes or dtypes, or contains a NaN or an infinity.
    """
    # All paths are checked before the first file is read: a misspelt name must not show up after
    # minutes of work.
    seen: dict[tuple, Path] = {}
    for path in paths:
        info = check_input_path(path)
        if (first := seen.setdefault((info.st_dev, info.st_ino), path)) is not path:
            raise CheckpointError(
                f"{path}: is given twice (also as {first}); name each checkpoint once"
            )

    reference: dict[str, tuple] = {}
    sums: dict[str, torch.Tensor] = {}
    newest: dict = {}
    tied: dict[str, str] = {}  # key -> the first key with the same memory, in the newest checkpoint
    path_of_update: dict[int, Path] = {}
    for number, path in enumerate(paths, 1):
        state = load_checkpoint(path)
        state.pop("last_optimizer_state", None)
        model, updates = state["model"], num_updates(state)
        print(f"[{number}/{len(paths)}] {path}: update {updates}, {len(model)} tensors", flush=True)
        layout = {key: (list(value.shape), value.dtype) for key, value in model.items()}
        # fairseq's _float_tensor is memory that was never written: any bits, NaN too.
        averaged = [
            key
            for key in model
            if model[key].is_floating_point() and not key.endswith("_float_tensor")
        ]
        reference = reference or layout
        if layout != reference:
            key = next(
                key for key in {**reference, **layout} if layout.get(key) != reference.get(key)
            )
            own, first = (
                " ".join(map(str, tensors.get(key, ["absent"]))) for tensors in (layout, reference)
            )
            raise CheckpointError(f"{path}: does not match {paths[0]}: {key} is {own}, not {first}")
        if updates >= 0 and (same := path_of_update.setdefault(updates, path)) != path:
            # fairseq copies: checkpoint_best.pt and checkpoint_last.pt repeat an epoch's
            # checkpoint.
            say(
                "average",
                f"warning: {same} and {path} are both of update {updates}; is one a copy?",
            )
        if not newest or updates >= num_updates(newest):
            newest, first = state, {}  # the first key of each view of memory
            views = {
                key: (model[key].data_ptr(), model[key].shape, model[key].stride())
                for key in averaged
            }
            tied = {key: first.setdefault(view, key) for key, view in views.items()}
        for key in averaged:
            wide = model[key].to(torch.float64)
            if not torch.isfinite(wide).all():
                raise CheckpointError(
                    f"{path}: {key} holds a NaN or an infinity; leave this checkpoint out"
                )
            # A copy: a float64 input comes through .to() unchanged, and may overlap another tensor
            # of the file.
            sums[key] = (
                sums[key].add_(wide)
                if key in sums
                else wide.clone(memory_format=torch.contiguous_format)
            )
            model[key] = None  # the sum and the tensor together would double the memory
        del state, model

    means = newest["model"]
    for key in list(sums):
        mean = sums.pop(key).div_(len(paths)).to(reference[key][1])
        shared = means[tied[key]]
        means[key] = mean if shared is None or not torch.equal(shared, mean) else shared
    return newest
