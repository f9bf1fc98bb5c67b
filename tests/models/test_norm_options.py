import argparse
from argparse import Namespace

import pytest
from fairseq import options
from omegaconf import OmegaConf

from pn_fairseq.models.norm_options import NormOptions
from pn_fairseq.norms import NORMS, running_norms
from pn_fairseq.norms.base import ChannelNorm
from pn_fairseq.norms.registry import default_of

from .helpers import arch_args, build


def parse(*flags):
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    NormOptions.add_args(parser)
    return parser.parse_args(flags)


def test_choices_are_the_registry(capsys):
    for name in NORMS:
        assert parse("--encoder-norm", name).encoder_norm == name
    with pytest.raises(SystemExit) as stop:
        parse("--encoder-norm", "instance")
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert all(name in message for name in NORMS)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--norm-alpha-fwd", "1"),
        ("--norm-alpha-fwd", "0"),
        ("--norm-alpha-bwd", "nan"),
        ("--norm-eps", "0"),
        ("--norm-eps", "small"),
        ("--layer-scale-groups", "-1"),
        ("--psi-warmup-updates", "2.5"),
        ("--norm-window", "0"),
        ("--renorm-r-max", "0.5"),
        ("--reg-lambda-mean", "-1"),
        ("--norm-groups", "0"),
        ("--norm-detach", "men"),
        ("--norm-detach", "mean,"),
        ("--ada-k", "-1"),
        ("--ada-scale", "0"),
        ("--alpha-init", "inf"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_in_one_line(flag, value, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(f"{flag}={value}")
    assert stop.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert flag in last and repr(value) in last


def test_flags_reach_the_norms():
    flags = vars(
        parse(
            *("--decoder-norm", "batch", "--norm-eps", "1e-3", "--norm-alpha-fwd", "0.95"),
            *("--norm-alpha-bwd", "0.8", "--layer-scale-groups", "2", "--psi-warmup-updates", "11"),
        )
    )
    model = build("transformer_pn_tiny", **flags)
    norm = model.encoder.layers[1].final_layer_norm
    assert (norm.eps, norm.alpha_fwd, norm.alpha_bwd) == (1e-3, 0.95, 0.8)
    assert (norm.layer_scale.groups, norm.psi_warmup_updates) == (2, 11)
    norm = model.decoder.layers[1].encoder_attn_layer_norm
    # BN has no layer-scale by default, so the flag leaves a BN decoder alone.
    assert (type(norm), norm.eps, norm.alpha_fwd, norm.layer_scale.groups) == (NORMS["batch"].cls, 1e-3, 0.95, 0)


def test_flags_of_the_norms_without_state():
    flags = parse(*("--norm-detach", "std", "--ada-k", "0.2", "--ada-scale", "2", "--alpha-init", "0.8"))
    for name, expected in (
        ("detach", {"detach": ("std",)}),
        ("ada", {"ada_k": 0.2, "ada_scale": 2.0}),
        ("group", {"groups": 4}),  # attention heads
        ("dyt", {"alpha_init": 0.8}),
        ("derf", {"alpha_init": 0.8}),
    ):
        model = build("transformer_pn_tiny", encoder_norm=name, decoder_norm=name, **vars(flags))
        for norm in (model.encoder.layer_norm, model.decoder.layers[0].encoder_attn_layer_norm):
            assert {key: getattr(norm, key) for key in expected} == expected
    assert build("transformer_gn_tiny", norm_groups=16).encoder.layer_norm.groups == 16
    with pytest.raises(ValueError, match="num_features=128 is not divisible by groups=3"):
        build("transformer_gn_tiny", norm_groups=3)
    with pytest.raises(ValueError, match="detach='men'"):  # hydra asks no parser
        build("transformer_dn_tiny", norm_detach="men")


def test_layer_scale_can_be_turned_off_and_on():
    assert build("transformer_pn_tiny", layer_scale_groups=0).encoder.layer_norm.layer_scale.groups == 0
    assert build("transformer_bn_tiny", layer_scale_groups=8).encoder.layer_norm.layer_scale.groups == 8
    model = build("transformer_ln_tiny", decoder_norm="power", decoder_attention_heads=8)
    assert model.encoder.layer_norm.layer_scale.groups == 0
    assert model.decoder.layer_norm.layer_scale.groups == 8


def test_groups_that_do_not_divide_the_channels_are_refused():
    with pytest.raises(ValueError, match="num_features=128.*groups=3"):
        build("transformer_pn_tiny", layer_scale_groups=3)


@pytest.mark.parametrize("key", ["warmup_updates", "warmup_steps"])
def test_psi_warmup_is_the_learning_rates_unless_it_is_given(key):
    args = Namespace(**{key: 400})
    assert NormOptions.from_args(args).psi_warmup_updates == 400
    assert args.psi_warmup_updates == 400, "the checkpoint has to say what was used"
    assert NormOptions.from_args(Namespace(**{key: 400}, psi_warmup_updates=7)).psi_warmup_updates == 7
    assert NormOptions.from_args(Namespace(**{key: 400}, psi_warmup_updates=0)).psi_warmup_updates == 0
    assert NormOptions.from_args(Namespace()).psi_warmup_updates == 0


def test_psi_warmup_is_found_beside_the_model_node_of_hydra():
    cfg = OmegaConf.create({"model": {"encoder_norm": "power"}, "lr_scheduler": {"warmup_updates": 300}})
    OmegaConf.set_struct(cfg, True)
    assert NormOptions.from_args(cfg.model).psi_warmup_updates == 300
    assert cfg.model.psi_warmup_updates == 300


def test_variant_is_passed_to_the_norms_that_have_it():
    flags = vars(parse("--decoder-norm", "power", "--norm-variant", "release", "--psi-warmup-updates", "11"))
    model = build("transformer_pn_tiny", **flags)
    norms = [module for module in model.modules() if isinstance(module, ChannelNorm)]
    assert {type(norm) for norm in norms} == {NORMS["power"].variants["release"]}
    # The release's norm after the last encoder layer has a warm-up of its own, independent of the flag.
    assert [norm.psi_warmup_updates for norm in norms if norm is not model.encoder.layer_norm] == [11] * (
        len(norms) - 1
    )
    assert model.encoder.layer_norm.psi_warmup_updates == 1000
    assert {norm.layer_scale.groups for norm in norms} == {4}
    paper = build("transformer_pn_tiny", psi_warmup_updates=11)
    assert type(paper.encoder.layer_norm) is NORMS["power"].cls
    assert paper.encoder.layer_norm.psi_warmup_updates == 11


def test_released_batch_norm_has_the_settings_of_its_published_score_unless_others_are_given():
    flags = {"norm_variant": "release", "decoder_norm": "batch"}
    for norm in running_norms(build("transformer_bn_tiny", **flags)):
        assert type(norm) is NORMS["batch"].variants["release"]
        assert (norm.layer_scale.groups, norm.alpha_fwd, norm.sync) == (1, 0.95, False)
    flags |= {"norm_alpha_fwd": 0.8, "norm_sync": "on", "layer_scale_groups": 4}
    norm = build("transformer_bn_tiny", **flags).encoder.layer_norm
    assert (norm.layer_scale.groups, norm.alpha_fwd, norm.sync) == (4, 0.8, True)


OWN_OPTIONS = {
    "mabn": ({"norm_window": 3}, {"window": 3}),
    "unified": (
        {"norm_window": 3, "outlier_filtration": True, "norm_alpha_bwd": 0.5},
        {"window": 3, "outlier_filtration": True, "alpha_bwd": 0.5},
    ),
    "batch-renorm": (
        {"renorm_updates": 8, "renorm_r_max": 2.0, "renorm_d_max": 0.0},
        {"renorm_updates": 8, "renorm_r_max": 2.0, "renorm_d_max": 0.0},
    ),
    "batch-reg": ({"reg_lambda_mean": 60.0, "reg_lambda_var": 0.0}, {"lambda_mean": 60.0, "lambda_var": 0.0}),
    "prep-batch": ({"fade_updates": 7}, {"fade_updates": 7}),
}


@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_options_of_one_norm_reach_it_and_have_its_defaults(name):
    flags, arguments = OWN_OPTIONS[name]
    given = [
        f"--{key.replace('_', '-')}" if value is True else f"--{key.replace('_', '-')}={value}"
        for key, value in flags.items()
    ]
    norm = build("transformer_pn_tiny", encoder_norm=name, **vars(parse(*given))).encoder.layer_norm
    assert {key: getattr(norm, key) for key in arguments} == arguments
    plain = build("transformer_pn_tiny", encoder_norm=name).encoder.layer_norm
    assert {key: getattr(plain, key) for key in arguments} == {
        key: default_of(NORMS[name].cls, key) for key in arguments
    }


def test_schedules_are_a_part_of_the_run_unless_they_are_given():
    args = Namespace(encoder_norm="batch-renorm", decoder_norm="prep-batch", max_update=1000)
    options = NormOptions.from_args(args)
    assert (options.renorm_updates, options.fade_updates) == (args.renorm_updates, args.fade_updates) == (300, 800)
    args = Namespace(encoder_norm="batch-renorm", decoder_norm="layer", max_update=1000, renorm_updates=7)
    options = NormOptions.from_args(args)
    assert (options.renorm_updates, options.fade_updates) == (7, None) and not hasattr(args, "fade_updates")
    assert NormOptions.from_args(Namespace(encoder_norm="batch-renorm", max_update=0)).renorm_updates is None
    cfg = OmegaConf.create({"model": {"encoder_norm": "prep-batch"}, "optimization": {"max_update": 500}})
    OmegaConf.set_struct(cfg, True)
    assert NormOptions.from_args(cfg.model).fade_updates == cfg.model.fade_updates == 400


def test_unknown_variant_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse("--norm-variant", "released")
    assert "paper" in capsys.readouterr().err
    with pytest.raises(ValueError, match="released.*paper, release"):
        build("transformer_pn_tiny", norm_variant="released")


def test_help_has_the_variants_own_warmup(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    assert "the norm after the last encoder layer always has 1000" in " ".join(capsys.readouterr().out.split())


def test_help_lists_every_norm():
    """That of fairseq-train has the architectures: fairseq adds a model's flags once it knows the architecture."""
    text = "".join(options.get_training_parser().format_help().split())
    parser = argparse.ArgumentParser()
    NormOptions.add_args(parser)
    flags = " ".join(parser.format_help().split())
    for name, entry in NORMS.items():
        assert f"transformer_{entry.short}_*({name})" in text, name
        assert f"{name}: {entry.title}" in flags, name


def test_a_null_in_hydra_leaves_the_norm_to_the_architecture():
    assert arch_args("transformer_ln_tiny", encoder_norm=None).encoder_norm == "layer"
    assert arch_args("transformer_ln_tiny", encoder_norm="batch").encoder_norm == "batch"
