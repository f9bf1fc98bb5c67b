"""fairseq's ways of training, with the plugin: half precision, accumulation, recomputation,
ranks, reports.
"""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from fairseq.logging import progress_bar
from torch.testing import assert_close

from pn_fairseq.models.placements import PLACEMENTS
from pn_fairseq.pipeline.training_log import read_log

from ..fixtures.training import model_of, train, train_on_two_ranks
from ..scripts_helpers import in_process


def counters(model):
    found = {key: int(value) for key, value in model.items() if key.endswith("num_batches_tracked")}
    assert len(found) == 7  # two in each of three layers, and the last one
    return found


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory):
    where = tmp_path_factory.mktemp("plain")
    train(data, where)
    return where


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--memory-efficient-fp16",), marks=pytest.mark.ci),
        ("--fp16", "--fp16-no-flatten-grads"),
    ],
    ids=["memory-efficient-fp16", "fp16"],
)
def test_an_overflow_in_half_precision_leaves_the_statistics_alone(flags, data, tmp_path):
    """A loss scale at which every gradient overflows: fairseq skips those steps, and so do the
    statistics.
    """
    scale = ("--fp16-init-scale", 2**26)
    log = train(data, tmp_path, *flags, *scale, "--disable-validation", "--batch-size", 1)
    overflows = len(re.findall("gradient overflow detected", log))
    assert overflows >= 3
    model = model_of(tmp_path)
    # Each layer judges for itself. The first steps overflow everywhere; a later one may have finite
    # gradients in a layer although others overflow, and counts there.
    assert all(6 <= count <= 6 + overflows - 3 for count in counters(model).values()), overflows
    for key, value in model.items():
        if key.endswith(("running_psi2", ".nu")):
            assert value.dtype == torch.float32, key
            assert value.isfinite().all(), key
            assert float(value.abs().max()) < 1e6, key


@pytest.mark.ci
def test_accumulation_counts_updates_for_the_warmup_and_batches_for_the_statistics(
    data, tmp_path, plain
):
    train(data, tmp_path, "--update-freq", 3, "--norm-stats-interval", 1)
    assert set(counters(model_of(tmp_path)).values()) == {18}
    assert set(counters(model_of(plain)).values()) == {6}
    # In the warm-up PN divides by the batch's own psi, so Gamma = psi_B^2 / (psi_B^2 + eps) is just
    # below 1; after it, by the running one. Three warm-up updates of three batches each.
    log = (tmp_path / "train.log").read_text("utf-8")
    gamma = {}
    for line in log.splitlines():
        if "norm_gamma_max" in line:
            record = json.loads(line[line.find("{") :])
            if "num_updates" in record:
                gamma[int(record["num_updates"])] = float(record["norm_gamma_max"])
    # A record of update n + 1 reports what was seen up to the end of update n.
    in_warmup = [gamma[update] for update in (2, 3, 4)]
    afterwards = [gamma[update] for update in (5, 6)]
    assert all(value <= 1.0 for value in in_warmup), gamma
    assert all(value > 1.0 for value in afterwards), gamma


@pytest.mark.ci
@pytest.mark.parametrize(
    "flag",
    ["--checkpoint-activations", pytest.param("--offload-activations", marks=pytest.mark.slow)],
)
def test_recomputation_gives_the_same_losses(flag, data, tmp_path, plain):
    train(data, tmp_path, flag)
    expected = read_log(plain / "train.log")
    got = read_log(tmp_path / "train.log")
    assert len(expected.train) == 6
    assert got.train == expected.train
    assert got.valid == expected.valid
    assert counters(model_of(tmp_path)) == counters(model_of(plain))
    recomputed = model_of(tmp_path)
    for key, value in model_of(plain).items():
        # Where a gradient is only rounding, Adam makes it as large as any: in the bias of the keys,
        # which has no influence on attention, and in some entries of a weight. The norm is that of
        # all entries.
        if not key.endswith("k_proj.bias"):
            value = value.double()
            error = (recomputed[key].double() - value).norm().item()
            close = 1e-4 * value.norm().item()
            assert_close(error, 0.0, rtol=0, atol=close, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [pytest.param(one, marks=pytest.mark.ci) if one == "resi-dual" else one for one in PLACEMENTS],
)
def test_a_placement_trains_resumes_to_the_bit_and_decodes(placement, data, tmp_path):
    flags = (
        "--encoder-norm-placement",
        "sub",
        "--decoder-norm-placement",
        placement,
        "--qk-norm",
        "batch",
    )
    train(data, tmp_path / "straight", *flags, updates=4)
    for updates in (2, 4):
        train(data, tmp_path / "resumed", *flags, updates=updates)
    resumed = model_of(tmp_path / "resumed")
    straight = model_of(tmp_path / "straight")
    assert resumed.keys() == straight.keys()
    assert all(torch.equal(resumed[key], value) for key, value in straight.items())
    folder = tmp_path / "straight/checkpoints"
    search = ("--beam", 2, "--max-len-b", 8)
    in_process("generate", "--run", folder, "--checkpoint", folder / "checkpoint_last.pt", *search)


@pytest.mark.ci
def test_summary_of_the_norms_in_log_tensorboard_and_wandb(data, tmp_path, plain, monkeypatch):
    logged: set[str] = set()
    wandb = SimpleNamespace(
        init=lambda **_: None,
        config=SimpleNamespace(update=lambda _: None),
        log=lambda values, step: logged.update(values),
    )
    monkeypatch.setattr(progress_bar, "wandb", wandb)
    places = ("--tensorboard-logdir", "tensorboard", "--wandb-project", "norms")
    text = train(data, tmp_path, "--log-interval", 2, *places)
    names = ("psi_distance", "nu_rms", "gamma_max", "guarded_steps", "nonfinite_steps")
    assert all(f'"norm_{name}"' in text for name in names)
    events = b"".join(
        path.read_bytes() for path in (tmp_path / "tensorboard/train_inner").iterdir()
    )
    assert all(f"norm_{name}".encode() in events for name in names)
    assert {f"train_inner/norm_{name}" for name in names} <= logged
    without = model_of(plain)
    assert all(torch.equal(value, without[key]) for key, value in model_of(tmp_path).items())
    assert "norm_" not in re.sub(
        "norm_(report|stats|agreement|sync|alpha|eps|variant)|[a-z]norm_", "", read(plain)
    )


def read(where):
    log = (where / "train.log").read_text("utf-8")
    return "\n".join(line for line in log.splitlines() if '"num_updates"' in line)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", ["transformer_pn_tiny", "transformer_pnv_tiny", "transformer_bn_tiny"]
)
def test_two_ranks_under_both_backends(arch, data, tmp_path):
    """legacy_ddp and pytorch_ddp are two implementations of the same sums: weights and statistics
    are equal.
    """
    models = []
    for backend in ("legacy_ddp", "pytorch_ddp"):
        where = tmp_path / backend
        train_on_two_ranks(data, where, "--ddp-backend", backend, "--norm-sync", "on", arch=arch)
        models.append(model_of(where))
    assert set(counters(models[0]).values()) == {6}
    for key, value in models[0].items():
        found = models[1][key]
        assert_close(found, value, rtol=1e-3, atol=1e-5, msg=key)
