"""configs/*.yaml: hyperparameters stand there once, and the plain fairseq-train line of the docs
means the same.
"""

import copy
import functools
import operator
import re
import shlex
from contextlib import nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest import mock

import pytest
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
PLACES = {
    "data",
    "user_dir",
    "save_dir",
    "log_file",
    "tensorboard_logdir",
    "no_seed_provided",
    "_name",
    "arch",
}


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
    cfg = copy.deepcopy(composed_once(name))
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
    args = copy.deepcopy(args)
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
    plain, config = command_line(line), composed("iwslt14_de_en")
    assert plain.model.arch == config.model._name == "transformer_pn_iwslt"
    sections = (
        "task",
        "criterion",
        "optimizer",
        "lr_scheduler",
        "optimization",
        "dataset",
        "checkpoint",
        "common",
    )
    for section in sections:
        ours, theirs = settings(config[section]), settings(plain[section])
        assert ours.keys() <= theirs.keys(), section
        different = {
            key: (value, theirs[key])
            for key, value in ours.items()
            if str(theirs[key]) != str(value)
        }
        # fairseq's two ways in differ in how they write a list of one, nothing else.
        assert not different, (section, different)
    ours, theirs = model_of(config.model), model_of(plain.model)
    # The configuration has a folder for TensorBoard, and so diagnostics of the norms.
    assert (
        replace(ours.norms, norm_stats_interval=None) == theirs.norms
        and ours.norms.psi_warmup_updates == 8000
    )
    for one, other in (
        (ours, theirs),
        (ours.encoder, theirs.encoder),
        (ours.decoder, theirs.decoder),
    ):
        for name in {field.name for field in fields(one)} - {
            "encoder",
            "decoder",
            "norms",
            "quant_noise",
        }:
            assert getattr(one, name) == getattr(other, name), name


def head_of(name: str) -> tuple[str, list[str]]:
    """The comment that a config opens with, and the words of the ``pn train`` command in it."""
    head = (ROOT / f"configs/{name}.yaml").read_text("utf-8").split("\ndefaults:")[0]
    return head, shlex.split(re.search(r"^# +(pn train .*)$", head, re.M)[1])


@pytest.mark.parametrize("name", CONFIGS)
def test_config_opens_with_the_command_that_runs_it(name):
    head, command = head_of(name)
    assert all(line.startswith("#") for line in head.splitlines() if line)
    assert name in command and any(word.startswith("model._name=") for word in command)
    assert re.search(r"^# +pn prepare (\w+)", head, re.M)[1] in RECIPES
    plain = head[head.index("fairseq-hydra-train") :].replace("\\\n#", "").splitlines()[0]
    words = shlex.split(plain)
    assert words[words.index("--config-name") + 1] == name
    assert {word.split("=")[0] for word in words if "=" in word} == {"common.user_dir", "task.data"}


#: The settings that gave the published numbers; tokens per update: 4,096 on one GPU and on 128.
PUBLISHED = {
    "iwslt14_de_en": {
        **{
            "optimization.update_freq": [1],
            "optimization.lr": [0.0015],
            "optimizer.weight_decay": 0.0001,
        },
        **{
            "checkpoint.patience": 5,
            "scoring.average_last": 5,
            "generation.beam": 5,
            "generation.lenpen": 1.0,
        },
        **{"optimization.max_update": 100_000, "task.source_lang": "de", "task.target_lang": "en"},
    },
    "multi30k_en_de_tiny": {
        **{"optimization.update_freq": [2], "dataset.max_tokens": 4096, "optimization.lr": [0.005]},
        **{
            "optimizer.weight_decay": 0.0,
            "optimizer.adam_eps": 1e-8,
            "optimization.clip_norm": 25.0,
        },
        **{
            "optimization.max_update": 8000,
            "lr_scheduler.warmup_updates": 2000,
            "lr_scheduler.warmup_init_lr": 1e-7,
        },
        **{
            "checkpoint.patience": 10,
            "scoring.average_last": 10,
            "generation.beam": 5,
            "generation.lenpen": 1.0,
        },
        **{
            "model.encoder_layers": 4,
            "model.decoder_layers": 4,
            "task.source_lang": "en",
            "task.target_lang": "de",
        },
        **{
            "model.attention_dropout": 0.0,
            "model.activation_dropout": 0.0,
            "optimization.stop_min_lr": -1.0,
        },
    },
    "wmt14_en_de_big": {
        **{
            "optimization.update_freq": [128],
            "optimization.lr": [0.003],
            "optimizer.weight_decay": 0.0,
        },
        **{
            "checkpoint.patience": 10,
            "scoring.average_last": 10,
            "generation.beam": 4,
            "generation.lenpen": 0.6,
        },
        **{"optimization.max_update": 300_000, "task.source_lang": "en", "task.target_lang": "de"},
    },
    "iwslt14_de_en_adanorm": {
        **{
            "optimization.update_freq": [2],
            "optimization.lr": [0.0015],
            "optimization.max_update": 90_000,
        },
        **{
            "scoring.average_last": 10,
            "generation.beam": 5,
            "model.norm_options.ada.ada_scale": 2.0,
        },
        **{"model.attention_init": "torch", "model.decoder_norm": "ada"},
    },
    "iwslt15_en_vi_adanorm": {
        **{"optimization.update_freq": [1], "optimization.lr": [0.001], "model.dropout": 0.1},
        **{
            "model.attention_dropout": 0.0,
            "model.activation_dropout": 0.0,
            "model.share_all_embeddings": None,
        },
        **{
            "scoring.average_last": 10,
            "generation.beam": 5,
            "model.norm_options.ada.ada_scale": 1.0,
        },
        **{"model.attention_init": "torch", "model.decoder_norm": "ada"},
    },
    "wmt14_en_de_big_adanorm": {
        **{
            "optimization.update_freq": [1],
            "optimization.lr": [0.001],
            "optimizer.weight_decay": 0.0,
        },
        **{"lr_scheduler.warmup_updates": 4000, "scoring.average_last": 10, "generation.beam": 4},
        **{
            "model.norm_options.ada.ada_scale": 2.0,
            "model.decoder_norm": "ada",
            "model.attention_init": "torch",
        },
    },
    "iwslt14_de_en_paper": {
        **{"model.dropout": 0.0, "scoring.average_last": 10, "checkpoint.patience": 5},
        **{"optimization.max_update": 100_000, "generation.beam": 5, "generation.lenpen": 1.0},
    },
    "iwslt14_de_en_unified": {
        **{
            "optimization.lr": [0.0007],
            "lr_scheduler.warmup_updates": 6000,
            "optimization.max_update": 100_000,
        },
        **{"scoring.average_last": 10, "generation.beam": 5, "model.decoder_norm": "unified"},
        "model.psi_warmup_updates": 4000,
    },
    "iwslt14_de_en_regularized_bn": {
        **{
            "optimization.lr": [0.0015],
            "optimization.max_epoch": 60,
            "scoring.average_last": 6,
            "generation.beam": 5,
        },
        **{
            "model.norm_options.batch-reg": {"lambda_mean": 0.1, "lambda_var": 0.01},
            "model.decoder_norm": None,
        },
    },
}
PUBLISHED_FOR_ALL = {
    **{
        "dataset.max_tokens": 4096,
        "optimizer.adam_betas": "(0.9, 0.98)",
        "optimization.clip_norm": 0.0,
    },
    **{
        "lr_scheduler._name": "inverse_sqrt",
        "lr_scheduler.warmup_updates": 8000,
        "lr_scheduler.warmup_init_lr": 1e-7,
    },
    **{
        "optimization.stop_min_lr": 1e-9,
        "model.dropout": 0.3,
        "model.attention_dropout": 0.1,
        "common.seed": 1,
    },
    **{
        "model.activation_dropout": 0.1,
        "model.share_all_embeddings": True,
        "criterion.label_smoothing": 0.1,
    },
    **{"checkpoint.keep_last_epochs": 10},
}
#: Embedding, feed-forward, heads, layers.
PUBLISHED_SIZES = dict.fromkeys(("wmt14_en_de_big", "wmt14_en_de_big_adanorm"), (1024, 4096, 16, 6))
PUBLISHED_SIZES |= {
    "iwslt15_en_vi_adanorm": (512, 2048, 8, 6),
    "multi30k_en_de_tiny": (128, 256, 4, 4),
}


#: Of run_ptb.sh and run_wt103.sh in the code of Ma et al. (2019), of run_enwik8_base.sh in the code
#: of Transformer-XL, and of the text of PowerNorm and of Ma et al.
PUBLISHED_LM = {
    "ptb_lm": {
        **{
            "optimization.max_update": 20_000,
            "dataset.max_tokens": 120 * 32,
            "task.tokens_per_sample": 32,
        },
        **{"criterion._name": "cross_entropy"},
    },
    "wikitext103_lm": {
        **{
            "optimization.max_update": 200_000,
            "dataset.max_tokens": 60 * 80,
            "task.tokens_per_sample": 80,
        },
        **{"criterion._name": "adaptive_loss"},
    },
    "enwik8_lm": {
        **{
            "optimization.max_update": 400_000,
            "dataset.max_tokens": 22 * 512,
            "task.tokens_per_sample": 512,
        },
        **{
            "dataset.validate_interval_updates": 4000,
            "criterion._name": "cross_entropy",
            "model.dropout": 0.1,
        },
        "model.norm_options.ada": {"ada_scale": 1.0, "ada_k": 0.1},
    },
    "ptb_lm_paper": {"task.tokens_per_sample": 30, "criterion.label_smoothing": 0.1},
    "wikitext103_lm_paper": {"task.tokens_per_sample": 100, "criterion._name": "adaptive_loss"},
}
PUBLISHED_OF_SCRIPTS = {
    **{"optimization.lr": [0.00025], "optimization.clip_norm": 0.25, "optimizer.weight_decay": 0.0},
    **{
        "lr_scheduler._name": "cosine",
        "lr_scheduler.warmup_updates": 0,
        "dataset.validate_interval_updates": 1000,
    },
    **{"task.sample_break_mode": "none", "optimization.update_freq": [1]},
}
PUBLISHED_OF_TEXTS = {
    **{
        "optimization.max_epoch": 30,
        "lr_scheduler._name": "inverse_sqrt",
        "lr_scheduler.warmup_updates": 4000,
    },
    **{"optimizer.adam_betas": "(0.9, 0.98)"},
}
#: Channels, inner, rank, layers, dropout, cutoffs.
PUBLISHED_LM_SIZES = {
    "ptb_lm": (256, 2100, 40, 3, 0.3, ""),
    "wikitext103_lm": (256, 2100, 40, 6, 0.1, "20000,40000,200000"),
    "ptb_lm_paper": (512, 1024, 10, 3, 0.3, ""),
    "wikitext103_lm_paper": (512, 1024, 18, 6, 0.3, "20000,40000,200000"),
}


@pytest.mark.parametrize("name", PUBLISHED_LM)
def test_published_settings_of_language_models(name):
    cfg = composed(name)
    common = PUBLISHED_OF_TEXTS if name.endswith("_paper") else PUBLISHED_OF_SCRIPTS
    for key, value in {**common, **PUBLISHED_LM[name]}.items():
        assert OmegaConf.select(cfg, key) == value, key
    if name.endswith("_paper"):  # the peak of Vaswani et al. (2017)
        assert cfg.optimization.lr[0] == pytest.approx((512 * 4000) ** -0.5, rel=1e-4)
    model = copy.deepcopy(cfg.model)
    ARCH_CONFIG_REGISTRY[model._name](model)
    if name == "enwik8_lm":
        heads = model.decoder_attention_heads
        assert (
            model.decoder_embed_dim,
            model.decoder_ffn_embed_dim,
            heads,
            model.decoder_layers,
        ) == (512, 2048, 8, 12)
        return
    size = (
        model.decoder_embed_dim,
        model.decoder_ffn_embed_dim,
        model.core_rank,
        model.decoder_layers,
        model.dropout,
    )
    assert (*size, model.adaptive_softmax_cutoff) == PUBLISHED_LM_SIZES[name]
    assert model.cores == 1 and not model.post_norm and not model.tensorized_unmasked


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name):
    cfg = composed(name)
    for key, value in {**PUBLISHED_FOR_ALL, **PUBLISHED[name]}.items():
        assert OmegaConf.select(cfg, key) == value, key
    model = model_of(cfg.model)
    size = PUBLISHED_SIZES.get(name, (512, 1024, 4, 6))
    for part in (model.encoder, model.decoder):
        assert (part.embed_dim, part.ffn_embed_dim, part.attention_heads, part.layers) == size
        assert part.normalize_before


@pytest.mark.parametrize("name", [*PUBLISHED, *PUBLISHED_LM])
def test_every_number_of_a_paper_names_its_source(name):
    files = [
        name,
        *(
            f"base/{path.stem}"
            for path in (ROOT / "configs/base").glob("*.yaml")
            if path.stem != "small"
        ),
    ]
    lines = [
        line
        for file in files
        for line in (ROOT / f"configs/{file}.yaml").read_text("utf-8").splitlines()
    ]
    # Reporting is not of the paper, and the batch multiple has its reason above it.
    ours = (
        "log_interval",
        "required_batch_size_multiple",
        "save_interval_updates",
        "keep_interval_updates",
    )
    ours += ("num_workers", "_name") if name in PUBLISHED_LM else ()
    for before, line in zip(["", *lines], lines, strict=False):
        if re.match(r"\s*\w+: .*\d", line) and not line.strip().startswith(ours):
            source = line.partition("#")[2] + (before if before.strip().startswith("#") else "")
            assert re.search(
                "script|paper|authors|as [IW]|architecture|transformer_wmt|learning rate", source
            ), line


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
    assert (
        update_freq * plain.dataset.max_tokens == cfg.tokens_per_update == batches.tokens_per_update
    )
    assert cfg.average_last <= max(
        cfg.checkpoint.keep_last_epochs, cfg.checkpoint.keep_interval_updates
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_what_every_config_reports_and_keeps(name):
    cfg = composed(name)
    assert cfg.dataset.required_batch_size_multiple == 1, "another one would drop sentences"
    assert cfg.common.log_format == "json" and cfg.common.log_file and cfg.common.tensorboard_logdir
    assert max(cfg.checkpoint.keep_last_epochs, cfg.checkpoint.keep_interval_updates) == 10
    limits = (cfg.checkpoint.patience, cfg.optimization.max_update, cfg.optimization.max_epoch)
    assert any(limit > 0 for limit in limits)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_setting_has_a_role(name):
    """A new one has to be put into pn_fairseq/pipeline/setting_roles.py."""
    settings = flat(OmegaConf.to_container(composed(name)))
    assert not [
        name for name in settings if not name.startswith("hydra.") and listed_role(name) is None
    ]


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

    def keys(file: str) -> set[str]:
        return flat(
            OmegaConf.to_container(OmegaConf.load(ROOT / f"configs/{file}.yaml"))
        ).keys() - {"defaults"}

    def bases(file: str) -> list[str]:
        names = OmegaConf.load(ROOT / f"configs/{file}.yaml").get("defaults", [])
        found = [f"base/{base.removeprefix('base/')}" for base in names if base != "_self_"]
        return [*found, *(other for base in found for other in bases(base))]

    assert OmegaConf.load(ROOT / f"configs/{name}.yaml").defaults[
        0
    ] == "_self_" and "base/training" in bases(name)
    assert not {base: common for base in bases(name) if (common := keys(base) & keys(name))}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_psi_warmup_follows_the_learning_rates(name):
    cfg = composed(name, lr_scheduler={"warmup_updates": 123})
    if "psi_warmup_updates" in cfg.model:
        pytest.skip("the file has one of its own")
    assert model_of(cfg.model).norms.psi_warmup_updates == 123
    cfg = composed(name, model={"psi_warmup_updates": 7})
    assert model_of(cfg.model).norms.psi_warmup_updates == 7


TABLES = (*PAPER.values(), *LM_TABLES.values())
ROWS = [
    *dict.fromkeys(
        (table.config, row.norm, *row.settings.items()) for table in TABLES for row in table.rows
    )
]
#: One row for each set of settings that rows change; the others take seconds, and each
#: configuration is composed above.
KINDS = {tuple(key for key, _ in row[2:]): row for row in ROWS}.values()


@pytest.mark.parametrize(
    "row",
    [row if row in KINDS else pytest.param(row, marks=pytest.mark.slow) for row in ROWS],
    ids=str,
)
def test_rows_of_published_tables_are_models(row):
    """With the settings that --table gives to ``pn train``."""
    config, norm, *changes = row
    corpus = next(corpus for corpus in experiments().values() if config.startswith(corpus.config))
    arch = f"{corpus.models[0]}_{NORMS[norm].short}_{corpus.size}"
    given = [
        "task.data=/data",
        f"model._name={arch}",
        *(f"model.{key}={value}" for key, value in changes),
    ]
    cfg, _ = compose_settings(ROOT / f"configs/{config}.yaml", given, 1, on_cpu=True)
    check_values(cfg)
    norms = model_of(cfg.model).norms
    assert (norms.decoder_norm if "_lm_" in arch else norms.encoder_norm) == norm
    assert {
        key: str(operator.attrgetter(key)(OmegaConf.create(vars(norms)))) for key, _ in changes
    } == dict(changes)
    assert "_lm_" in arch or norms.decoder_norm == dict(changes).get("decoder_norm", "layer")
