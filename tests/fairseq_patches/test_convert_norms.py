"""--convert-norms and --norm-ignore-mask, with architectures of fairseq.

In this process, for two updates.
"""

import sys

import fairseq_cli.generate
import pytest
import torch
from fairseq import checkpoint_utils

from pn_fairseq.fairseq_patches.convert_norms import parse
from pn_fairseq.norms import norm_report, running_norms

from ..scripts_helpers import ROOT

ARCHITECTURES = {
    "transformer_iwslt_de_en": "",  # post-norm
    "lightconv_iwslt_de_en": ("--encoder-kernel-size-list=[3,3] --decoder-kernel-size-list=[3,3]"),
    "bart_base": "--max-source-positions=64 --max-target-positions=64",
    "nonautoregressive_transformer": (
        "--task=translation_lev --criterion=nat_loss --noise=full_mask --pred-length-offset "
        "--length-loss-factor=0.1 --apply-bert-init"
    ),
    "multilingual_transformer_iwslt_de_en": (
        "--task=multilingual_translation --lang-pairs=de-en --share-encoders"
    ),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_translation(train, tmp_path, arch, recwarn):
    state = train(arch, *ARCHITECTURES[arch].split(), "--convert-norms=*=batch,alpha_fwd=0.5")
    counts = []
    for name, value in state["model"].items():
        if name.endswith("num_batches_tracked"):
            counts.append(value)
    assert len(counts) >= 8
    assert all(count == 2 for count in counts)
    assert not [each for each in recwarn if "padding mask" in str(each.message)]
    leaks = [each for each in recwarn if "are in a decoder and, in training" in str(each.message)]
    assert len(leaks) == (arch != "nonautoregressive_transformer")
    path = str(tmp_path / "run/checkpoint_last.pt")
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([path])
    assert all(norm.alpha_fwd == 0.5 for norm in running_norms(model))
    assert len(running_norms(model)) == len(norm_report(model))
    assert all(each.masks for each in norm_report(model))


def test_schedules_have_the_length_of_the_run(train, tmp_path):
    train("transformer_iwslt_de_en", "--convert-norms=encoder.*=prep-batch")
    path = str(tmp_path / "run/checkpoint_last.pt")
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path])
    assert {norm.fade_updates for norm in running_norms(model)} == {2}  # 0.8 of 2


@pytest.mark.parametrize("norm", ["batch", "power,psi_warmup_updates=1"])
def test_activation_checkpointing_computes_the_same(train, norm):
    """The gradients, which SGD with a rate of 1 adds to the weights, and the state; with dropout,
    also after a warm-up.

    The encoder's gradients are sums over the decoder's layers, which recomputation takes in another
    order: 30 roundings of 2**-24 of a gradient of about 1, five times.
    """
    flags = f"--convert-norms=*={norm} --optimizer=sgd --lr=1 --restore-file=none".split()
    plain = train("transformer_iwslt_de_en", *flags)["model"]
    recomputed = train("transformer_iwslt_de_en", *flags, "--checkpoint-activations")["model"]
    assert plain.keys() == recomputed.keys()
    for name, tensor in plain.items():
        if name.endswith("num_batches_tracked"):
            assert tensor == recomputed[name] == 2
        found = recomputed[name]
        torch.testing.assert_close(found, tensor, rtol=1e-5, atol=1e-5, msg=f"{name}: {{}}".format)


def test_diagnostics_are_logged_and_generation_rebuilds_the_norms(
    train, tmp_path, monkeypatch, capsys, caplog
):
    caplog.set_level("INFO")  # fairseq sets no level where pytest imports it while collecting
    logged = ("--log-interval=1", f"--tensorboard-logdir={tmp_path}")
    train(
        "transformer_iwslt_de_en", "--convert-norms=encoder.*=power,psi_warmup_updates=3", *logged
    )
    assert all(
        f"norm_{name}=" in caplog.text for name in ("psi_distance", "gamma_max", "nonfinite_steps")
    )
    given = (
        f"{tmp_path / 'data'} --user-dir {ROOT / 'pn_fairseq'} --path "
        f"{tmp_path / 'run/checkpoint_last.pt'} --cpu"
    )
    monkeypatch.setattr(
        sys,
        "argv",
        ["fairseq-generate", *given.split(), "--beam=2", "--max-tokens=100", "--num-workers=0"],
    )
    fairseq_cli.generate.cli_main()
    assert "Generate test with beam=2" in capsys.readouterr().out


@pytest.mark.parametrize("arch", ["transformer_pn_tiny", "transformer_iwslt_de_en"])
def test_ignoring_the_mask(train, arch):
    flags = (
        ["--convert-norms=encoder.*=batch"]
        if arch != "transformer_pn_tiny"
        else ["--encoder-norm=batch"]
    )
    masked = train(arch, *flags)["model"]
    name = next(name for name in masked if name.endswith("running_var"))
    state = train(arch, *flags, "--norm-ignore-mask", "--restore-file=none")
    assert not torch.equal(state["model"][name], masked[name])
    assert vars(state["cfg"]["model"])["norm_ignore_mask"]


@pytest.mark.parametrize(
    "given, message",
    [
        ("encoder.*", "'encoder.*' is not 'PATTERN=NORM[,key=value...]'"),
        ("*=bach", "unknown norm 'bach', did you mean 'batch'?"),
        ("*=batch,eps", "'*=batch,eps': 'eps' is not KEY=VALUE"),
        (
            "encode.*=batch",
            "--convert-norms 'encode.*=batch': the pattern 'encode.*' matches no norm",
        ),
        (
            "*=batch,alpha=1",
            "'*=batch,alpha=1': unknown norm option 'alpha', did you mean 'alpha_fwd'?",
        ),
        ("*=batch,sync=maybe", "norm option sync='maybe' is not true or false"),
        ("*=mabn,mabn.window=3", "unknown norm option 'mabn'"),
    ],
)
def test_wrong_specifications(train, capsys, given, message):
    with pytest.raises(SystemExit) as stop:
        train("transformer_iwslt_de_en", f"--convert-norms={given}")
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_values_of_options():
    options = {"eps": 1e-3, "sync": False, "layout": "TBC"}
    assert parse("a.*=batch,eps=1e-3,sync=false,layout=TBC") == ("a.*", "batch", options)
