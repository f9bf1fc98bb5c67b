"""Several ranks with statistics of their own: what is validated is what is saved."""

import pytest
import torch
from fairseq.tasks.fairseq_task import FairseqTask

from pn_fairseq.norms import ignoring
from pn_fairseq.testing.ranks import run_ranks

from ..models.helpers import build, padded_batch


def statistics(model) -> dict[str, torch.Tensor]:
    found = {}
    for key, value in model.state_dict().items():
        if key.endswith(("running_psi2", ".nu")):
            found[key] = value.clone()
    return found


#: What each rank has trained, and flags.
RUNS = {
    "both trained": ((3, 3), {}),
    "one trained": ((3, 0), {}),
    "averaging off": ((3, 3), {"no_average_norm_stats": True}),
}


def work(rank: int, world: int):
    found = {}
    for name, (steps, flags) in RUNS.items():
        found[name] = validated(rank, steps[rank], flags)
    return found


def validated(rank: int, steps: int, flags: dict):
    """The statistics of a rank before and after the beginning of a validation, and the output of
    its model in it.
    """
    torch.manual_seed(1)
    model = build("transformer_pn_tiny", dropout=0.0, **flags)
    for step in range(steps):
        src, prev = padded_batch(10 * step + rank)
        model.set_num_updates(step)
        model(src, None, prev)[0].square().mean().backward()
    before = statistics(model)
    if rank == 0:
        model.eval()  # only this rank: no collective call that would hang
    FairseqTask(None).begin_valid_epoch(1, model)
    model.eval()
    src, prev = padded_batch(99)
    with torch.no_grad():
        return before, statistics(model), model(src, None, prev)[0]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(work, 2)


@pytest.mark.parametrize("name", ["both trained", "one trained"])
def test_statistics_are_averaged_before_validation(ranks, name):
    """Whatever each rank has trained: LayerDrop can leave out a norm on one of them."""
    before0, after0, output0 = ranks[0][name]
    before1, after1, output1 = ranks[1][name]
    assert len(before0) == 14
    for key, value in before0.items():
        assert not torch.equal(value, before1[key]), "PN is not synchronised by default"
        mean = (value.double() + before1[key].double()) / 2
        torch.testing.assert_close(after0[key].double(), mean, rtol=1e-6, atol=1e-9)
        assert torch.equal(after0[key], after1[key])
    assert torch.equal(output0, output1)


def test_averaging_can_be_turned_off(ranks):
    before0, after0, _ = ranks[0]["averaging off"]
    _, after1, _ = ranks[1]["averaging off"]
    for key, value in before0.items():
        assert torch.equal(after0[key], value)
        assert not torch.equal(after1[key], value)


@pytest.mark.parametrize(
    ("encoder_norm", "norm_sync", "synced"),
    [
        ("power", None, False),
        ("power", "on", True),
        ("power-v", None, True),
        ("power-v", "off", False),
    ]
    + [("batch", None, True), ("batch", "off", False), ("batch", "on", True)],
)
def test_norms_are_synchronised_as_in_the_paper_unless_told_otherwise(
    encoder_norm, norm_sync, synced
):
    model = build("transformer_pn_tiny", encoder_norm=encoder_norm, norm_sync=norm_sync)
    assert model.encoder.layer_norm.sync is synced


@pytest.mark.parametrize("encoder_norm", ["batch", "power-v", "power"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_batch_that_is_ignored_leaves_no_trace(encoder_norm, checkpointed):
    """fairseq gives a rank without data an old batch, and multiplies its loss by 0."""
    model = build(
        "transformer_pn_tiny", encoder_norm=encoder_norm, checkpoint_activations=checkpointed
    )
    src, prev = padded_batch(0)
    for update in range(2):
        model.set_num_updates(update)
        model(src, None, prev)[0].square().mean().backward()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with ignoring(model):
            (model(src, None, prev)[0].square().mean() * 0).backward()
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key]), key
