"""What the tools need to build the model of a checkpoint that they have read: its settings, and a vocabulary."""

import copy
from argparse import Namespace
from contextlib import ExitStack

from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor, nn

from pn_fairseq.checkpoints import CheckpointError


class Vocabulary:
    """What a transformer asks of a dictionary, for a tool that has no data: its size and the number of padding."""

    def __init__(self, size: int):
        self.size = size

    @classmethod
    def of_side(cls, weights: dict[str, Tensor], side: str) -> "Vocabulary":
        """The vocabulary of ``encoder`` or ``decoder``, as large as its embeddings in a checkpoint's ``weights``."""
        embedding = weights.get(f"{side}.embed_tokens.weight")
        return cls(4 if embedding is None or embedding.dim() == 0 else max(4, len(embedding)))

    def __len__(self) -> int:
        return self.size

    @staticmethod
    def pad() -> int:
        return 1

    def update(self, other: "Vocabulary") -> None:
        """``--merge-src-tgt-embed``: the embeddings in the checkpoint are those of the merged one already."""


def settings_of(state: dict, name: str) -> DictConfig:
    """The settings of a checkpoint as fairseq wants them: its loader only takes files.

    Raises:
        CheckpointError: it holds none; ``name`` is how the message calls it.
    """
    if state.get("args") is not None:
        return convert_namespace_to_omegaconf(state["args"])
    if state.get("cfg") is None:
        raise CheckpointError(f"{name}: holds no settings (neither cfg nor args), so its model cannot be built")
    return OmegaConf.create(state["cfg"], flags={"allow_objects": True})


def model_settings_of(state: dict, name: str) -> Namespace | DictConfig:
    """The settings of a checkpoint's model; errors as in :func:`settings_of`, and for what fairseq does not take."""
    try:
        settings = settings_of(state, name).get("model")
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{name}: fairseq does not take its settings ({one_line(error)})") from error
    if settings is None:
        raise CheckpointError(f"{name}: holds no settings of a model")
    return settings


def model_of(settings: Namespace | DictConfig, weights: dict[str, Tensor], name: str) -> nn.Module:
    """The model of a checkpoint in evaluation mode and float32, without data.

    Args:
        settings: those of the model, which stay as they are.
        weights: the checkpoint's ``"model"``. The vocabularies are as large as the embeddings in it.
        name: how error messages call the checkpoint.

    Raises:
        CheckpointError: the model cannot be built, or the weights are not its.
    """
    settings = copy.deepcopy(settings)  # architectures write their defaults into it
    source = Vocabulary.of_side(weights, "encoder")
    shared = getattr(settings, "share_all_embeddings", False)
    task = Namespace(
        source_dictionary=source, target_dictionary=source if shared else Vocabulary.of_side(weights, "decoder")
    )
    with open_dict(settings) if OmegaConf.is_config(settings) else ExitStack():
        # The embeddings are in the file; fairseq would look for the one that they began with.
        settings.encoder_embed_path = settings.decoder_embed_path = None
    try:
        model = build_model(settings, task, from_checkpoint=True)
    except Exception as error:
        raise CheckpointError(f"{name}: its model cannot be built ({one_line(error)})") from error
    try:
        model.load_state_dict(dict(weights), strict=True)  # a copy: fairseq edits the dict that it is given
    except RuntimeError as error:
        raise CheckpointError(f"{name}: its weights do not fit its own settings ({one_line(error)})") from error
    return model.eval()


def one_line(error: Exception) -> str:
    """An exception of fairseq or torch as part of a message that has to be one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
