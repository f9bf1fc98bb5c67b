"""fairseq-train itself, with flags that work because of the patches. In this process, for two updates."""

import sys

import fairseq_cli.train
import pytest
import torch

from pn_fairseq.common.checkpoints import load_checkpoint

from ..models.helpers import write_data
from ..scripts_helpers import ROOT

SIZES = [
    f"--{side}-{name}={value}"
    for side in ("encoder", "decoder")
    for name, value in (("embed-dim", 16), ("ffn-embed-dim", 16), ("layers", 2), ("attention-heads", 2))
]


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Run fairseq-train with the given flags; returns the checkpoint that it leaves."""

    def run(*flags: str) -> dict:
        data = write_data(tmp_path / "data")
        given = f"{data} --user-dir {ROOT / 'pn_fairseq'} --save-dir {tmp_path / 'run'} --cpu --share-all-embeddings"
        given += " --optimizer adam --lr 0.01 --max-update 2 --max-tokens 30 --no-epoch-checkpoints --arch"
        monkeypatch.setattr(sys, "argv", ["fairseq-train", *given.split(), "transformer_pn_tiny", *SIZES, *flags])
        fairseq_cli.train.cli_main()
        return load_checkpoint(tmp_path / "run/checkpoint_last.pt")

    return run


def test_store_ema(train):
    state = train("--store-ema", "--ema-decay", "0.5")
    average, weights = state["extra_state"]["ema"], state["model"]
    assert average.keys() == weights.keys()
    assert average["encoder.layer_norm.num_batches_tracked"] == weights["encoder.layer_norm.num_batches_tracked"] == 2
    name = "encoder.layer_norm.running_psi2"
    assert not torch.equal(average[name], weights[name]) and average[name].isfinite().all()


def test_bf16(train):
    state = train("--bf16")
    assert state["cfg"]["common"]["bf16"] and not state["cfg"]["common"]["tpu"]
    assert state["model"]["encoder.layer_norm.num_batches_tracked"] == 2


def test_layer_scale_groups_that_do_not_fit(train, capsys):
    with pytest.raises(SystemExit) as stop:
        train("--layer-scale-groups", "3")
    assert stop.value.code == 2
    assert (
        capsys.readouterr().err.splitlines()[-1] == "fairseq-train: error: num_features=16 is not divisible by groups=3"
    )
