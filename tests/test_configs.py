"""configs/*.yaml: hyperparameters stand there once, and the plain fairseq-train line of the docs
means the same.
"""

import functools
import re
import shlex
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import yaml
from fairseq import options
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_CONFIG_REGISTRY
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf, open_dict

import pn_fairseq.models  # noqa: F401 (registers the architectures)
from pn_fairseq.models.norm_options import NormOptions
from pn_fairseq.models.transformer_pn import TransformerPNConfig
from pn_fairseq.norms import NORMS
from pn_fairseq.pipeline.checks import check_values
from pn_fairseq.pipeline.data.recipes import RECIPES
from pn_fairseq.pipeline.published import LM_TABLES, PAPER
from pn_fairseq.pipeline.runs import flat
from pn_fairseq.pipeline.setting_roles import listed_role
from pn_fairseq.pipeline.steps import experiments
from pn_fairseq.pipeline.training_settings import compose as compose_settings

from .scripts_helpers import ROOT

CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
#: What --data, --run and the place of the checkout decide, and what hydra and argparse each add of
#: their own.
PLACES = "data user_dir save_dir log_file tensorboard_logdir no_seed_provided _name arch".split()


@functools.cache
def composed_once(name: str):
    config_dir = str(ROOT / "configs")
    with (
        mock.patch.dict(ConfigStore.instance().repo),
        initialize_config_dir(config_dir, version_base="1.1"),
    ):
        hydra_init(name)
        cfg = compose(config_name=name, overrides=["task.data=/data"], return_hydra_config=True)
    add_defaults(cfg)
    return cfg


def composed(name: str, **changes):
    """The configuration as fairseq-hydra-train composes it, with hydra's own; ``changes``: a
    section's new values.

    Composing takes a second: it is done once for all tests, which only read it. What refers to a
    changed value follows.
    """
    if not changes:
        return composed_once(name)
    cfg = deepcopy(composed_once(name))
    with open_dict(cfg):
        for section, values in changes.items():
            cfg[section].update(values)
    return cfg


def command_line(line: str):
    """The configuration that fairseq-train makes of a command line."""
    line = line.replace("$(pn --user-dir)", str(ROOT / "pn_fairseq"))
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, input_args=shlex.split(line)[1:])
    return convert_namespace_to_omegaconf(args)


def settings(section, ignored=PLACES) -> dict:
    values = OmegaConf.to_container(section, resolve=True, enum_to_str=True)
    return {key: value for key, value in values.items() if key not in ignored}


def model_of(args) -> TransformerPNConfig:
    """What the model is built from, once the architecture has filled in its defaults."""
    args = deepcopy(args)
    with open_dict(args) if OmegaConf.is_config(args) else nullcontext():
        ARCH_CONFIG_REGISTRY[getattr(args, "_name", None) or args.arch](args)
    if is_language_model(args):
        return SimpleNamespace(norms=NormOptions.from_args(args, encoder=False))
    return TransformerPNConfig.from_args(args)


def is_language_model(args) -> bool:
    return "_lm_" in (getattr(args, "_name", None) or args.arch)


def test_the_plain_command_of_the_docs_means_what_the_config_says():
    text = (ROOT / "docs/plain_fairseq.md").read_text("utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"(?m)^ *(fairseq-train .*transformer_pn_iwslt.*)$", text)
    plain = command_line(line)
    config = composed("iwslt14_de_en")
    assert plain.model.arch == config.model._name == "transformer_pn_iwslt"
    sections = "task criterion optimizer lr_scheduler optimization dataset checkpoint common"
    for section in sections.split():
        ours = settings(config[section])
        theirs = settings(plain[section])
        assert ours.keys() <= theirs.keys(), section
        for key, value in ours.items():
            # fairseq's two ways in differ in how they write a list of one, nothing else.
            assert str(theirs[key]) == str(value), (section, key)
    ours = model_of(config.model)
    theirs = model_of(plain.model)
    # The configuration has a folder for TensorBoard, and so diagnostics of the norms.
    assert replace(ours.norms, norm_stats_interval=None) == theirs.norms
    assert ours.norms.psi_warmup_updates == 8000
    assert_same_fields(ours, theirs)
    assert_same_fields(ours.encoder, theirs.encoder)
    assert_same_fields(ours.decoder, theirs.decoder)


def assert_same_fields(one, other) -> None:
    """Except for those that are compared by themselves."""
    for field in fields(one):
        if field.name not in ("encoder", "decoder", "norms", "quant_noise"):
            assert getattr(one, field.name) == getattr(other, field.name), field.name


def head_of(name: str) -> tuple[str, list[str]]:
    """The comment that a config opens with, and the words of the ``pn train`` command in it."""
    head = (ROOT / f"configs/{name}.yaml").read_text("utf-8").split("\ndefaults:")[0]
    return head, shlex.split(re.search(r"^# +(pn train .*)$", head, re.M)[1])


@pytest.mark.parametrize("name", CONFIGS)
def test_config_opens_with_the_command_that_runs_it(name):
    head, command = head_of(name)
    assert all(line.startswith("#") for line in head.splitlines() if line)
    assert name in command
    assert any(word.startswith("model._name=") for word in command)
    assert re.search(r"^# +pn prepare (\w+)", head, re.M)[1] in RECIPES
    plain = head[head.index("fairseq-hydra-train") :].replace("\\\n#", "").splitlines()[0]
    words = shlex.split(plain)
    assert words[words.index("--config-name") + 1] == name
    assert {word.split("=")[0] for word in words if "=" in word} == {"common.user_dir", "task.data"}


PUBLISHED_SETTINGS = yaml.safe_load((ROOT / "tests/published_settings.yaml").read_text("utf-8"))
PUBLISHED = PUBLISHED_SETTINGS["translation"]
PUBLISHED_FOR_ALL = PUBLISHED.pop("all")
PUBLISHED_LM = PUBLISHED_SETTINGS["language_models"]
PUBLISHED_OF_SCRIPTS = PUBLISHED_LM.pop("scripts")
PUBLISHED_OF_TEXTS = PUBLISHED_LM.pop("texts")


def assert_settings(cfg, *published: dict) -> None:
    """The configuration has the published settings; later ones replace earlier ones."""
    expected = {}
    for settings in published:
        expected |= settings
    for key, value in expected.items():
        assert OmegaConf.select(cfg, key) == value, key


@pytest.mark.parametrize("name", PUBLISHED_LM)
def test_published_settings_of_language_models(name):
    cfg = composed(name)
    of_a_text = name.endswith("_paper")
    common = PUBLISHED_OF_TEXTS if of_a_text else PUBLISHED_OF_SCRIPTS
    assert_settings(cfg, common, PUBLISHED_LM[name])
    if of_a_text:  # the peak of Vaswani et al. (2017)
        assert cfg.optimization.lr[0] == pytest.approx((512 * 4000) ** -0.5, rel=1e-4)
    model = deepcopy(cfg.model)
    ARCH_CONFIG_REGISTRY[model._name](model)
    sizes = [model.decoder_embed_dim, model.decoder_ffn_embed_dim]
    if name == "enwik8_lm":
        sizes += [model.decoder_attention_heads, model.decoder_layers]
        assert sizes == [512, 2048, 8, 12]
        return
    sizes += [model.core_rank, model.decoder_layers, model.dropout, model.adaptive_softmax_cutoff]
    assert sizes == PUBLISHED_SETTINGS["language_model_sizes"][name]
    assert model.cores == 1
    assert not model.post_norm
    assert not model.tensorized_unmasked


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name):
    cfg = composed(name)
    assert_settings(cfg, PUBLISHED_FOR_ALL, PUBLISHED[name])
    model = model_of(cfg.model)
    sizes = PUBLISHED_SETTINGS["sizes"]
    expected = sizes.get(name, sizes["all"])
    for part in (model.encoder, model.decoder):
        assert [part.embed_dim, part.ffn_embed_dim, part.attention_heads, part.layers] == expected
        assert part.normalize_before


#: Settings of ours in the files of a paper: of reporting, and the batch multiple, whose reason is
#: above it.
OURS = (
    "log_interval",
    "required_batch_size_multiple",
    "save_interval_updates",
    "keep_interval_updates",
)
#: What a comment about a number of a paper names.
SOURCE = "script|paper|authors|as [IW]|architecture|transformer_wmt|learning rate"


@pytest.mark.parametrize("name", [*PUBLISHED, *PUBLISHED_LM])
def test_every_number_of_a_paper_names_its_source(name):
    files = [ROOT / f"configs/{name}.yaml"]
    for path in (ROOT / "configs/base").glob("*.yaml"):
        if path.stem != "small":
            files.append(path)
    ours = OURS
    if name in PUBLISHED_LM:
        ours += ("num_workers", "_name")
    above = ""
    for line in "".join(path.read_text("utf-8") for path in files).splitlines():
        has_number = re.match(r"\s*\w+: .*\d", line)
        if has_number and not line.strip().startswith(ours):
            source = line.partition("#")[2]
            if above.strip().startswith("#"):
                source += above
            assert re.search(SOURCE, source), line
        above = line


def kept_checkpoints(cfg) -> int:
    return max(cfg.checkpoint.keep_last_epochs, cfg.checkpoint.keep_interval_updates)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_per_update_are_what_one_rank_takes(name):
    """fairseq-hydra-train on one rank has the effective batch that ``pn train`` keeps on any
    number.
    """
    overrides = [word for word in head_of(name)[1] if "=" in word]
    cfg, batches = compose_settings(
        ROOT / f"configs/{name}.yaml", ["task.data=/data", *overrides], 1, on_cpu=True
    )
    assert f"model._name={cfg.model._name}" in overrides
    plain = composed(name)
    (update_freq,) = plain.optimization.update_freq
    expected = update_freq * plain.dataset.max_tokens
    assert cfg.tokens_per_update == expected
    assert batches.tokens_per_update == expected
    assert cfg.average_last <= kept_checkpoints(cfg)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_every_config_reports_and_keeps(name):
    cfg = composed(name)
    assert cfg.dataset.required_batch_size_multiple == 1, "another one would drop sentences"
    assert cfg.common.log_format == "json"
    assert cfg.common.log_file
    assert cfg.common.tensorboard_logdir
    assert kept_checkpoints(cfg) == 10
    limits = (cfg.checkpoint.patience, cfg.optimization.max_update, cfg.optimization.max_epoch)
    assert any(limit > 0 for limit in limits)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_setting_has_a_role(name):
    """A new one has to be put into pn_fairseq/pipeline/setting_roles.py."""
    settings = flat(OmegaConf.to_container(composed(name)))
    for setting in settings:
        assert setting.startswith("hydra.") or listed_role(setting) is not None, setting


@pytest.mark.parametrize("name", CONFIGS)
def test_folders_of_fairseqs_own_command(name):
    """A job's folder has the name of its overrides, so that the same command resumes; jobs of a
    sweep have numbers.
    """
    hydra = composed(name, model={"_name": "transformer_ln_tiny"}, common={"seed": 3}).hydra
    hydra.job.override_dirname, hydra.job.num = "common.seed=3", 2  # set when a job is run
    assert hydra.run.dir == f"runs/hydra/{name}/common.seed=3"
    assert set(hydra.job.config.override_dirname.exclude_keys) == {"task.data", "common.user_dir"}
    assert re.fullmatch(rf"runs/hydra/{name}_sweep/[\d_-]+", hydra.sweep.dir)
    assert hydra.sweep.subdir == "2_transformer_ln_tiny_seed3"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_and_its_defaults_have_no_setting_in_common(name):
    """The defaults come after the file, since fairseq-hydra-train fills the gaps in the file
    with fairseq's values.
    """

    config = plain_config(name)
    assert config.defaults[0] == "_self_"
    bases = bases_of(name)
    assert "base/training" in bases
    own = flat(OmegaConf.to_container(config)).keys() - {"defaults"}
    for base in bases:
        common = own & flat(OmegaConf.to_container(plain_config(base))).keys()
        assert not common, base


def plain_config(file: str):
    return OmegaConf.load(ROOT / f"configs/{file}.yaml")


def bases_of(file: str) -> list[str]:
    """The files that a file's defaults name, and theirs."""
    found = []
    for name in plain_config(file).get("defaults", []):
        if name != "_self_":
            base = f"base/{name.removeprefix('base/')}"
            found += [base, *bases_of(base)]
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_the_psi_warmup_follows_the_learning_rates(name):
    cfg = composed(name, lr_scheduler={"warmup_updates": 123})
    if "psi_warmup_updates" in cfg.model:
        pytest.skip("the file has one of its own")
    assert model_of(cfg.model).norms.psi_warmup_updates == 123
    cfg = composed(name, model={"psi_warmup_updates": 7})
    assert model_of(cfg.model).norms.psi_warmup_updates == 7


#: Configuration, norm and changed settings of each row of the published tables.
ROWS = {}
for table in (*PAPER.values(), *LM_TABLES.values()):
    for row in table.rows:
        ROWS[table.config, row.norm, *row.settings.items()] = tuple(row.settings)
#: One row for each set of settings that rows change; the others take seconds, and each
#: configuration is composed above.
QUICK = {changed: row for row, changed in ROWS.items()}.values()


@pytest.mark.parametrize(
    "row",
    [row if row in QUICK else pytest.param(row, marks=pytest.mark.slow) for row in ROWS],
    ids=str,
)
def test_rows_of_published_tables_are_models(row):
    """With the settings that --table gives to ``pn train``."""
    config, norm, *changes = row
    corpus = next(corpus for corpus in experiments().values() if config.startswith(corpus.config))
    arch = f"{corpus.models[0]}_{NORMS[norm].short}_{corpus.size}"
    given = ["task.data=/data", f"model._name={arch}"]
    given += [f"model.{key}={value}" for key, value in changes]
    cfg, _ = compose_settings(ROOT / f"configs/{config}.yaml", given, 1, on_cpu=True)
    check_values(cfg)
    norms = model_of(cfg.model).norms
    found = OmegaConf.create(vars(norms))
    for key, value in changes:
        assert str(OmegaConf.select(found, key)) == value
    if "_lm_" in arch:
        assert norms.decoder_norm == norm
    else:
        assert norms.encoder_norm == norm
        assert norms.decoder_norm == dict(changes).get("decoder_norm", "layer")
