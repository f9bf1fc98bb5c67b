"""What the tools need to build the model of a checkpoint that they have read: its settings, and a vocabulary."""

from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

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


def one_line(error: Exception) -> str:
    """An exception of fairseq or torch as part of a message that has to be one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
