"""configs/*.yaml: hyperparameters stand there once, and the plain fairseq-train line of the README means the same."""

import re
import shlex
from contextlib import nullcontext
from dataclasses import fields

import pytest
from fairseq import options
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_CONFIG_REGISTRY
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

import pn_fairseq.models  # noqa: F401 (registers the architectures)
from pn_fairseq.models.transformer_pn import TransformerPNConfig

from .scripts_helpers import ROOT

CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
#: What --data, --run and the place of the checkout decide, and what hydra and argparse each add of their own.
PLACES = {"data", "user_dir", "save_dir", "log_file", "tensorboard_logdir", "no_seed_provided", "_name", "arch"}


def composed(name: str, *overrides: str):
    """The configuration as fairseq-hydra-train composes it."""
    hydra_init(name)
    with initialize_config_dir(config_dir=str(ROOT / "configs"), version_base="1.1"):
        cfg = compose(config_name=name, overrides=["task.data=/data", *overrides])
    add_defaults(cfg)
    return cfg


def command_line(line: str):
    """The configuration that fairseq-train makes of a command line of the README."""
    line = line.replace("path/to/pn_fairseq", str(ROOT / "pn_fairseq"))
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, input_args=shlex.split(line)[1:])
    return convert_namespace_to_omegaconf(args)


def readme_lines(name: str) -> list[str]:
    """The fairseq-train commands of the README."""
    text = (ROOT / "README.md").read_text("utf-8").replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip().startswith("fairseq-train ") and name in line]


def settings(section, ignored=PLACES) -> dict:
    values = OmegaConf.to_container(section, resolve=True, enum_to_str=True)
    return {key: value for key, value in values.items() if key not in ignored}


def model_of(args) -> TransformerPNConfig:
    """What the model is built from, once the architecture has filled in its defaults."""
    with open_dict(args) if OmegaConf.is_config(args) else nullcontext():
        ARCH_CONFIG_REGISTRY[getattr(args, "_name", None) or args.arch](args)
    return TransformerPNConfig.from_args(args)


def test_the_readmes_plain_command_means_what_the_config_says():
    (line,) = readme_lines("transformer_pn_iwslt")
    plain, config = command_line(line), composed("iwslt14_de_en")
    assert plain.model.arch == config.model._name == "transformer_pn_iwslt"
    sections = ("task", "criterion", "optimizer", "lr_scheduler", "optimization", "dataset", "checkpoint", "common")
    for section in sections:
        ours, theirs = settings(config[section]), settings(plain[section])
        assert ours.keys() <= theirs.keys(), section
        different = {key: (value, theirs[key]) for key, value in ours.items() if str(theirs[key]) != str(value)}
        # fairseq's two ways in differ in how they write a list of one, nothing else.
        assert not different, (section, different)
    ours, theirs = model_of(config.model), model_of(plain.model)
    assert ours.norms == theirs.norms and ours.norms.psi_warmup_updates == 8000
    for field in fields(ours):
        if field.name not in ("encoder", "decoder", "quant_noise"):
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    for part in ("encoder", "decoder"):
        for field in fields(getattr(ours, part)):
            one, other = getattr(getattr(ours, part), field.name), getattr(getattr(theirs, part), field.name)
            assert one == other, (part, field.name)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_opens_with_the_command_that_runs_it(name):
    head = (ROOT / f"configs/{name}.yaml").read_text("utf-8").split("\ntask:")[0]
    assert all(line.startswith("#") for line in head.splitlines() if line)
    command = re.search(r"^# +(scripts/train\.sh .*)$", head, re.M)[1]
    assert name in shlex.split(command)
    arch = re.search(r"model\._name=(\S+)", command)[1]
    assert composed(name, f"model._name={arch}").model._name == arch


@pytest.mark.parametrize("name", CONFIGS)
def test_no_sentence_is_dropped_by_a_batch_multiple(name):
    assert composed(name).dataset.required_batch_size_multiple == 1


@pytest.mark.parametrize("name", CONFIGS)
def test_the_psi_warmup_follows_the_learning_rates(name):
    cfg = composed(name, "lr_scheduler.warmup_updates=123")
    assert model_of(cfg.model).norms.psi_warmup_updates == 123
    cfg = composed(name, "+model.psi_warmup_updates=7")
    assert model_of(cfg.model).norms.psi_warmup_updates == 7
