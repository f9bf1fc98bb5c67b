"""The mean of several checkpoints of one training run, as one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pn_fairseq.common.checkpoint_files import CheckpointError, check_input_path
from pn_fairseq.common.checkpoints import load_checkpoint
from pn_fairseq.common.command import say


def num_updates(state: dict) -> int:
    """Number of updates before a checkpoint was written; -1 if it does not record the number."""
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
    and for float64's rounding, the order of ``paths`` has no influence. The result contains no
    optimizer state, which would belong to other weights. Tensors that share memory in the newest
    checkpoint (tied embeddings) and have the same mean share memory in the result. Memory holds one
    checkpoint at a time and the float64 sums. The function prints a line for each checkpoint.

    Args:
        paths: the files, all different, at least one.

    Raises:
        CheckpointError: a file appears twice, cannot be loaded, differs from the first in its keys,
            shapes or dtypes, or contains a NaN or an infinity.
    """
    _check_different(paths)
    sums: dict[str, torch.Tensor] = {}
    layout: dict[str, tuple] = {}
    newest: dict = {}
    tied: dict[str, str] = {}
    path_of_update: dict[int, Path] = {}
    for number, path in enumerate(paths, 1):
        state = load_checkpoint(path)
        state.pop("last_optimizer_state", None)
        model, updates = state["model"], num_updates(state)
        print(f"[{number}/{len(paths)}] {path}: update {updates}, {len(model)} tensors", flush=True)
        layout = _check_layout(path, model, layout, paths[0])
        same = path_of_update.setdefault(updates, path)
        if updates >= 0 and same != path:
            # fairseq's checkpoint_best.pt and checkpoint_last.pt are copies of an epoch's
            # checkpoint.
            both = f"{same} and {path} are both of update {updates}"
            say("average", f"warning: {both}; is one a copy?")
        averaged = [key for key, value in model.items() if _is_averaged(key, value)]
        if updates >= num_updates(newest):
            newest, tied = state, _tied(model, averaged)
        for key in averaged:
            _add(sums, key, model[key], path)
            model[key] = None  # the sum and the tensor together would double the memory
        del state, model

    means = newest["model"]
    # In the order of the newest file, where the first of tied tensors comes before the others,
    # which need its mean.
    for key, first in tied.items():
        _, dtype = layout[key]
        mean = sums.pop(key).div_(len(paths)).to(dtype)
        shared = means[first]
        means[key] = mean if shared is None or not torch.equal(shared, mean) else shared
    return newest


def _check_different(paths: Sequence[Path]) -> None:
    """Check all paths before the first file is read: a misspelt name must not show up after minutes
    of work.
    """
    seen: dict[tuple, Path] = {}
    for path in paths:
        info = check_input_path(path)
        first = seen.setdefault((info.st_dev, info.st_ino), path)
        if first is not path:
            raise CheckpointError(
                f"{path}: is given twice (also as {first}); name each checkpoint once"
            )


def _check_layout(
    path: Path, model: dict[str, torch.Tensor], expected: dict[str, tuple], first: Path
) -> dict[str, tuple]:
    """Shape and dtype of each tensor, which must be those of the ``first`` checkpoint."""
    layout = {key: (list(value.shape), value.dtype) for key, value in model.items()}
    expected = expected or layout
    for key in {**expected, **layout}:
        if layout.get(key) != expected.get(key):
            own = " ".join(map(str, layout.get(key, ["absent"])))
            other = " ".join(map(str, expected.get(key, ["absent"])))
            raise CheckpointError(f"{path}: does not match {first}: {key} is {own}, not {other}")
    return expected


def _is_averaged(key: str, value: torch.Tensor) -> bool:
    # fairseq's _float_tensor is memory that was never written: it may contain anything, even NaN.
    return value.is_floating_point() and not key.endswith("_float_tensor")


def _tied(model: dict[str, torch.Tensor], keys: Sequence[str]) -> dict[str, str]:
    """Key -> the first key of a tensor with the same memory."""
    first: dict[tuple, str] = {}
    tied = {}
    for key in keys:
        view = model[key].data_ptr(), model[key].shape, model[key].stride()
        tied[key] = first.setdefault(view, key)
    return tied


def _add(sums: dict[str, torch.Tensor], key: str, value: torch.Tensor, path: Path) -> None:
    wide = value.to(torch.float64)
    if not torch.isfinite(wide).all():
        raise CheckpointError(
            f"{path}: {key} holds a NaN or an infinity; leave this checkpoint out"
        )
    if key in sums:
        sums[key].add_(wide)
    else:
        # A copy: .to() returns a float64 input itself, which may overlap another tensor of the
        # file.
        sums[key] = wide.clone(memory_format=torch.contiguous_format)
