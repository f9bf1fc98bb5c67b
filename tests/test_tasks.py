"""pn_fairseq.tasks: against fairseq's own task on the same data."""

from functools import cache

import pytest
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import pn_fairseq.models  # noqa: F401


@cache
def settings(data, name: str):
    flags = f"--task {name} --arch transformer_pn_tiny --optimizer adam"
    words = [str(data / "bin"), *flags.split()]
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    return convert_namespace_to_omegaconf(args).task


def batches(data, name: str, split: str, seed: int = 1, epoch: int = 1) -> list[dict]:
    task = tasks.setup_task(settings(data, name))
    task.load_dataset(split)
    # A new task for each call: fairseq keeps the iterator of a dataset.
    iterator = task.get_batch_iterator(task.dataset(split), max_tokens=512, seed=seed, epoch=epoch)
    return list(iterator.next_epoch_itr(shuffle=False))


def numbers(found: list[dict]) -> list[int]:
    return [int(number) for batch in found for number in batch["id"]]


def padding(found: list[dict]) -> float:
    """Share of padding in the batches' target tokens."""
    tokens = sum(batch["target"].numel() for batch in found)
    return 1 - sum(batch["ntokens"] for batch in found) / tokens


def test_training_batches_hold_random_sentences(data):
    ours = batches(data, "translation_random_batches", "train")
    fairseqs = batches(data, "translation", "train")
    assert sorted(numbers(ours)) == sorted(numbers(fairseqs))  # each sentence once
    assert padding(ours) > 2 * padding(fairseqs)
    assert all(batch["target"].numel() <= 512 for batch in ours)


@pytest.mark.parametrize("name", ["translation_random_batches", "translation"])
def test_the_batches_follow_from_the_seed(data, name):
    def drawn(**choice):
        return numbers(batches(data, name, "train", **choice))

    assert drawn() == drawn()
    assert drawn() != drawn(seed=3)
    assert drawn() == drawn(epoch=3)  # where a run resumes that has kept them since its first epoch


def test_validation_batches_are_fairseqs(data):
    ours, fairseqs = (
        batches(data, name, "valid") for name in ("translation_random_batches", "translation")
    )
    assert numbers(ours) == numbers(fairseqs)
