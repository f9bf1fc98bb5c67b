"""What a training remembers over an interruption, and what one training leaves to the next in
the same process.
"""

import logging
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace

import fairseq.file_io
import fairseq_cli.train
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig, FairseqConfig
from fairseq.file_io import PathManager
from fairseq.logging import progress_bar
from omegaconf import OmegaConf

import pn_fairseq.models  # noqa: F401 (applies the patches)
from pn_fairseq.common.checkpoints import load_checkpoint
from pn_fairseq.fairseq_patches import checkpoints, starting

from ..fixtures.training import train

#: Updates in an epoch of the tests of saves.
EPOCH = 8
PATIENCE = OmegaConf.create(
    {"checkpoint": {"patience": 3, "maximize_best_checkpoint_metric": False}}
)


def trainer(workers=1, max_tokens=400, update_freq=(4,)):
    cfg = {
        "distributed_training": {"distributed_world_size": workers},
        "dataset": {"max_tokens": max_tokens},
        "optimization": {"update_freq": list(update_freq)},
    }
    return SimpleNamespace(cfg=OmegaConf.create(cfg))


def saved(who, position, epoch=1):
    """The ``extra_state`` of a checkpoint of ``who``, by fairseq's own Trainer.save_checkpoint."""
    written = []
    place = {"version": 2, "epoch": epoch, "iterations_in_epoch": position, "shuffle": True}
    checkpoints.save(
        lambda trainer, name, state: written.append(state), who, "x.pt", {"train_iterator": place}
    )
    return written[0]


def loaded(who, state, *reset, **also):
    """What fairseq gets back when it loads a checkpoint, called as its checkpoint_utils does."""
    return checkpoints.load(lambda *args, **kwargs: state, who, "x.pt", *reset, **also)


@pytest.fixture(autouse=True)
def _fresh():
    """fairseq remembers nothing of the training runs of other tests, and they nothing of these."""
    new_process()
    yield
    starting.forget_earlier_job()


def new_process():
    for name in ("best", "num_runs"):
        if hasattr(fairseq_cli.train.should_stop_early, name):
            delattr(fairseq_cli.train.should_stop_early, name)


@pytest.mark.parametrize(
    ("reset", "flags", "losses", "stops"),
    [
        ((), {}, (5.2,), [True]),
        ((), {}, (4.0, 4.1, 4.2), [False] * 3),
        # From the weights of another training, as with --finetune-from-model, which resets all.
        ((True,), {}, (7.0, 7.1, 7.2), [False] * 3),
        ((False,), {"reset_meters": True}, (7.0, 7.1, 7.2), [False] * 3),
    ],
)
def test_early_stopping_counts_on_after_an_interruption(reset, flags, losses, stops):
    stop = fairseq_cli.train.should_stop_early
    assert [stop(PATIENCE, loss) for loss in (5.0, 6.0, 5.5)] == [False] * 3
    state = saved(trainer(), 0)
    new_process()
    # unpatched fairseq would begin to count again
    assert [stop(PATIENCE, loss) for loss in (6.0, 5.9)] == [False] * 2
    new_process()
    loaded(trainer(), state, *reset, **flags)
    assert [stop(PATIENCE, loss) for loss in losses] == stops


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        # 5 updates of 4 batches on one rank are 5 updates of 1 batch on four ranks, or of 2 on two.
        ((4, 400, (1,)), 5),
        ((2, 400, (2,)), 10),
        # 3 ranks with 533 tokens each.
        ((3, 533, (1,)), 5),
        ((1, 400, (4,)), 20),
        # Another number of tokens in an update: the same share of the data, to whole updates.
        ((1, 400, (8,)), 16),
    ],
)
def test_place_in_the_epoch_is_the_same_share_of_the_data(now, expected):
    state = loaded(trainer(*now), saved(trainer(1, 400, (4,)), 20))
    assert state["train_iterator"]["iterations_in_epoch"] == expected


def test_place_in_the_epoch_after_more_ranks_and_with_batches_of_sentences():
    state = loaded(trainer(1, 400, (4,)), saved(trainer(4, 400, (1,)), 5))
    assert state["train_iterator"]["iterations_in_epoch"] == 20
    state = loaded(trainer(2, None, (2,)), saved(trainer(1, None, (4,)), 20))
    assert state["train_iterator"]["iterations_in_epoch"] == 10


def test_update_freq_is_that_of_the_epoch():
    before = trainer(1, 400, (4, 2))
    for now, expected in ((trainer(1, 400, (1,)), 20), (trainer(2, 400, (4, 1)), 10)):
        state = loaded(now, saved(before, 20, epoch=2))
        assert state["train_iterator"]["iterations_in_epoch"] == expected


def test_the_end_of_an_epoch_and_checkpoints_without_the_additions_stay_as_they_are():
    state = saved(trainer(), 0, epoch=3)
    assert loaded(trainer(4), state)["train_iterator"] == state["train_iterator"]
    plain = {"train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 7}}
    assert loaded(trainer(4), plain) == plain
    assert loaded(trainer(), None) is None


def test_the_next_training_in_a_process_begins_with_nothing(tmp_path):
    checkpoint_utils.save_checkpoint.best = 1.0
    fairseq_cli.train.should_stop_early(PATIENCE, 1.0)
    handler = logging.FileHandler(tmp_path / "first.log")
    fairseq_cli.train.logger.addHandler(handler)
    cfg = {"common": {"log_file": str(tmp_path / "new/second.log")}}
    fairseq_cli.train.add_defaults(OmegaConf.merge(OmegaConf.structured(FairseqConfig), cfg))
    assert not hasattr(checkpoint_utils.save_checkpoint, "best")
    assert not hasattr(fairseq_cli.train.should_stop_early, "best")
    assert handler not in fairseq_cli.train.logger.handlers
    assert (tmp_path / "new").is_dir()


def test_ranks_that_would_train_alone_and_architectures_that_do_not_exist_are_refused(monkeypatch):
    cfg = OmegaConf.structured(FairseqConfig)
    starting.check(cfg)
    for name, value in {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
        "WORLD_SIZE": "2",
        "RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match="torchrun has started 2 ranks, .*distributed_world_size=2"
    ):
        starting.check(cfg)
    cfg.distributed_training.distributed_world_size = 2
    starting.check(cfg)
    cfg.model = {"_name": "transformer_pn_tinny"}  # as hydra gives it
    with pytest.raises(ArgumentTypeError, match="did you mean 'transformer_pn_tiny'"):
        starting.check(cfg)


def test_every_record_is_written_once_however_many_epochs(tmp_path):
    log = tmp_path / "train.log"
    for epoch in range(1, 4):
        bar = progress_bar.progress_bar([], log_format="json", log_file=str(log), epoch=epoch)
        logging.getLogger(progress_bar.__name__).setLevel(logging.INFO)
        progress_bar.logger.info(f"epoch {epoch}")
        assert bar is not None
    assert log.read_text().splitlines() == ["epoch 1", "epoch 2", "epoch 3"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_copy_that_is_cut_off_leaves_the_earlier_checkpoint(error, tmp_path, monkeypatch):
    (tmp_path / "checkpoint_1_8.pt").write_bytes(b"update 8")
    (tmp_path / "checkpoint_last.pt").write_bytes(b"update 4")

    def cut_off(source, destination):
        Path(destination).write_bytes(Path(source).read_bytes()[:3])
        raise error

    names = [str(tmp_path / name) for name in ("checkpoint_1_8.pt", "checkpoint_last.pt")]
    with monkeypatch.context() as patch:
        patch.setattr(fairseq.file_io, "shutil", SimpleNamespace(copyfile=cut_off))
        with pytest.raises(type(error)):
            PathManager.copy(*names, overwrite=True)
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == b"update 4"
    assert PathManager.copy(*names, overwrite=True)
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == b"update 8"
    assert len(list(tmp_path.iterdir())) == 2


class Saving:
    """What fairseq's save_checkpoint asks a trainer; its files hold the number of the update."""

    data_parallel_rank = 0
    should_save_checkpoint_on_current_rank = True
    checkpoint_suffix = ""
    task = None

    def __init__(self, updates: int):
        self.updates = updates

    def get_num_updates(self):
        return self.updates

    def get_model(self):
        return torch.nn.Identity()

    def consolidate_optimizer(self):
        pass

    def save_checkpoint(self, file, extra_state):
        Path(file).write_text(str(self.updates))
        return file


def saves(folder: Path, updates: int, **settings) -> dict[str, str]:
    """The files of a training whose epochs have EPOCH updates -> what they hold."""
    cfg = CheckpointConfig()
    vars(cfg).update(save_dir=str(folder), **settings)
    for update in range(1, updates + 1):
        at_end = update % EPOCH == 0
        epoch = -(-update // EPOCH)
        iterator = SimpleNamespace(
            epoch=epoch, end_of_epoch=lambda at_end=at_end: at_end, state_dict=dict
        )
        if at_end or update % cfg.save_interval_updates == 0:  # as fairseq_cli.train does
            checkpoint_utils.save_checkpoint(cfg, Saving(update), iterator, None)
    return {path.name: path.read_text() for path in folder.iterdir()}


def epoch_of(update: int) -> int:
    return -(-update // EPOCH)


@pytest.mark.parametrize("interval", [8, 4, 2, 3])
@pytest.mark.parametrize("epochs", [False, True])
def test_every_save_by_updates_has_its_file(interval, epochs, tmp_path):
    """Also one whose update is the last of an epoch (fairseq issue 2230)."""
    files = saves(tmp_path, 24, save_interval_updates=interval, no_epoch_checkpoints=not epochs)
    updates = range(interval, 25, interval)
    expected = {f"checkpoint_{epoch_of(update)}_{update}.pt": str(update) for update in updates}
    if epochs:
        expected |= {f"checkpoint{epoch}.pt": str(EPOCH * epoch) for epoch in (1, 2, 3)}
    assert files == expected | {"checkpoint_last.pt": "24"}


@pytest.mark.parametrize("interval", [8, 4])
def test_old_saves_are_removed_at_the_end_of_an_epoch_too(interval, tmp_path):
    files = saves(
        tmp_path, 40, save_interval_updates=interval, keep_interval_updates=2, keep_last_epochs=3
    )
    names = {"checkpoint_last.pt", *(f"checkpoint{epoch}.pt" for epoch in (3, 4, 5))}
    for update in (40 - interval, 40):
        names.add(f"checkpoint_{epoch_of(update)}_{update}.pt")
    assert files.keys() == names


@pytest.mark.slow
def test_a_training_saves_at_the_ends_of_its_epochs(data, tmp_path):
    """600 pairs in batches of 75."""
    batches = ("--max-tokens", "100000", "--batch-size", "75", "--disable-validation")
    small = ("--encoder-layers", "1", "--decoder-layers", "1")
    train(data, tmp_path, *batches, *small, "--save-interval-updates", "4", updates=16)
    names = [f"checkpoint_{place}.pt" for place in ("1_4", "1_8", "2_12", "2_16")]
    saved_names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert saved_names == {*names, "checkpoint_last.pt"}
    last = load_checkpoint(tmp_path / "checkpoints/checkpoint_2_16.pt")
    assert last["optimizer_history"][-1]["num_updates"] == 16
    assert last["extra_state"]["train_iterator"]["epoch"] == 3, "it resumes with the next epoch"


def test_a_training_in_bf16_continues_with_the_weights_before_rounding(data, tmp_path):
    train(data, tmp_path / "straight", "--bf16", updates=4)
    for updates in (2, 4):
        train(data, tmp_path / "resumed", "--bf16", updates=updates)
    straight, resumed = (
        load_checkpoint(tmp_path / name / "checkpoints/checkpoint_last.pt")
        for name in ("straight", "resumed")
    )
    assert straight["model"].keys() == resumed["model"].keys()
    for key, value in straight["model"].items():
        assert torch.equal(resumed["model"][key], value), key
    weights, again = (
        state["last_optimizer_state"][checkpoints.WEIGHTS] for state in (straight, resumed)
    )
    assert len(weights) == len(again) > 0
    assert all(map(torch.equal, weights, again))
    assert not all(torch.equal(exact, exact.bfloat16().float()) for exact in weights)


@pytest.mark.parametrize("flat", [False, True])
def test_saved_weights_are_used_where_the_model_still_has_their_rounded_values(flat):
    exact = torch.tensor([1.001, 2.002, 3.003])
    model = exact.half()
    model[1] = 7.0  # changed since
    copy = torch.nn.Parameter(model.float())
    optimizer = SimpleNamespace(
        fp16_params=[torch.nn.Parameter(model)], fp32_params={0: copy} if flat else [copy]
    )
    loaded = []
    state = {checkpoints.WEIGHTS: [exact]}
    checkpoints.load_optimizer_state(lambda *words: loaded.append(words), optimizer, state)
    assert copy.tolist() == [exact[0].item(), 7.0, exact[2].item()]
    assert loaded == [(optimizer, state, None)]
    for other in ({}, {checkpoints.WEIGHTS: [exact, exact]}):
        copy.data.fill_(5.0)
        checkpoints.load_optimizer_state(lambda *words: None, optimizer, other)
        assert copy.tolist() == [5.0] * 3
