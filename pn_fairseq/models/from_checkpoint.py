"""What the tools need to build the model of a checkpoint after reading it: its settings, and
dictionaries.
"""

import copy
from argparse import Namespace
from os import PathLike

from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from pn_fairseq.common.checkpoints import CheckpointError, explain_misfit
from pn_fairseq.fairseq_patches.run_settings import writable


def make_dictionary(size: int) -> Dictionary:
    """A dictionary with ``size`` entries, at least fairseq's own four, and made-up words."""
    dictionary = Dictionary()
    for number in range(size - len(dictionary)):
        dictionary.add_symbol(f"w{number}")
    return dictionary


def task_of(settings, weights: dict[str, Tensor]) -> Namespace:
    """A task without data, with dictionaries as large as the embeddings in a checkpoint's
    ``weights``.
    """

    def dictionary(side: str) -> Dictionary:
        embedding = weights.get(f"{side}.embed_tokens.weight")
        return make_dictionary(0 if embedding is None or embedding.dim() == 0 else len(embedding))

    source = dictionary("encoder")
    shared = getattr(settings, "share_all_embeddings", False)
    return Namespace(
        source_dictionary=source, target_dictionary=source if shared else dictionary("decoder")
    )


def changed(settings, **values):
    """A copy of a model's settings (a Namespace, a hydra node or a dict) with other ``values``."""
    settings = copy.deepcopy(settings)
    if isinstance(settings, dict):
        return {**settings, **values}
    with writable(settings):
        for key, value in values.items():
            setattr(settings, key, value)
    return settings


def with_model_settings(state: dict, **values) -> dict:
    """The checkpoint ``state`` with other ``values`` in the settings of its model; ``state``
    itself stays unchanged.
    """
    if state.get("args") is not None:
        return {**state, "args": changed(state["args"], **values)}
    cfg = state.get("cfg") or {}
    if cfg.get("model") is None:
        return state  # no settings to change: the code that builds the model reports this
    return {**state, "cfg": {**cfg, "model": changed(cfg["model"], **values)}}


def with_norm_module(state: dict, norm_module: str | None) -> dict:
    """The checkpoint ``state`` with another path to the files that register its norms, if given."""
    return with_model_settings(state, norm_module=norm_module) if norm_module else state


def settings_of(state: dict, name: str) -> DictConfig:
    """The settings of a checkpoint as an OmegaConf config; fairseq's own loader accepts only files.

    Raises:
        CheckpointError: the checkpoint holds no settings; ``name`` is its name in the message.
    """
    if state.get("args") is not None:
        return convert_namespace_to_omegaconf(state["args"])
    if state.get("cfg") is None:
        raise CheckpointError(
            f"{name}: holds no settings (neither cfg nor args), so its model cannot be built"
        )
    return OmegaConf.create(state["cfg"], flags={"allow_objects": True})


def model_settings_of(state: dict, name: str) -> Namespace | DictConfig:
    """The settings of a checkpoint's model; errors as in :func:`settings_of`, and for settings that
    fairseq does not accept.
    """
    try:
        settings = settings_of(state, name).get("model")
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{name}: fairseq does not take its settings ({one_line(error)})"
        ) from error
    if settings is None:
        raise CheckpointError(f"{name}: holds no settings of a model")
    return settings


def model_of(settings: Namespace | DictConfig, weights: dict[str, Tensor], name: str) -> nn.Module:
    """The model of a checkpoint in evaluation mode and float32, without data.

    Args:
        settings: settings of the model; they are not changed.
        weights: the checkpoint's ``"model"``.
        name: name of the checkpoint in error messages.

    Raises:
        CheckpointError: the model cannot be built, or the weights do not fit it.
    """
    # The checkpoint contains the embeddings; fairseq would look for the file that they were
    # initialized from.
    settings = changed(settings, encoder_embed_path=None, decoder_embed_path=None)
    model = empty_model(settings, weights, name)
    load_weights(model, weights, name)
    return model.eval()


def empty_model(
    settings: Namespace | DictConfig, weights: dict[str, Tensor], name: str
) -> nn.Module:
    """The model for ``weights``, which are not loaded yet; arguments and errors as in
    :func:`model_of`.
    """
    try:
        return build_model(settings, task_of(settings, weights), from_checkpoint=True)
    except Exception as error:
        raise CheckpointError(f"{name}: its model cannot be built ({one_line(error)})") from error


def load_weights(
    model: nn.Module, weights: dict[str, Tensor], name: str | PathLike, cfg=None
) -> None:
    """Load the ``"model"`` of the checkpoint ``name``; ``cfg``: the settings of the model.

    Raises:
        CheckpointError: the weights do not fit the model.
    """
    try:
        # a copy: fairseq edits the dict
        model.load_state_dict(dict(weights), strict=True, model_cfg=cfg)
    except Exception as error:  # also from fairseq's conversion of old weights
        raise CheckpointError(f"{name}: {explain_misfit(error) or type(error).__name__}") from error


def one_line(error: Exception) -> str:
    """An exception of fairseq or torch as part of a message that must be one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
