"""``--norm-probe``: what it records, against float64 formulas; the same bits; ranks,
accumulation, resuming.
"""

import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from pn_fairseq.models.norm_probe import NormProbe
from pn_fairseq.models.probe_files import SCHEMA
from pn_fairseq.norms import NORMS, build_norm, convert_norms, set_loss_scale
from pn_fairseq.report.figures import read_probe
from pn_fairseq.testing.helpers import randomize_affine, real_tokens, rng, tensors
from pn_fairseq.testing.ranks import run_ranks

from ..fixtures.training import model_of, train
from .helpers import build

EPS = 1e-5


class Criterion(nn.Module):
    """The sum of y * weights over the real tokens, its sample size as fairseq's criteria give
    it.
    """

    def forward(self, model, sample):
        y = model(sample["x"], sample["mask"])
        return (y * sample["weights"]).sum(), sample["size"], {}


class OneNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x, mask):
        return self.norm(x, mask)


def update(probe, model, criterion, samples, completed, loss_scale=1.0):
    """What fairseq's trainer does between begin and end of an update."""
    set_loss_scale(model, loss_scale)
    probe.begin(completed, criterion, "")
    for sample in samples:
        loss, _, _ = criterion(model, sample)
        (loss * loss_scale).backward()
    probe.end(completed + 1)


def sample_of(seed, shape=(5, 3, 12)):
    x, mask, weights = tensors(rng(seed), shape)
    return {"x": x.requires_grad_(), "mask": mask, "weights": weights, "size": 7 + seed}


def lengths(vector):
    l1 = np.abs(vector).sum()
    l2 = np.sqrt((vector**2).sum())
    return l1 / len(vector), l2 / len(vector)


@pytest.mark.parametrize("name", ["batch", "power", "layer"])
def test_images_are_recorded_as_their_pixels(name, tmp_path):
    """A norm that convert_norms puts in the place of BatchNorm2d gives the rows of the same norm
    on (N H W, 1, C).
    """
    images, weights = torch.randn(2, 6, 12, 3, 5)
    pixels = (values.movedim(1, -1).reshape(-1, 1, 12) for values in (images, weights))
    tables = []
    for index, (x, w) in enumerate(((images, weights), pixels)):
        sample = {"x": x.requires_grad_(), "mask": None, "weights": w, "size": 7}
        model = OneNorm(build_norm(name, 12) if index else nn.BatchNorm2d(12))
        if not index:
            warmup = {"psi_warmup_updates": 0} if name == "power" else {}  # as build_norm's
            convert_norms(model, name, layout="BCHW", **warmup)
            model.forward = lambda x, mask, norm=model.norm: norm(x)
        probe = NormProbe(model, tmp_path / str(index), 1, "*")
        update(probe, model, Criterion(), [sample], 0)
        tables.append(read_probe(tmp_path / str(index)))
    pd.testing.assert_frame_equal(*tables, rtol=1e-5)


def test_a_converted_norm_whose_mask_the_probe_cannot_see_is_refused(tmp_path):
    model = convert_norms(nn.Sequential(nn.LayerNorm(12)), "batch")
    with pytest.raises(ValueError, match="0 was converted and takes its mask from the context"):
        NormProbe(model, tmp_path, 1, "*")


@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize(
    "name", sorted({"layer", "batch", "power", "power-v", "unified", "rms", "scale"} & set(NORMS))
)
def test_every_column_against_numpy(name, groups, tmp_path):
    options = {"psi_warmup_updates": 0, "renorm_updates": 0}
    norm = randomize_affine(build_norm(name, 12, layer_scale_groups=groups, **options))
    model = OneNorm(norm)
    probe = NormProbe(model, str(tmp_path / "probe"), 4, "norm")
    criterion = Criterion()
    batches = []
    size = 10
    for step in range(4):
        sample = sample_of(step)
        before = {key: value.double().numpy().copy() for key, value in norm.state_dict().items()}
        update(probe, model, criterion, [sample], step, loss_scale=8.0)
        h = norm.layer_scale(sample["x"].detach()).double().numpy()
        real = real_tokens(h.shape, sample["mask"].numpy())
        batches.append((h[real], sample["weights"].double().numpy()[real]))
    (row,) = read_probe(tmp_path / "probe").to_dict("records")
    statistics = []
    for h, _ in batches:
        statistics.append({"mu": h.mean(0), "sigma2": h.var(0), "psi2": (h**2).mean(0)})
    now = statistics[-1]
    h, dy = batches[-1]
    dy = dy / size
    decay = getattr(norm, "alpha_fwd", 0.9)
    weights = np.array([decay**2, decay, 1]) / (decay**2 + decay + 1)
    running = {}
    for key in now:
        kept = np.stack([statistic[key] for statistic in statistics[:-1]])
        running[key] = weights @ kept
    if "running_psi2" in before:
        running["psi2"] = before["running_psi2"]
    if "running_var" in before:
        mean = before["running_mean"]
        var = before["running_var"]
        running = {"mu": mean, "sigma2": var, "psi2": var + mean**2}
    sigma = np.sqrt(now["sigma2"] + EPS)
    psi = np.sqrt(now["psi2"] + EPS)
    vectors = {f"{key}_distance": running[key] - now[key] for key in now}
    vectors["g_mu"] = dy.mean(0)
    vectors["g_sigma2"] = (dy * (h - now["mu"]) / sigma).mean(0)
    vectors["g_psi2"] = (dy * h / psi).mean(0)
    for key, vector in vectors.items():
        found = (row[f"{key}_l1"], row[f"{key}_l2"])
        np.testing.assert_allclose(found, lengths(vector), rtol=2e-4, err_msg=key)
    running_sigma = np.sqrt(running["sigma2"] + EPS)
    running_psi = np.sqrt(running["psi2"] + EPS)
    of_mean = np.mean(np.abs(running["mu"] - now["mu"]) / sigma)
    of_variance = np.mean(np.abs(running_sigma / sigma - 1))
    np.testing.assert_allclose(row["tid_mean"], of_mean, rtol=1e-4)
    np.testing.assert_allclose(row["tid_var"], of_variance, rtol=1e-4)
    np.testing.assert_allclose(row["psi_batch_over_psi"], psi / running_psi, rtol=1e-4)
    if "weight" in before and before["weight"].shape == (12,):
        np.testing.assert_allclose(row["gamma_over_psi_batch"], before["weight"] / psi, rtol=1e-4)
    else:
        assert row["gamma_over_psi_batch"] is None
    if "nu" in before:
        nu_xhat = before["nu"] / size * h / running_psi
        expected = np.sqrt((nu_xhat**2).sum(1).mean()) / 12
        np.testing.assert_allclose(row["nu_xhat_l2"], expected, rtol=1e-4)
    else:
        assert np.isnan(row["nu_xhat_l2"])
    assert row["update"] == 4
    assert row["forward"] == 0
    assert row["norm"] == "norm"
    assert row["kind"] == name
    assert row["channels"] == 12
    assert row["tokens"] == len(h)
    assert row["sample_size"] == size
    assert row["loss_scale"] == 8.0


def test_only_recorded_updates_and_those_before_them_have_hooks(tmp_path):
    norm = build_norm("layer", 12)
    model = OneNorm(norm)
    criterion = Criterion()
    probe = NormProbe(model, str(tmp_path / "probe"), 30, "norm")
    with_hooks = []
    for completed in range(60):
        probe.begin(completed, criterion, "")
        if norm._forward_hooks:
            with_hooks.append(completed + 1)
        probe.end(completed + 1)
        assert not norm._forward_hooks
        assert not criterion._forward_hooks
    assert with_hooks == [*range(20, 31), *range(50, 61)]


def test_a_skipped_update_is_not_recorded(tmp_path):
    model = OneNorm(build_norm("batch", 12))
    criterion = Criterion()
    probe = NormProbe(model, str(tmp_path / "probe"), 1, "norm")
    probe.begin(0, criterion, "")
    criterion(model, sample_of(0))[0].backward()
    probe.end(0)
    assert not list((tmp_path / "probe").iterdir())


# The curves of the plain run.

NO_CURVES = ("forward", "running", "kind", "norm", "loss_scale")
CURVES = [field.name for field in SCHEMA if field.name not in NO_CURVES]


def sentences(rows):
    """Tokens for a model: source and target of the sentences ``rows`` of 8, without padding."""
    generator = torch.Generator().manual_seed(5)
    src = torch.randint(4, 100, (8, 6), generator=generator)
    prev = torch.randint(4, 100, (8, 5), generator=generator)
    return {"src": src[rows], "prev": prev[rows], "size": 5 * len(src[rows])}


class Translation(nn.Module):
    def forward(self, model, sample):
        logits = model(sample["src"], None, sample["prev"])[0]
        target = sample["prev"].flatten()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target, reduction="sum")
        return loss, sample["size"], {}


def curves(folder, parts, flags, updates=3):
    """The rows of a model that takes ``updates`` times the sentences of ``parts``, one forward
    each.
    """
    torch.manual_seed(3)
    arch = f"transformer_{flags.pop('norm')}_tiny"
    model = build(arch, dropout=0.0, attention_dropout=0.0, **flags)
    model.train()
    probe = NormProbe(model, str(folder), 1, "encoder.*")
    criterion = Translation()
    for completed in range(updates):
        model.set_num_updates(completed)
        update(probe, model, criterion, [sentences(rows) for rows in parts], completed)
    return read_probe(folder) if folder.exists() else None


ALL = slice(0, 8)
FIRST_RANK = slice(0, 3)


def assert_same_curves(one, other, updates=3):
    order = ["update", "norm"]
    one = one.sort_values(order, ignore_index=True)[CURVES]
    other = other.sort_values(order, ignore_index=True)[CURVES]
    assert len(one) == updates * 7
    pd.testing.assert_frame_equal(one, other, rtol=2e-3, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("norm", ["pn", "bn"])
def test_activation_checkpointing_gives_the_curves_of_the_plain_run(norm, tmp_path):
    plain = curves(tmp_path / "plain", [ALL], {"norm": norm})
    checkpointed = curves(
        tmp_path / "checkpointed", [ALL], {"norm": norm, "checkpoint_activations": True}
    )
    pd.testing.assert_frame_equal(plain, checkpointed, rtol=1e-5)


def test_accumulation_gives_the_curves_of_the_plain_run(tmp_path):
    plain = curves(tmp_path / "plain", [ALL], {"norm": "ln"})
    parts = [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    accumulated = curves(tmp_path / "accumulated", parts, {"norm": "ln"})
    found = list(accumulated[accumulated.norm == "encoder.layer_norm"].forward.fillna(-1))
    assert found == [0, 1, 2, 3, -1] * 3
    of_the_past = []
    for name in CURVES:
        if "distance" in name or name.startswith(("tid", "psi_batch")):
            of_the_past.append(name)
    first = plain[plain["update"] == 1][of_the_past]
    second = plain[plain["update"] == 2][of_the_past]
    assert first.isna().all(axis=None)
    assert not second.isna().any(axis=None)
    assert_same_curves(plain, accumulated[accumulated.forward.isna()])


@pytest.mark.parametrize("norm", ["pnv", "bn"])
def test_accumulation_of_equal_batches_gives_the_curves_of_the_plain_run(norm, tmp_path):
    """A norm with statistics of the batch normalizes each of four batches by its own, here the same
    four times.

    Its running statistics change four times in an update, so later updates differ; PN normalizes by
    its running statistics, and differs within the first update.
    """
    plain = curves(tmp_path / "plain", [[0, 1] * 4], {"norm": norm}, updates=1)
    accumulated = curves(tmp_path / "accumulated", [[0, 1]] * 4, {"norm": norm}, updates=1)
    assert_same_curves(plain, accumulated[accumulated.forward.isna()], updates=1)


@pytest.mark.parametrize("name", sorted(NORMS))
def test_losses_and_state_have_the_same_bits_with_a_probe(name, tmp_path):
    results = []
    for probed in (False, True):
        model = OneNorm(build_norm(name, 12))
        criterion = Criterion()
        probe = NormProbe(model.train(), str(tmp_path / "probe"), 1, "norm")
        parameters = list(model.parameters())
        losses = []
        gradients = []
        for completed in range(3):
            sample = sample_of(completed)
            if probed:
                probe.begin(completed, criterion, "")
            loss = criterion(model, sample)[0]
            loss.backward()
            if probed:
                probe.end(completed + 1)
            losses.append(loss.detach())
            gradients.append(sample["x"].grad)
            for parameter in parameters:
                parameter.data -= 0.1 * parameter.grad
        results.append([*losses, *gradients, *model.state_dict().values()])
    assert len(read_probe(tmp_path / "probe")["update"].unique()) == 3
    assert all(map(torch.equal, *results))


def of_a_rank(rank, world, folder, norms):
    part = [FIRST_RANK, slice(3, 8)][rank]
    for norm in norms:
        curves(folder / norm, [part], {"norm": norm})


def test_two_ranks_give_the_curves_of_the_plain_run(tmp_path):
    """PN has its own statistics on every rank: the statistics of rank 0 are recorded, as a plain
    run on its part.
    """
    norms = ("bn", "ln", "pn")
    run_ranks(of_a_rank, 2, tmp_path, norms)
    for norm in norms:
        part = FIRST_RANK if norm == "pn" else ALL
        plain = curves(tmp_path / f"plain {norm}", [part], {"norm": norm})
        assert_same_curves(plain, read_probe(tmp_path / norm))


# Under fairseq-train.


@pytest.fixture(scope="module")
def probed(data, tmp_path_factory):
    where = tmp_path_factory.mktemp("probed")
    train(data, where, "--norm-probe", "probe", "--norm-probe-interval", 2)
    return where


@pytest.mark.slow
def test_a_training_has_the_same_bits_with_a_probe(data, tmp_path, probed):
    train(data, tmp_path)
    plain = model_of(tmp_path)
    recorded = model_of(probed)
    assert plain.keys() == recorded.keys()
    for key, value in plain.items():
        assert torch.equal(recorded[key], value), key
    table = read_probe(probed / "probe")
    assert list(table["update"].unique()) == [2, 4, 6]
    assert len(table) == 3 * 7
    assert (table.kind == "power").all()
    assert (table.running == "psi2").all()
    assert (table.loss_scale == 1).all()


@pytest.mark.ci
def test_a_training_that_is_killed_and_resumed_has_every_update_once(data, tmp_path, probed):
    flags = ("--norm-probe", "probe", "--norm-probe-interval", 2)
    train(data, tmp_path, *flags, updates=3)
    folder = tmp_path / "probe"
    # after the last checkpoint
    shutil.copy(folder / "update-000000002.parquet", folder / "update-000000005.parquet")
    (folder / "update-000000006.parquet.partial").write_bytes(b"PAR1")
    train(data, tmp_path, *flags)
    resumed = read_probe(folder)
    straight = read_probe(probed / "probe")
    assert list(resumed["update"]) == list(straight["update"])
    for column in ("psi2_distance_l2", "g_psi2_l2", "nu_xhat_l2", "loss"):
        assert list(resumed[column]) == list(straight[column]), column


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--norm-probe", "x", "--norm-probe-layers", "encoder.lay"),
            "encoder.lay fits no norm; the model has e",
        ),
        (
            ("--norm-probe", "x", "--norm-probe-interval", "0"),
            "--norm-probe-interval 0 must be at least 1",
        ),
        (("--norm-probe", "occupied"), "occupied holds notes.txt"),
        (("--norm-probe", "occupied/notes.txt"), "notes.txt is not a folder"),
        (("--norm-probe", "occupied/notes.txt/probe"), "Not a directory"),
        (("--norm-probe-layers", "encoder.*"), "--norm-probe-layers needs --norm-probe FILE"),
    ],
)
def test_bad_input_is_one_line(flags, message, data, tmp_path, capsys):
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit) as end:
        train(data, tmp_path, *flags)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_does_not_replace_the_file_of_another(data, tmp_path, capsys):
    flags = ("--norm-probe", "../probe", "--norm-probe-interval", 1)
    train(data, tmp_path / "one", *flags, updates=2)
    with pytest.raises(SystemExit) as end:
        train(data, tmp_path / "two", *flags, updates=1)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert (
        f"probe holds 2 updates of the run in {tmp_path}/one/checkpoints: give a new folder" in line
    )
    shutil.rmtree(tmp_path / "one/checkpoints")  # killed before its first checkpoint
    train(data, tmp_path / "one", *flags, updates=1)
    assert list(read_probe(tmp_path / "probe")["update"].unique()) == [1]


def test_patches_that_are_turned_off_are_one_line(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pn_fairseq.models.norm_probe.patches_enabled", lambda: False)
    with pytest.raises(SystemExit) as end:
        train(data, tmp_path, "--norm-probe", "probe", updates=1)
    assert end.value.code == 2
    assert "--norm-probe needs the patches of fairseq" in capsys.readouterr().err
