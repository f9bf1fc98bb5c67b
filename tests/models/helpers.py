"""A task without data and models built on it, as fairseq's command line would build them."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import make_builder
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

import pn_fairseq.models  # noqa: F401 (registers the architectures)

VOCABULARY = 100
#: Tokens of a block in language modeling.
BLOCK = 12


def make_dictionary(size: int = VOCABULARY) -> Dictionary:
    dictionary = Dictionary()
    for index in range(size - len(dictionary)):
        dictionary.add_symbol(f"w{index}")
    return dictionary


def make_task(vocabulary: int = VOCABULARY):
    dictionary = make_dictionary(vocabulary)
    settings = Namespace(tokens_per_sample=BLOCK)
    return SimpleNamespace(args=settings, source_dictionary=dictionary, target_dictionary=dictionary)


def arch_args(arch: str, **flags) -> Namespace:
    """The settings that ``--arch ARCH`` and the given flags lead to."""
    flags = flags if "_lm_" in arch else {"share_all_embeddings": True, **flags}
    args = Namespace(arch=arch, **flags)
    ARCH_CONFIG_REGISTRY[arch](args)
    return args


def build(arch: str, vocabulary: int = VOCABULARY, **flags):
    return ARCH_MODEL_REGISTRY[arch].build_model(arch_args(arch, **flags), make_task(vocabulary))


def padded_batch(seed: int = 0, batch: int = 3, source: int = 7, target: int = 5):
    """Source (left-padded, as fairseq does) and target tokens, both with padding."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(4, VOCABULARY, (batch, source), generator=generator)
    prev = torch.randint(4, VOCABULARY, (batch, target), generator=generator)
    src[1, :3] = 1
    prev[0, 3:] = 1
    return src, prev


def write_data(folder: Path, sentences: int = 11, splits=("train", "valid", "test")) -> Path:
    """Data as fairseq-preprocess binarizes it, from de to en with one dictionary; returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for lang in ("de", "en"):
        dictionary = make_dictionary(44)
        dictionary.save(str(folder / f"dict.{lang}.txt"))
        for split in splits:
            prefix = folder / f"{split}.de-en.{lang}"
            builder = make_builder(f"{prefix}.bin", "mmap", vocab_size=len(dictionary))
            for i in range(sentences):
                tokens = [4 + (7 * i + 3 * j + len(split)) % 40 for j in range(3 + i % 5)]
                builder.add_item(torch.tensor([*tokens, dictionary.eos()]))
            builder.finalize(f"{prefix}.idx")
    return folder
