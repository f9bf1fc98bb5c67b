"""Checkpoints of the authors' release (a fork of fairseq 0.8) as checkpoints of
``transformer_pn``.
"""

from __future__ import annotations

import copy
import logging
from argparse import Namespace

import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY
from torch import Tensor, nn

from pn_fairseq.common.checkpoints import CheckpointError
from pn_fairseq.models import architectures  # noqa: F401 (registers what is looked up below)
from pn_fairseq.models.from_checkpoint import empty_model, one_line
from pn_fairseq.norms import NORMS, PowerNormRelease

#: Beginning of an architecture's name in the release -> our size. The settings contain all other
#: numbers.
_SIZES = {"transformer_iwslt_de_en": "iwslt", "transformer_wmt_en_de_big": "wmt_en_de_big"}

#: The norms whose state and place are known; their names here are the same.
_NORMS = ("layer", "power")

#: Our buffers of a PN -> their names in the release, where the statistics are (1, C, 1, 1) and the
#: counter is (1).
_STATISTICS = {"running_psi2": "running_phi", "nu": "ema_gz", "num_batches_tracked": "iters"}

_SIDES = ("encoder", "decoder")

# the order in which fairseq 0.8 stacks them in in_proj
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def import_release(state: dict, name: str, alpha_fwd: float = 0.9, alpha_bwd: float = 0.9) -> dict:
    """The checkpoint ``state`` of the release in a form that fairseq loads with this plugin.

    Args:
        state: what :func:`pn_fairseq.common.checkpoints.load_checkpoint` read.
        name: name of the checkpoint in error messages.
        alpha_fwd, alpha_bwd: decays of the statistics in its training. nu is (1 - alpha_bwd)
            ema_gz.

    Returns:
        ``args``, ``model``, ``optimizer_history`` (the last entry) and ``extra_state`` (epoch,
        validation loss). The optimizer's own state is left out: it belongs to parameters in the
        order of another model.

    Raises:
        CheckpointError: ``state`` is not a checkpoint of the release, has a norm that cannot be
            imported or two norms on one side, or its tensors do not fit the model that its settings
            describe; the message names tensors that are missing, unknown or of another shape.
    """
    args = _convert_settings(state, name, alpha_fwd, alpha_bwd)
    _remove_loss_scale(state, name)
    file = _split_projections(state["model"])
    with torch.device("meta"):
        model = empty_model(copy.deepcopy(args), file, name)
    weights = _convert_weights(model, file, alpha_bwd, name)
    # A file reduced for sharing may lack the history, of which fairseq needs this much.
    history = state.get("optimizer_history") or [{"lr_scheduler_state": {}, "num_updates": 0}]
    extra = state.get("extra_state") or {}
    imported = {"args": args, "optimizer_history": history[-1:], "extra_state": {}}
    for key in ("train_iterator", "val_loss"):
        if key in extra:
            imported["extra_state"][key] = extra[key]
    try:
        # what fairseq does to the file that it loads
        checkpoint_utils._upgrade_state_dict(copy.deepcopy(imported))
    except Exception as error:
        raise CheckpointError(
            f"{name}: fairseq does not take its settings ({one_line(error)})"
        ) from error
    return {**imported, "model": weights}


def _convert_settings(state: dict, name: str, alpha_fwd: float, alpha_bwd: float) -> Namespace:
    if not isinstance(state.get("args"), Namespace):
        raise CheckpointError(
            f"{name}: is not a checkpoint of the authors' release (it holds no args)"
        )
    settings = dict(vars(state["args"]))
    # The shapes of tensors check everything else; they do not depend on the number of heads.
    wanted = ["arch"]
    for side in _SIDES:
        wanted += [f"{side}_norm_self", f"{side}_norm_ff", f"{side}_attention_heads"]
    missing = [key for key in wanted if settings.get(key) is None]
    if missing:
        raise CheckpointError(
            f"{name}: is not a checkpoint of the authors' release ({_counted(missing)} missing in "
            "its args)"
        )
    arch = settings["arch"]
    sizes = [size for beginning, size in _SIZES.items() if arch.startswith(beginning)]
    if not sizes:
        known = ", ".join(f"{beginning}*" for beginning in _SIZES)
        raise CheckpointError(f"{name}: unknown architecture {arch}; known: {known}")
    for side in _SIDES:
        norm, ff = settings.pop(f"{side}_norm_self"), settings.pop(f"{side}_norm_ff")
        if norm != ff:
            raise CheckpointError(
                f"{name}: {side}_norm_self is {norm} and {side}_norm_ff is {ff}; transformer_pn "
                "has one norm per side"
            )
        if norm not in _NORMS:
            raise CheckpointError(
                f"{name}: {side}_norm_self is {norm}; only {' and '.join(_NORMS)} can be imported"
            )
        # The checkpoint contains the embeddings; fairseq would look for the file that they were
        # initialized from.
        settings |= {f"{side}_norm": norm, f"{side}_embed_path": None}
    settings["arch"] = f"transformer_{NORMS[settings['encoder_norm']].short}_{sizes[0]}"
    settings["norm_variant"] = "release"
    settings |= {"norm_alpha_fwd": alpha_fwd, "norm_alpha_bwd": alpha_bwd}
    settings["psi_warmup_updates"] = int(settings.get("warmup_updates") or 0)
    settings.pop("user_dir", None)
    args = Namespace(**settings)
    ARCH_CONFIG_REGISTRY[args.arch](args)
    return args


def _remove_loss_scale(state: dict, name: str) -> None:
    """Divide ``ema_gz``, which the release computes from scaled gradients, by the loss scale of
    fp16.

    If the file does not contain the scale, for example because the optimizer's state is missing, a
    warning reports this.
    """
    kept = [
        value for key, value in state["model"].items() if key.endswith(".ema_gz") and value.any()
    ]
    scale = (state.get("last_optimizer_state") or {}).get("loss_scale")
    if scale is not None:
        for value in kept:
            value.div_(scale)
    elif kept and getattr(state["args"], "fp16", False):
        logging.getLogger(__name__).warning(
            f"{name}: nu of its norms may hold the loss scale of the training; decoding does not "
            "use nu; set it to 0 before you train further"
        )


def _split_projections(model: dict[str, Tensor]) -> dict[str, Tensor]:
    """``model`` with ``in_proj_weight`` and ``in_proj_bias`` split into q, k and v, as in fairseq
    since 0.9.
    """
    split = {}
    for key, value in model.items():
        prefix, _, last = key.rpartition(".")
        kind = last.removeprefix("in_proj_")
        targets = [f"{prefix}.{projection}.{kind}" for projection in _PROJECTIONS]
        is_stacked = last in ("in_proj_weight", "in_proj_bias")
        is_stacked = is_stacked and value.dim() and value.size(0) % 3 == 0
        if not is_stacked or any(target in model for target in targets):
            split[key] = value
            continue
        for target, part in zip(targets, value.chunk(3), strict=True):
            # A copy: each of three views would be saved with the storage of all three.
            split[target] = part.clone()
    return split


def _convert_weights(
    model: nn.Module, file: dict[str, Tensor], alpha_bwd: float, name: str
) -> dict[str, Tensor]:
    """The weights of ``file`` under the names of ``model``; nu = (1 - alpha_bwd) ema_gz.

    Args:
        name: the checkpoint, for messages.
    """
    expected = model.state_dict()
    name_in_file = _names_in_release(model, file)
    # fairseq 0.8 saves one unused number for sinusoidal positions.
    unused = {f"{side}.embed_positions._float_tensor" for side in _SIDES}
    known = {*name_in_file.values(), *unused}
    problems = {"missing": [], "unknown": [], "of another shape": []}
    for key in file:
        if key not in known:
            problems["unknown"].append(key)
    for ours, old in name_in_file.items():
        shape = _release_shape(ours, old, expected[ours].shape)
        if old not in file:
            problems["missing"].append(old)
        elif tuple(file[old].shape) != shape:
            found = f"{old} {list(file[old].shape)} instead of {list(shape)}"
            problems["of another shape"].append(found)
    texts = [f"{_counted(items)} {kind}" for kind, items in problems.items() if items]
    if texts:
        raise CheckpointError(
            f"{name}: its tensors do not fit the model that its args describe: {'; '.join(texts)}"
        )

    weights = {}
    for ours, old in name_in_file.items():
        value = file[old]
        if old.endswith(".running_phi"):
            value = value.flatten().to(torch.float32)
        elif old.endswith(".ema_gz"):
            exact = (1.0 - alpha_bwd) * value.flatten().to(torch.float64)
            value = exact.to(torch.float32)
        elif old.endswith(".iters"):
            value = value.flatten()[0].to(torch.int64)
        elif old.endswith(".version") and value.item() < 3:
            raise CheckpointError(f"{name}: {old} is {value.item():g}; the release writes 3")
        weights[ours] = value
    _tie_shared(model, weights, name_in_file, name)
    return weights


def _names_in_release(model: nn.Module, file: dict[str, Tensor]) -> dict[str, str]:
    """Our name of each tensor -> its name in the file."""
    names = {key: key for key in model.state_dict()}
    for prefix, module in model.named_modules():
        if isinstance(module, PowerNormRelease):
            for ours, old in _STATISTICS.items():
                names[f"{prefix}.{ours}"] = f"{prefix}.{old}"
    # A separate module since 0.9; before, a bare parameter, or absent if the embeddings are shared.
    output = "decoder.output_projection.weight"
    if output in names and output not in file:
        shared = model.decoder.output_projection.weight is model.decoder.embed_tokens.weight
        names[output] = "decoder.embed_tokens.weight" if shared else "decoder.embed_out"
    return names


def _release_shape(ours: str, old: str, shape: torch.Size) -> tuple[int, ...]:
    if ours == old or old.startswith("decoder.embed"):
        return tuple(shape)
    return (1, shape[0], 1, 1) if len(shape) else (1,)


def _tie_shared(
    model: nn.Module, weights: dict[str, Tensor], theirs: dict[str, str], name: str
) -> None:
    """Make tensors one where the model shares a parameter.

    Raises:
        CheckpointError: they differ in the file.
    """
    first: dict[int, str] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        shared = first.setdefault(id(parameter), key)
        if key != shared and not torch.equal(weights[key], weights[shared]):
            raise CheckpointError(
                f"{name}: {theirs[key]} and {theirs[shared]} differ, though its args say that they "
                "are shared"
            )
        weights[key] = weights[shared]


def _counted(items: list[str]) -> str:
    more = ["..."] if len(items) > 5 else []
    return f"{len(items)} ({', '.join(items[:5] + more)})"
