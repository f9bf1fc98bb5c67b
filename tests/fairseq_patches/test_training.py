"""fairseq-train itself, with flags that work because of the patches. In this process, for two updates."""

import pytest
import torch

PN = ("transformer_pn_tiny", "--share-all-embeddings")


def test_store_ema(train):
    state = train(*PN, "--store-ema", "--ema-decay", "0.5")
    average, weights = state["extra_state"]["ema"], state["model"]
    assert average.keys() == weights.keys()
    assert average["encoder.layer_norm.num_batches_tracked"] == weights["encoder.layer_norm.num_batches_tracked"] == 2
    name = "encoder.layer_norm.running_psi2"
    assert not torch.equal(average[name], weights[name]) and average[name].isfinite().all()


def test_bf16(train):
    state = train(*PN, "--bf16")
    assert state["cfg"]["common"]["bf16"] and not state["cfg"]["common"]["tpu"]
    assert state["model"]["encoder.layer_norm.num_batches_tracked"] == 2


def test_num_batch_buckets(train):
    assert train(*PN, "--num-batch-buckets", "3")["model"]["encoder.layer_norm.num_batches_tracked"] == 2


def test_layer_scale_groups_that_do_not_fit(train, capsys):
    with pytest.raises(SystemExit) as stop:
        train(*PN, "--layer-scale-groups", "3")
    assert stop.value.code == 2
    assert (
        capsys.readouterr().err.splitlines()[-1] == "fairseq-train: error: num_features=16 is not divisible by groups=3"
    )
