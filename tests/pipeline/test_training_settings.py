"""The settings of a training: what overrides mean, what is refused and with which words, what
may change.
"""

import re

import pytest
from omegaconf import OmegaConf

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.checks import check_same_run
from pn_fairseq.pipeline.training_settings import Batches, compose, spread

from ..scripts_helpers import ROOT, verb
from ..tables import rows

VERSES = ROOT / "configs/verses_es_en.yaml"


def composed(*overrides, world_size=1, config=VERSES, on_cpu=True):
    return compose(config, ["task.data=/data", *overrides], world_size, on_cpu)


def refused(*overrides, world_size=1, config=VERSES) -> str:
    with pytest.raises(UserError) as caught:
        composed(*overrides, world_size=world_size, config=config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tokens_per_update_are_kept_on_any_number_of_ranks():
    for tokens in (4096, 1600, 524288, 1000):
        for cap in (4096, 400, 333):
            for ranks in range(1, 20):
                batches = spread(tokens, cap, ranks)
                taken = ranks * batches.update_freq * batches.max_tokens
                # Nearly all of them: less than one is lost in each batch, and none where it
                # divides.
                assert tokens - ranks * batches.update_freq < taken <= tokens
                assert batches.max_tokens <= cap
                assert batches.update_freq == 1 or ranks * (batches.update_freq - 1) * cap < tokens
                if tokens % (ranks * cap) == 0:
                    assert batches.max_tokens == cap
    assert spread(4, 400, 4) == Batches(4, 1, 1, 4), "the least that there can be"
    words = "2 ranks x 5 tokens x update-freq 3 = 30 of 32 tokens per update"
    assert str(Batches(2, 3, 5, 32)) == words
    with pytest.raises(UserError, match="too few"):
        spread(3, 400, 4)


#: Settings, ranks, and the numbers of Batches.
BATCHES = """
                                                    | 1 | 1 1 2048 2048
                                                    | 4 | 4 1 512 2048
                                                    | 3 | 3 1 682 2048
dataset.max_tokens=512                              | 2 | 2 2 512 2048
dataset.max_tokens=500                              | 1 | 1 5 409 2048
tokens_per_update=8192                              | 2 | 2 2 2048 8192
+tokens_per_update=8192                             | 2 | 2 2 2048 8192
optimization.update_freq=[4]                        | 2 | 2 2 2048 8192
optimization.update_freq=[4] dataset.max_tokens=100 | 4 | 4 1 100 400
"""


@pytest.mark.parametrize(("overrides", "ranks", "numbers"), rows(BATCHES))
def test_what_an_override_means_for_the_batches(overrides, ranks, numbers):
    expected = Batches(*map(int, numbers.split()))
    cfg, batches = composed(*overrides.split(), world_size=int(ranks))
    assert batches == expected
    assert list(cfg.optimization.update_freq) == [expected.update_freq]
    assert cfg.dataset.max_tokens == expected.max_tokens
    assert cfg.tokens_per_update == expected.tokens_per_update
    given = re.search(r"dataset.max_tokens=(\d+)|$", overrides)[1] or 2048
    assert cfg.dataset.max_tokens_valid == int(given), "validation is not part of an update"
    assert cfg.distributed_training.distributed_world_size == int(ranks)


def test_a_config_of_ones_own(tmp_path):
    """Also a copy elsewhere of one that comes with this project, whose defaults are found."""
    own = tmp_path / "own.yaml"
    text = VERSES.read_text("utf-8").replace("update_freq: [1]", "update_freq: [3]")
    own.write_text(text)
    assert composed(config=own, world_size=2)[1] == Batches(2, 2, 1536, 6144)
    _, batches = composed("dataset.max_tokens=1024", config=own, world_size=2)
    assert batches == Batches(2, 3, 1024, 6144)
    own.write_text(text.replace("encoder_norm", "encoder_nrom").replace("dropout:", "drop_out:"))
    assert "unknown setting 'model.drop_out', did you mean 'model.dropout'" in refused(config=own)


def test_a_config_without_defaults(tmp_path):
    """fairseq's own values are below it:

    dataclasses of fairseq 0.12.2 have patience -1 and log_interval 100.
    """
    text = (
        "task: {_name: translation, source_lang: es, target_lang: en}\nmodel: {_name: "
        "transformer_pn_tiny}\n"
    )
    text += "dataset: {max_tokens: 300}\noptimization: {max_update: 5000}\n"
    (tmp_path / "own.yaml").write_text(text)
    cfg, batches = composed(config=tmp_path / "own.yaml")
    assert batches == Batches(1, 1, 300, 300) and cfg.optimization.max_update == 5000
    assert (cfg.checkpoint.patience, cfg.common.log_interval, cfg.task.data) == (-1, 100, "/data")


@pytest.mark.parametrize(("given", "interval"), [(60, 3), (6, 1), (4000, 50), (None, 50)])
def test_a_short_run_logs_twenty_points(given, interval):
    limit = f"optimization.max_update={given}" if given else "optimization.max_update=0"
    assert composed(limit)[0].common.log_interval == interval
    assert composed(limit, "common.log_interval=7")[0].common.log_interval == 7


def test_a_config_that_builds_on_another(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(
        "defaults: [verses_es_en, _self_]\nmodel: {dropout: 0.4}\nhydra: {job: {name: x}}\n"
    )
    plain, cfg = composed()[0], composed(config=own)[0]
    assert cfg.model.dropout == 0.4
    cfg.model.dropout = plain.model.dropout
    assert cfg == plain
    assert composed("model.dropout=0.2", config=own)[0].model.dropout == 0.2
    own.write_text("defaults: [verses_es_en]\nmodel: {dropout: 0.4}\n")
    assert composed(config=own)[0].model.dropout == 0.4, "the file comes after its defaults"
    own.write_text("defaults: [verses_es_en, no_such_file, _self_]\n")
    assert "In 'own': Could not load 'no_such_file'" in refused(config=own)


#: Settings, and what the line says; ``;`` stands between several.
REFUSED = """
tokens_per_update=0 | tokens_per_update must be a whole number of at least 1, not '0'
tokens_per_update=many | tokens_per_update must be a whole number of at least 1, not 'many'
average_last=some | average_last must be a whole number
tokens_per_update=400 optimization.update_freq=[2] | the same thing
optimization.update_freq=[1,2] | update_freq
dataset.batch_size=8 | dataset.batch_size
distributed_training.distributed_world_size=2 | --ranks
model.norm_probe=pn+layer_scale_groups=0/probe | model.norm_probe=pn+l; KEY="'VALUE'"
model.encoder_nrom=layer | model.encoder_nrom; did you mean 'model.encoder_norm'
model._name=transformer_pn_tinyy | transformer_pn_tinyy; did you mean 'transformer_pn_tiny'
model._name=quite_another | quite_another; transformer_ln_tiny; transformer_pn_iwslt
task._name=translatoin | task._name=translatoin; did you mean 'translation'
+criterion.label_smoth=1 | criterion.label_smoth; 'criterion.label_smoothing'
optimizer.lrate=1 | optimizer.lrate
comon.seed=1 | 'comon'; 'common'
optimization.lr=abc | optimization.lr[0]: Value 'abc'; Float
optimization.max_update=1e3 | optimization.max_update; Integer
optimizer.adam_betas=(0.9,0.98) | adam_betas; extraneous input '('
optimizer=adam | did you mean 'optimizer._name=adam'
lr=0.001 | unknown setting 'lr', did you mean 'optimization.lr'
seed=2 | did you mean 'common.seed'
dropoutt=0.1 | did you mean 'model.dropout'
model.label_smoothing=0.1 | did you mean 'criterion.label_smoothing'
task.max_source_position=9 | did you mean 'task.max_source_positions'
scoring.average_first=3 | scoring.average_first; 'average_last'
model.max_update=3 | did you mean 'optimization.max_update'
lr_scheduler.end_learning_rate=0 | inverse_sqrt has no such setting, polynomial_decay has one
optimizer.momentum=0.9 | optimizer._name=adam has no such setting, nag has one
"""


@pytest.mark.parametrize(("overrides", "needles"), rows(REFUSED))
def test_a_setting_or_value_that_is_refused_is_one_line_with_advice(overrides, needles):
    """The same names in another section only if they are nearly the same; else who has such a
    setting. A batch of sentences is refused on several ranks.
    """
    line = refused(*overrides.split(), world_size=2)
    for needle in needles.split("; "):
        assert needle in line


@pytest.mark.parametrize(("plus", "lr"), [("", "0.001"), ("+", "1e-3"), ("++", "[0.001]")])
def test_settings_work_with_and_without_plus_and_a_number_is_a_list_of_one(plus, lr):
    given = "model.encoder_norm=batch generation.max_len_b=20 model.dropout=0.3".split()
    given.append(f"optimization.lr={lr}")
    cfg, _ = composed(*(f"{plus}{override}" for override in given))
    assert cfg.model.encoder_norm == "batch" and cfg.model.dropout == 0.3
    assert cfg.generation.max_len_b == 20
    assert cfg.optimization.lr == [0.001]


@pytest.mark.parametrize(
    ("chosen", "dropped"),
    [
        ("lr_scheduler._name=cosine", ""),
        ("lr_scheduler._name=polynomial_decay", "warmup_init_lr"),
        ("lr_scheduler._name=tri_stage", "warmup_init_lr, warmup_updates"),
        ("optimizer._name=sgd", "adam_betas"),
        ("criterion._name=cross_entropy", "label_smoothing"),
    ],
)
def test_a_component_that_is_exchanged_has_its_own_settings(chosen, dropped, capsys):
    section = chosen.partition("._name")[0]
    cfg = composed(chosen)[0]
    assert not {*dropped.split(", ")} & cfg[section].keys()
    line = f"[train] note: {chosen} has no {dropped}; dropped\n"
    assert capsys.readouterr().err == (line if dropped else "")
    if dropped:  # a setting that was given is not dropped
        setting = f"{section}.{dropped.split(', ')[0]}"
        assert f"unknown setting '{setting}'" in refused(chosen, f"{setting}=1")


def test_norms_of_a_language_model_of_fairseq_are_converted(capsys):
    """Its model has a dataclass, without these settings."""
    config = ROOT / "configs/verses_lm_en.yaml"
    given = (
        "model._name=transformer_lm_gpt",
        "model.convert_norms='*=batch'",
        "model.decoder_layers=1",
    )
    cfg, _ = composed(*given, config=config)
    assert cfg.model.convert_norms == "*=batch" and cfg.model.decoder_layers == 1
    assert verb("train")(["verses_lm_en", "--check", *given]) == 0


@pytest.mark.parametrize("text", ["", "model: [1", "common:\n  seed: 2\n"])
def test_a_file_that_is_no_configuration(text, tmp_path):
    (tmp_path / "own.yaml").write_text(text)
    assert "own.yaml" in refused(config=tmp_path / "own.yaml")


def test_fp16_on_a_cpu_leaves_gradients_unflattened():
    """And how many checkpoints are averaged."""
    for overrides, on_cpu, unflattened, averaged in (
        (("common.fp16=true", "average_last=7"), True, True, 7),
        (("common.fp16=true",), False, False, 5),
        ((), True, False, 5),
    ):
        cfg, _ = composed(*overrides, on_cpu=on_cpu)
        assert (cfg.common.fp16_no_flatten_grads, cfg.average_last) == (unflattened, averaged)


@pytest.fixture
def begun(tmp_path):
    """A run and its data, begun with the settings of the verses."""
    for folder in ("data", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data/settings.txt").write_text("source=es\n")
    (tmp_path / "run/data.settings").write_text("source=es\n")
    OmegaConf.save(composed()[0], tmp_path / "run/config.yaml")

    def check(*overrides, world_size=1):
        cfg, _ = composed(*overrides, world_size=world_size)
        check_same_run(cfg, tmp_path / "data", tmp_path / "run")

    check.data = tmp_path / "data"
    return check


#: What may change in a run, and what may not.
CHANGES = """
optimization.max_update=14 generation.max_len_b=5 generation.beam=7 common.log_interval=7
checkpoint.save_interval_updates=3 checkpoint.keep_interval_updates=2 checkpoint.patience=3
dataset.validate_interval_updates=7 average_last=3 common.wandb_project=x dataset.num_workers=2
""".split()
DIFFERENCES = """
dataset.required_batch_size_multiple=2 common.seed=2 common.fp16=true model.dropout=0.2
optimizer.weight_decay=0.1 model._name=transformer_bn_tiny optimization.clip_norm=1
""".split()


def test_limits_decoding_saving_validation_and_ranks_may_change(begun):
    begun()
    begun(*CHANGES, world_size=2)


def test_other_differences_are_refused_those_of_the_model_first(begun):
    with pytest.raises(UserError) as caught:
        begun(*DIFFERENCES)
    text = str(caught.value)
    model = "model._name transformer_pn_tiny -> transformer_bn_tiny"
    places = [text.index(part) for part in (model, "model.dropout 0.1 -> 0.2", "common.fp16")]
    assert places == sorted(places)
    assert re.search(r"and \d more", text) and "decoding" in text and "\n" not in text
    (begun.data / "settings.txt").write_text("source=de\n")
    with pytest.raises(UserError, match="different data"):
        begun()
