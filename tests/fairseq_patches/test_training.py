"""fairseq-train itself, with flags that work because of the patches.

In this process, for two updates.
"""

import shutil

import pytest
import torch

from ..tables import rows

PN = ("transformer_pn_tiny", "--share-all-embeddings")


def test_store_ema(train):
    state = train(*PN, "--store-ema", "--ema-decay", "0.5")
    average = state["extra_state"]["ema"]
    weights = state["model"]
    assert average.keys() == weights.keys()
    for state in (average, weights):
        assert state["encoder.layer_norm.num_batches_tracked"] == 2
    name = "encoder.layer_norm.running_psi2"
    assert not torch.equal(average[name], weights[name])
    assert average[name].isfinite().all()


@pytest.mark.ci
@pytest.mark.parametrize("flags", ["--memory-efficient-fp16", "--fp16 --fp16-no-flatten-grads"])
def test_loss_scale(train, flags, tmp_path):
    """It is not in nu."""
    expected = train(*PN, *flags.split(), "--fp16-init-scale", "1")["model"]
    shutil.rmtree(tmp_path / "run")
    state = train(*PN, *flags.split(), "--fp16-init-scale", "1024", "--no-save-optimizer-state")
    nu = {key: value for key, value in expected.items() if key.endswith(".nu")}
    assert nu
    for key, value in nu.items():
        atol = 0.02 * float(value.abs().max())
        torch.testing.assert_close(state["model"][key], value, rtol=0.02, atol=atol)


def test_bf16(train):
    state = train(*PN, "--bf16")
    assert state["cfg"]["common"]["bf16"]
    assert not state["cfg"]["common"]["tpu"]
    assert state["model"]["encoder.layer_norm.num_batches_tracked"] == 2


@pytest.mark.parametrize("flags", ["--num-batch-buckets=3", "--encoder-layers-to-keep=0"])
def test_flags_that_fail_in_fairseq_itself(train, flags):
    weights = train(*PN, flags)["model"]
    assert weights["encoder.layer_norm.num_batches_tracked"] == 2
    assert ("encoder.layers.1.fc1.weight" in weights) is ("keep" not in flags)


REFUSED = """
--layer-scale-groups=3 | num_features=16 is not divisible by groups=3
--best-checkpoint-metric=bleu | --best-checkpoint-metric bleu needs --eval-bleu
--stop-min-lr=0.1 | the learning rate begins at 0.01, where --stop-min-lr 0.1 ends the training
--lr-scheduler=cosine --warmup-updates=2 | --max-update leaves no update after --warmup-updates
--skip-remainder-batch --update-freq=50 | --skip-remainder-batch leaves nothing to train
--write-checkpoints-asynchronously | needs the package iopath
--encoder-attention-heads=5 | embed_dim must be divisible by num_heads
--base-layers=1 | --base-layers needs several ranks
--adaptive-softmax-cutoff=5,9 | adaptive_softmax_cutoff of the model needs criterion adaptive_loss
"""


@pytest.mark.parametrize(("flags", "message"), rows(REFUSED))
def test_a_training_that_is_refused_before_it_begins(train, flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        train(*PN, *flags.split())
    assert stop.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("fairseq-train: error: ")
    assert message in line


def test_a_checkpoint_after_the_last_epoch_is_refused(train, tmp_path, capsys):
    train(*PN)
    (tmp_path / "run").rename(tmp_path / "earlier")
    checkpoint = tmp_path / "earlier/checkpoint_last.pt"
    with pytest.raises(SystemExit):
        train(*PN, f"--restore-file={checkpoint}", "--max-epoch=1", "--max-update=0")
    advice = "continues in epoch 2, after --max-epoch 1: give --reset-dataloader"
    assert advice in capsys.readouterr().err
