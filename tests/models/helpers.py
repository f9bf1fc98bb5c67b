"""Batches and binarized data for models without a corpus."""

from pathlib import Path

import torch
import torch.nn.functional as F
from fairseq.data.indexed_dataset import make_builder
from torch.testing import assert_close

from benchmarks.models import BLOCK, VOCABULARY, arch_args, build, make_task
from pn_fairseq.models.from_checkpoint import make_dictionary
from pn_fairseq.testing.helpers import of_kinds

MODEL_NORMS = of_kinds("token", "batch", "running", "token, then batch")

ADAPTIVE = dict(
    adaptive_softmax_cutoff="20,60",
    adaptive_input_cutoff="20,60",
    adaptive_input=True,
    tie_adaptive_weights=True,
    tie_adaptive_proj=True,
    no_decoder_final_norm=True,
)

__all__ = ["BLOCK", "VOCABULARY", "arch_args", "build", "make_dictionary", "make_task"]


def both_sides(**settings) -> dict:
    """Settings for the encoder and for the decoder."""
    both = {}
    for side in ("encoder", "decoder"):
        both |= {f"{side}_{name}": value for name, value in settings.items()}
    return both


def padded_batch(seed: int = 0, batch: int = 3, source: int = 7, target: int = 5):
    """Source (left-padded, as fairseq does) and target tokens, both with padding."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(4, VOCABULARY, (batch, source), generator=generator)
    prev = torch.randint(4, VOCABULARY, (batch, target), generator=generator)
    src[1, :3] = 1
    prev[0, 3:] = 1
    return src, prev


def loss_of(model, src, prev):
    logits = model(src, None, prev)[0].flatten(0, 1)
    return F.cross_entropy(logits, prev.flatten(), ignore_index=1)


def write_data(folder: Path, sentences: int = 11, splits=("train", "valid", "test")) -> Path:
    """Data as fairseq-preprocess binarizes it, from de to en with one dictionary; returns
    ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for lang in ("de", "en"):
        dictionary = make_dictionary(44)
        dictionary.save(str(folder / f"dict.{lang}.txt"))
        for split in splits:
            prefix = folder / f"{split}.de-en.{lang}"
            builder = make_builder(f"{prefix}.bin", "mmap", vocab_size=len(dictionary))
            for i in range(sentences):
                numbers = 7 * i + 3 * torch.arange(3 + i % 5) + len(split)
                tokens = (4 + numbers % 40).tolist()
                builder.add_item(torch.tensor([*tokens, dictionary.eos()]))
            builder.finalize(f"{prefix}.idx")
    return folder


def assert_same_training(model, other, state=(0, 0), **tolerance):
    """Both have the same gradients, and the same statistics within the tolerance ``state``,
    relative and absolute.
    """
    for (key, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_close(one.grad, two.grad, **tolerance, msg=key)
    for (key, one), two in zip(model.named_buffers(), other.buffers(), strict=True):
        assert_close(one, two, rtol=state[0], atol=state[1], msg=key)
