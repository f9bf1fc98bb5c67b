"""Models without data, as fairseq's command line would build them."""

from argparse import Namespace
from types import SimpleNamespace

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

import pn_fairseq.models  # noqa: F401 (registers the architectures)
from pn_fairseq.models.from_checkpoint import make_dictionary
from pn_fairseq.norms import NORMS

#: The norm that the others are compared with.
BASE = "ln"

#: The norms of the paper.
DEFAULT = [BASE, "bn", "pnv", "pn"]

SHORT = [entry.short for entry in NORMS.values()]

VOCABULARY = 100
#: Tokens of a block in language modeling.
BLOCK = 12


def make_task(vocabulary: int = VOCABULARY):
    dictionary = make_dictionary(vocabulary)
    settings = Namespace(tokens_per_sample=BLOCK)
    return SimpleNamespace(
        args=settings, source_dictionary=dictionary, target_dictionary=dictionary
    )


def arch_args(arch: str, **flags) -> Namespace:
    """The settings that ``--arch ARCH`` and the given flags lead to."""
    flags = flags if "_lm_" in arch else {"share_all_embeddings": True, **flags}
    args = Namespace(arch=arch, **flags)
    ARCH_CONFIG_REGISTRY[arch](args)
    return args


def build(arch: str, vocabulary: int = VOCABULARY, **flags):
    return ARCH_MODEL_REGISTRY[arch].build_model(arch_args(arch, **flags), make_task(vocabulary))
