import argparse
from argparse import Namespace
from unittest import mock

import pytest
from fairseq import options
from omegaconf import OmegaConf

from pn_fairseq.models.from_checkpoint import model_of, model_settings_of
from pn_fairseq.models.norm_options import NormOptions
from pn_fairseq.models.transformer_pn import TransformerPNModel
from pn_fairseq.norms import NORMS, register_norm, running_norms
from pn_fairseq.norms.core.base import ChannelNorm
from pn_fairseq.norms.options import parse_options, read_pairs
from pn_fairseq.norms.power import PowerNorm

from ..norms.oracle import FACTS
from .helpers import arch_args, build, make_task

MY_NORM = '''
from pn_fairseq.norms import ChannelNorm, register_norm

@register_norm("my-scaled", "mys", "a scaled identity, a test")
class Scaled(ChannelNorm):
    """y = beta h.

    Args:
        beta: a factor. It is not learned.
        label: a name.
    """
    learned = ()

    def __init__(self, num_features, beta=0.5, *, label: "str | None" = None, **common):
        super().__init__(num_features, **common)
        if beta <= 0:
            raise ValueError(f"beta={beta} must be greater than 0")
        self.beta, self.label = beta, label

    def normalize(self, h):
        return self.beta * h
'''


@pytest.fixture
def my_norm(tmp_path):
    path = tmp_path / "my.py"
    path.write_text(MY_NORM, "utf-8")
    with mock.patch.dict(NORMS):
        yield path


def parse(*flags):
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    NormOptions.add_args(parser)
    return parser.parse_args(flags)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--encoder-norm", "instance", [*NORMS]),
        ("--norm-module", "", ["norm module '' is not a file"]),
        ("--norm-variant", "released", ["paper", "release"]),
        ("--psi-warmup-updates", "2.5", ["'2.5'"]),
        ("--norm-eps", "small", ["'small'"]),
        ("--norm-options", "window", ["'window' is not KEY=VALUE"]),
        ("--norm-options", "window=", ["'window=' is not KEY=VALUE"]),
        ("--norm-options", ".window=3", ["'.window=3' is not KEY=VALUE"]),
        (
            "--norm-options",
            "detach=mean,detach.detach=std",
            ["'detach.detach=std' is not KEY=VALUE"],
        ),
    ],
)
def test_a_value_that_is_refused_by_the_parser(flag, value, words, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(f"{flag}={value}")
    assert stop.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert flag in last
    assert all(word in last for word in words)


def test_shared_flags_reach_the_norms():
    flags = (
        "--decoder-norm batch --norm-eps 1e-3 --norm-alpha-fwd 0.95 --norm-alpha-bwd 0.8 "
        "--layer-scale-groups 2"
    )
    settings = parse(*flags.split(), "--psi-warmup-updates", "11")
    model = build("transformer_pn_tiny", **vars(settings))
    norm = model.encoder.layers[1].final_layer_norm
    assert norm.eps == 1e-3
    assert norm.alpha_fwd == 0.95
    assert norm.alpha_bwd == 0.8
    assert norm.layer_scale.groups == 2
    assert norm.psi_warmup_updates == 11
    norm = model.decoder.layers[1].encoder_attn_layer_norm
    # BN has no layer-scale by default, so the flag does not change a BN decoder.
    assert type(norm) is NORMS["batch"].cls
    assert norm.eps == 1e-3
    assert norm.alpha_fwd == 0.95
    assert norm.layer_scale.groups == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("window=3", {"window": "3"}),
        ("detach=mean,std", {"detach": "mean,std"}),
        (
            "batch-reg.lambda_mean=1,batch-reg.lambda_var=2,ada_k=0.1,detach=mean,std",
            {
                "batch-reg": {"lambda_mean": "1", "lambda_var": "2"},
                "ada_k": "0.1",
                "detach": "mean,std",
            },
        ),
    ],
)
def test_options_as_text(text, expected):
    assert read_pairs(text) == expected


def test_every_own_option_is_tested():
    for name, entry in NORMS.items():
        tested = read_pairs(FACTS[name].options) if FACTS[name].options else {}
        assert entry.own_options.keys() == tested.keys(), name


@pytest.mark.parametrize("name", [name for name in NORMS if FACTS[name].options])
def test_options_of_one_norm_reach_it(name):
    text, attributes = FACTS[name].options, FACTS[name].attributes
    norms = {"encoder_norm": name, "decoder_norm": name}
    parsed = parse_options(text, {name: NORMS[name]})
    in_hydra = OmegaConf.create({"options": parsed}).options
    for given in (parse("--norm-options", text).norm_options, in_hydra, {name: read_pairs(text)}):
        model = build("transformer_pn_tiny", **norms, norm_options=given)
        for norm in (model.encoder.layer_norm, model.decoder.layers[0].encoder_attn_layer_norm):
            assert {key: getattr(norm, key) for key in attributes} == attributes
    plain = build("transformer_pn_tiny", encoder_norm=name).encoder.layer_norm
    assert all(getattr(plain, key) != value for key, value in attributes.items())
    if name == "group":
        assert plain.groups == 4  # attention heads


def test_an_option_is_for_every_norm_that_has_it_or_for_the_named_one():
    norms = {"encoder_norm": "mabn", "decoder_norm": "unified", "encoder_norm_last": "layer"}
    model = build(
        "transformer_pn_tiny", **norms, norm_options="window=3,unified.window=5,ada.ada_k=1"
    )
    windows = model.encoder.layers[0].final_layer_norm.window, model.decoder.layer_norm.window
    assert windows == (3, 5)


@pytest.mark.parametrize(
    "arch", ["transformer_pn_tiny", "transformer_lm_pn_tiny", "tensorized_lm_pn_tiny"]
)
def test_a_norm_of_its_own_after_the_last_layer(arch):
    norms = {"decoder_norm": "batch", "decoder_norm_last": "power"}
    model = build(
        arch, **norms, encoder_norm="rms", encoder_norm_last="mabn", norm_options="mabn.window=3"
    )
    kinds = {}
    for name, module in model.named_modules():
        if isinstance(module, ChannelNorm):
            kinds[name] = type(module)
    assert kinds.pop("decoder.layer_norm") is NORMS["power"].cls
    expected = None if "lm" in arch else NORMS["mabn"].cls
    assert kinds.pop("encoder.layer_norm", None) is expected
    found = {kind for name, kind in kinds.items() if name.startswith("decoder")}
    assert found == {NORMS["batch"].cls}
    found = {kind for name, kind in kinds.items() if name.startswith("encoder")}
    assert found <= {NORMS["rms"].cls}
    expected = 1 if arch.startswith("tensorized") else 4
    assert model.decoder.layer_norm.layer_scale.groups == expected


def test_a_norm_in_a_file_has_options_of_its_own_and_a_checkpoint_rebuilds_it(my_norm, tmp_path):
    args = arch_args("transformer_pn_tiny", norm_module=str(my_norm), encoder_norm="my-scaled")
    args.norm_options = read_pairs("beta=0.3,label=7")
    model = TransformerPNModel.build_model(args, make_task())
    assert model.encoder.layer_norm.beta == 0.3
    assert model.encoder.layer_norm.label == "7"
    state = {"args": args, "model": model.state_dict()}
    assert args.norm_options == {"beta": 0.3, "label": "7"}
    del NORMS["my-scaled"]
    moved = my_norm.rename(tmp_path / "moved.py")
    settings = model_settings_of(state, "x.pt")
    settings.norm_module = str(moved)
    found = model_of(settings, state["model"], "x.pt").encoder.layer_norm.beta
    assert found == 0.3
    with pytest.raises(ValueError, match="unknown norm option 'betta', did you mean 'beta'"):
        build("transformer_pn_tiny", encoder_norm="my-scaled", norm_options={"betta": 1})
    with pytest.raises(ValueError, match="beta=-1"):
        build("transformer_pn_tiny", encoder_norm="my-scaled", norm_options={"beta": -1})


def test_a_list_of_files_may_end_with_a_comma(my_norm):
    args = parse("--norm-module", f"{my_norm},", "--encoder-norm", "my-scaled")
    assert args.encoder_norm == "my-scaled"


def test_layer_scale_can_be_turned_off_and_on():
    assert (
        build("transformer_pn_tiny", layer_scale_groups=0).encoder.layer_norm.layer_scale.groups
        == 0
    )
    assert (
        build("transformer_bn_tiny", layer_scale_groups=8).encoder.layer_norm.layer_scale.groups
        == 8
    )
    model = build("transformer_ln_tiny", decoder_norm="power", decoder_attention_heads=8)
    assert model.encoder.layer_norm.layer_scale.groups == 0
    assert model.decoder.layer_norm.layer_scale.groups == 8


@pytest.mark.parametrize("key", ["warmup_updates", "warmup_steps"])
def test_psi_warmup_is_the_learning_rates_unless_it_is_given(key):
    args = Namespace(**{key: 400})
    assert NormOptions.from_args(args).psi_warmup_updates == 400
    assert args.psi_warmup_updates == 400, "the checkpoint has to contain what was used"
    found = NormOptions.from_args(Namespace(**{key: 400}, psi_warmup_updates=7)).psi_warmup_updates
    assert found == 7
    found = NormOptions.from_args(Namespace(**{key: 400}, psi_warmup_updates=0)).psi_warmup_updates
    assert found == 0
    assert NormOptions.from_args(Namespace()).psi_warmup_updates == 0


def test_psi_warmup_is_found_next_to_the_model_node_of_hydra():
    cfg = OmegaConf.create(
        {"model": {"encoder_norm": "power"}, "lr_scheduler": {"warmup_updates": 300}}
    )
    OmegaConf.set_struct(cfg, True)
    assert NormOptions.from_args(cfg.model).psi_warmup_updates == 300
    assert cfg.model.psi_warmup_updates == 300


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"wandb_project": "x"}, 50),
        ({"tensorboard_logdir": "x", "norm_stats_interval": 7}, 7),
        ({"tensorboard_logdir": "x", "norm_stats_interval": 0}, 0),
        ({"tensorboard_logdir": "", "wandb_project": None}, None),
    ],
)
def test_statistics_are_logged_where_a_run_has_a_dashboard_unless_an_interval_is_given(
    settings, expected
):
    args = Namespace(log_interval=50, **settings)
    assert NormOptions.from_args(args).norm_stats_interval == expected
    assert getattr(args, "norm_stats_interval", None) == settings.get("norm_stats_interval")


def test_schedules_are_a_part_of_the_run_unless_they_are_given():
    args = Namespace(encoder_norm="batch-renorm", decoder_norm="prep-batch", max_update=1000)
    assert (
        NormOptions.from_args(args).norm_options
        == args.norm_options
        == {"renorm_updates": 300, "fade_updates": 800}
    )
    args = Namespace(
        encoder_norm="batch-renorm",
        max_update=1000,
        norm_options={"batch-renorm": {"renorm_updates": 7}},
    )
    assert NormOptions.from_args(args).norm_options == {"batch-renorm": {"renorm_updates": 7}}
    assert (
        NormOptions.from_args(Namespace(encoder_norm="batch-renorm", max_update=0)).norm_options
        == {}
    )
    cfg = OmegaConf.create(
        {"model": {"encoder_norm": "prep-batch"}, "optimization": {"max_update": 500}}
    )
    OmegaConf.set_struct(cfg, True)
    assert (
        NormOptions.from_args(cfg.model).norm_options
        == cfg.model.norm_options
        == {"fade_updates": 400}
    )


def test_variant_is_passed_to_the_norms_that_have_it():
    flags = vars(
        parse("--decoder-norm", "power", "--norm-variant", "release", "--psi-warmup-updates", "11")
    )
    model = build("transformer_pn_tiny", **flags)
    norms = [module for module in model.modules() if isinstance(module, ChannelNorm)]
    found = {type(norm) for norm in norms}
    assert found == {NORMS["power"].variants["release"]}
    # The release's norm after the last encoder layer has a warm-up of its own, independent of the
    # flag.
    found = {norm.psi_warmup_updates for norm in norms if norm is not model.encoder.layer_norm}
    assert found == {11}
    assert model.encoder.layer_norm.psi_warmup_updates == 1000
    assert {norm.layer_scale.groups for norm in norms} == {4}
    paper = build("transformer_pn_tiny", psi_warmup_updates=11)
    assert type(paper.encoder.layer_norm) is NORMS["power"].cls
    assert paper.encoder.layer_norm.psi_warmup_updates == 11


def test_released_batch_norm_has_the_settings_of_its_published_score_unless_others_are_given():
    flags = {"norm_variant": "release", "decoder_norm": "batch"}
    for norm in running_norms(build("transformer_bn_tiny", **flags)):
        assert type(norm) is NORMS["batch"].variants["release"]
        assert norm.layer_scale.groups == 1
        assert norm.alpha_fwd == 0.95
        assert norm.sync is False
    flags |= {"norm_alpha_fwd": 0.8, "norm_sync": "on", "layer_scale_groups": 4}
    norm = build("transformer_bn_tiny", **flags).encoder.layer_norm
    assert norm.layer_scale.groups == 4
    assert norm.alpha_fwd == 0.8
    assert norm.sync is True


@pytest.mark.parametrize("help_flag", ["-h", "--help"])
def test_help_lists_every_norm_and_with_an_architecture_its_flags(help_flag, capsys):
    parser = options.get_training_parser()
    with pytest.raises(SystemExit) as stop:
        options.parse_args_and_arch(parser, ["data", help_flag, "--arch", "transformer_pn_iwslt"])
    text = "".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for name, entry in NORMS.items():
        assert f"transformer_{entry.short}_*({name})" in text, name
    own = argparse.ArgumentParser(add_help=False)
    NormOptions.add_args(own)
    flags = [action.option_strings[0] for action in own._actions]
    assert all(text.count(flag) for flag in flags)
    assert len(flags) > 15
    parser = options.get_training_parser()
    with pytest.raises(SystemExit):
        options.parse_args_and_arch(parser, ["data", help_flag])
    assert "--encoder-norm" not in capsys.readouterr().out


def test_a_null_in_hydra_leaves_the_norm_to_the_architecture():
    assert arch_args("transformer_ln_tiny", encoder_norm=None).encoder_norm == "layer"
    assert arch_args("transformer_ln_tiny", encoder_norm="batch").encoder_norm == "batch"


@pytest.mark.parametrize(
    ("flags", "own", "of_pn"),
    [
        ({"encoder_norm": "own"}, 7, None),
        ({"encoder_norm": "own", "decoder_norm": "power"}, 7, 400),
        ({"encoder_norm": "own", "decoder_norm": "power", "psi_warmup_updates": 9}, 9, 9),
    ],
)
def test_a_default_that_a_norm_declares_holds_beside_that_of_others(flags, own, of_pn):
    register_norm("own", "own", "own", defaults={"psi_warmup_updates": 7})(PowerNorm)
    model = build("transformer_pn_tiny", warmup_updates=400, **flags)
    assert model.encoder.layer_norm.psi_warmup_updates == own
    if of_pn is not None:
        assert model.decoder.layer_norm.psi_warmup_updates == of_pn
