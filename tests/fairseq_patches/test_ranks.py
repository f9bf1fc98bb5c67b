"""The model between workers that keep their own statistics: what is validated is what is saved."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fairseq.tasks.fairseq_task import FairseqTask

from pn_fairseq.fairseq_patches.dummy_batches import ignoring_batches
from pn_fairseq.norms import MaskedBatchNorm, average_running_stats

from ..models.helpers import build, padded_batch


def work(rank: int, world: int, folder: str, flags: dict) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    torch.manual_seed(1)
    model = build("transformer_pn_tiny", dropout=0.0, **flags)
    for step in range(3):
        src, prev = padded_batch(10 * step + rank)
        model.set_num_updates(step)
        model(src, None, prev)[0].square().mean().backward()
    before = {key: value.clone() for key, value in model.state_dict().items() if "layer_norm" in key}
    if rank == 0:
        model.eval()  # alone: no collective call that would hang
    FairseqTask(None).begin_valid_epoch(1, model)
    model.eval()
    src, prev = padded_batch(99)
    with torch.no_grad():
        output = model(src, None, prev)[0]
    after = {key: value.clone() for key, value in model.state_dict().items() if "layer_norm" in key}
    torch.save((before, after, output), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def run(folder, **flags):
    mp.spawn(work, args=(2, str(folder), flags), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def statistics(state):
    return {key: value for key, value in state.items() if key.endswith(("running_psi2", ".nu"))}


def test_own_statistics_are_averaged_before_evaluation(tmp_path):
    (before0, after0, output0), (before1, after1, output1) = run(tmp_path)
    assert len(statistics(before0)) == 14
    for key, value in statistics(before0).items():
        assert not torch.equal(value, before1[key]), "PN is not synchronised by default"
        mean = (value.double() + before1[key].double()) / 2
        torch.testing.assert_close(after0[key].double(), mean, rtol=1e-6, atol=1e-9)
        assert torch.equal(after0[key], after1[key])
    assert torch.equal(output0, output1)


def test_agreement_can_be_turned_off(tmp_path):
    (before0, after0, _), (_, after1, _) = run(tmp_path, no_norm_agreement=True)
    for key, value in statistics(before0).items():
        assert torch.equal(after0[key], value) and not torch.equal(after1[key], value)


@pytest.mark.parametrize(
    ("encoder_norm", "norm_sync", "synced"),
    [("power", None, False), ("power", "on", True), ("power-v", None, True), ("power-v", "off", False)]
    + [("batch", None, True), ("batch", "off", False), ("batch", "on", True)],
)
def test_norms_are_synchronised_as_in_the_paper_unless_told_otherwise(encoder_norm, norm_sync, synced):
    model = build("transformer_pn_tiny", encoder_norm=encoder_norm, norm_sync=norm_sync)
    assert model.encoder.layer_norm.sync is synced


def test_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="maybe.*auto, on, off"):
        build("transformer_pn_tiny", norm_sync="maybe")


def pool(rank: int, world: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    norm = MaskedBatchNorm(3)
    norm.running_mean.copy_(torch.tensor([0.0, 1.0, 2.0]) * (1 + rank))
    norm.running_var.copy_(torch.tensor([1.0, 2.0, 3.0]) + rank)
    average_running_stats(norm)
    torch.save((norm.running_mean, norm.running_var), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_variances_are_pooled_about_the_common_mean(tmp_path):
    """Two halves of a population with means m, 2m and variances v, v + 1."""
    mp.spawn(pool, args=(2, str(tmp_path)), nprocs=2)
    first, mean, variance = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 1.5, 3.0]), torch.tensor([1.0, 2.0, 3.0])
    pooled = (variance + (first - mean) ** 2 + variance + 1 + (2 * first - mean) ** 2) / 2
    for rank in range(2):
        got_mean, got_variance = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(got_mean, mean)
        torch.testing.assert_close(got_variance, pooled)


@pytest.mark.parametrize("encoder_norm", ["batch", "power-v", "power"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_batch_that_is_ignored_leaves_no_trace(encoder_norm, checkpointed):
    """fairseq gives a worker without data an old batch, and multiplies its loss by 0."""
    model = build("transformer_pn_tiny", encoder_norm=encoder_norm, checkpoint_activations=checkpointed)
    src, prev = padded_batch(0)
    for update in range(2):
        model.set_num_updates(update)
        model(src, None, prev)[0].square().mean().backward()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with ignoring_batches(model):
            (model(src, None, prev)[0].square().mean() * 0).backward()
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key]), key
