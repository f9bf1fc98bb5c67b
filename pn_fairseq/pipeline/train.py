"""``pn train``: check the settings of a training run, launch its ranks, and run fairseq's training
in each rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from omegaconf import OmegaConf

from pn_fairseq.common.checkpoint_files import LAST
from pn_fairseq.common.command import (
    ArgumentParser,
    NothingSaved,
    UserError,
    absolute,
    check_settings,
    say,
    say_next,
    whole,
)
from pn_fairseq.common.errors import NotFiniteError, error_chain
from pn_fairseq.common.files import (
    CONFIGS,
    PACKAGE,
    atomic_write,
    check_can_be_folder,
    find_yaml,
    lock,
    names_in,
    write_settings,
)
from pn_fairseq.pipeline import outdated, stamp
from pn_fairseq.pipeline.data.settings import check_not_inside, check_prepared, is_prepared
from pn_fairseq.pipeline.launch import RESUME, RankLayout, TrainingFailed, find_layout, torchrun
from pn_fairseq.pipeline.machine import describe_machine, own_cores
from pn_fairseq.pipeline.runs import Run, flat, load_config
from pn_fairseq.pipeline.setting_roles import role_of

EPILOG = """\
settings (key=value, in hydra's syntax):
  model._name=transformer_bn_tiny  model.encoder_norm=batch  model.encoder_layers=2  common.seed=2
  optimization.max_update=400  tokens_per_update=65536  average_last=10  common.fp16=true

One rank per visible GPU, or one on the CPU. fairseq's log is in DIR/train.log. To resume an
interrupted run from its last checkpoint, repeat the command, on any number of ranks. It may then
set other limits (optimization.max_update, ...) and other settings of decoding, saving, validation
and logging. A finished run continues only if a limit is raised; pn average and pn generate then use
the new settings of decoding.

An update processes tokens_per_update tokens on any number of ranks: a batch of one rank contains at
most dataset.max_tokens, and optimization.update_freq is computed from both. If you set
optimization.update_freq, give its value for one rank.

If one rank fails, all stop, and the exit code is not 0. Several machines, and SLURM, need torchrun:
docs/several_gpus.md.
"""

#: Seconds between two lines of progress if the output is not a terminal.
LOG_SECONDS = 30


def main(argv: list[str]) -> int:
    # otherwise fairseq configures logging when it is imported
    logging.getLogger().addHandler(logging.NullHandler())
    parser = ArgumentParser(prog="pn train", epilog=EPILOG, setting_of=setting_of)
    names = ", ".join(names_in(CONFIGS))
    parser.add_argument(
        "config", metavar="CONFIG", help=f"a name in configs/ ({names}) or the path of a YAML file"
    )
    parser.add_argument(
        "settings",
        nargs="*",
        default=[],
        metavar="key=value",
        help="replaces a setting of the file",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="prepared data (default runs/data/CONFIG)"
    )
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="checkpoints and logs (default runs/CONFIG)"
    )
    ranks = (
        "number of ranks: at most one per visible GPU, or any number on the CPU (default: one per "
        "GPU, or one)"
    )
    parser.add_argument("--ranks", type=whole, metavar="N", help=ranks)
    check = (
        "check the settings, and the settings of an existing --run, and stop; needs no data unless "
        "--data is given"
    )
    parser.add_argument("--check", action="store_true", help=check)
    args = parser.parse_intermixed_args(argv)
    check_settings(args.settings)
    config = find_yaml(args.config, CONFIGS)
    data = absolute(args.data or Path("runs/data") / config.stem)
    run = absolute(args.run or Path("runs") / config.stem)
    if ":" in str(data):
        raise UserError(
            f"'{data}' has a colon, at which fairseq splits paths; use another path (--data)"
        )
    if args.check and args.data is None:
        check_not_inside(data, "--data")
    else:
        check_prepared(data, "--data", is_default=args.data is None)
    check_can_be_folder(run, "--run")
    check_may_be_run(run)
    try:
        return start(args, argv, config, data, run)
    except KeyboardInterrupt as interruption:
        if args.check or (run / "checkpoints" / LAST).is_file():
            raise
        raise NothingSaved(*interruption.args) from None


def check_may_be_run(run: Path) -> None:
    """Refuse a folder of something else, whose files a run would replace or misread."""
    if (run / "settings.txt").is_file():
        raise UserError(f"--run '{run}' is prepared data; name another folder")
    for name in ("config.yaml", "data", "data.settings", "made.txt", "starts.jsonl", "train.log"):
        if (run / name).is_dir():
            raise UserError(
                f"--run '{run}' has a folder {name}, where a run has a file; name another folder"
            )
    for name in ("checkpoints", "tensorboard"):
        check_can_be_folder(run / name, "--run")
    config = run / "config.yaml"
    if config.is_file() and not {"model", "task"} & load_config(config).keys():
        raise UserError(
            f"--run '{run}' has a config.yaml that is not of a run, which would be replaced; name "
            "another folder"
        )


def start(args, argv: list[str], config: Path, data: Path, run: Path) -> int:
    """Find the place of this process among the ranks, and train."""
    logging.captureWarnings(True)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    import torch

    on_cpu = any(re.fullmatch(r"\+*common\.cpu=true", setting, re.I) for setting in args.settings)
    layout = find_layout(os.environ, 0 if on_cpu else torch.cuda.device_count(), args.ranks)
    try:
        code = _main(args, argv, layout, config, data, run)
        if code == 0 and layout.rank is None and not args.check:
            say_next("train", "average", "--run", args.run or f"runs/{config.stem}")
        return code
    except UserError:
        if layout.local_rank:
            return 2  # every rank finds the same error; local rank 0 prints it
        raise
    except TrainingFailed as error:
        # the process that launched the ranks prints the first failure
        if "PN_FAIRSEQ_RANK" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        else:
            print(f"pn train: error: {error}", file=sys.stderr)
        return 1


def setting_of(option: str, value: str | None, words: list[str]) -> str:
    """The setting that corresponds to an option of fairseq-train, where ``words`` are a command
    line with a configuration.
    """
    from pn_fairseq.pipeline import training_settings

    names = [word for word in words if not word.startswith("-") and "=" not in word]
    try:
        return (
            training_settings.of_flag(option, value, find_yaml(names[0], CONFIGS)) if names else ""
        )
    except UserError:  # the configuration is also wrong
        return ""


def _main(args, argv: list[str], layout: RankLayout, config: Path, data: Path, run: Path) -> int:
    from pn_fairseq.common.checkpoints import load_checkpoint
    from pn_fairseq.pipeline import checks
    from pn_fairseq.pipeline.training_settings import compose

    where = {
        "common.user_dir": PACKAGE,
        "task.data": data / "bin",
        "checkpoint.save_dir": run / "checkpoints",
        "common.tensorboard_logdir": run / "tensorboard",
    }
    overrides = []
    for key, path in where.items():
        # a JSON string is also a hydra string
        overrides.append(f"{key}={json.dumps(str(path), ensure_ascii=False)}")
    overrides += args.settings
    cfg, batches = compose(config, overrides, layout.world_size, not layout.gpu)
    if cfg.common.wandb_project:
        try:
            from wandb import init  # noqa: F401 (fairseq trains without it, and only its log shows that)
        except ImportError as error:
            raise UserError(
                f"common.wandb_project needs Weights & Biases: pip install wandb ({error})"
            ) from error
        os.environ.setdefault("WANDB_DIR", str(run))
    checks.check_values(cfg)
    end = checks.check_end(cfg)
    checks.take_languages(cfg, data)
    if cfg.checkpoint.restore_file != LAST:
        raise UserError(
            f"checkpoint.restore_file={cfg.checkpoint.restore_file} would start again from there "
            "whenever the run is resumed; start from the weights of another run with "
            "checkpoint.finetune_from_model=FILE"
        )
    if args.check:
        checks.build(cfg, with_data=False)
        if is_prepared(data):
            checks.check_subsets(cfg, data)
        if args.run and not (run / "made.txt").is_file():
            checks.check_last_is_there(run)
        if args.run and (run / "config.yaml").exists():
            checks.check_same_run(cfg, data, run)
            note_on_longer(cfg, run)
            note_on_changes(cfg, run, data)
        if end:
            say("train", f"note: {end}")
        say("train", "the settings are valid")
        return 0
    checks.check_subsets(cfg, data)
    model = checks.check_model(cfg, data, batches)
    last = run / "checkpoints" / LAST
    # without the file fairseq silently starts from random weights
    weights = cfg.checkpoint.finetune_from_model
    if weights:
        checks.check_fit(model, load_checkpoint(weights), weights, cfg)
        if not layout.local_rank:
            outdated.note_on_average("train", [Path(weights)])
    begun = (run / "config.yaml").exists()
    if begun and (last.exists() or is_finished(cfg, 0, run, data)):
        checks.check_same_run(cfg, data, run)
        # without the file (checkpoint.no_last_checkpoints=true) only the stamp shows the end
        state = checks.check_last(model, last, cfg) if last.exists() else {}
        updates = state["optimizer_history"][-1]["num_updates"] if state else 0
        if is_finished(cfg, updates, run, data):
            if not layout.rank:
                if not (run / "made.txt").is_file():  # killed after the last save
                    write_settings(run / "made.txt", goal(cfg, data))
                note_on_longer(cfg, run)
                say("train", f"{run} is already trained; {take_settings_of_decoding(cfg, run)}")
            return 0
        checks.check_optimizer_state(state, last, cfg)
    checks.check_last_is_there(run)
    if layout.rank is None and layout.world_size > 1:
        if not layout.gpu:
            os.environ.setdefault(
                "OMP_NUM_THREADS", str(max(1, own_cores() // layout.ranks_per_machine))
            )
        # hides torchrun's messages about signals and failures; this process prints its own
        logging.disable(logging.CRITICAL)
        return torchrun(layout, argv)
    if not layout.rank:
        begin(cfg, batches, layout, data, run, argv)
        if end:
            say("train", f"note: {end}")
    train(cfg, layout, data, run)
    return 0


def goal(cfg, data: Path) -> dict[str, str]:
    """The stamp of a finished run: its limits and its data. config.yaml contains the settings that
    may not change.
    """
    settings = flat(OmegaConf.to_container(cfg))
    limits = {key: value for key, value in settings.items() if role_of(key).limit}
    return stamp.made_from(limits, {"data": [data / "settings.txt"]})


def is_finished(cfg, updates: int, run: Path, data: Path) -> bool:
    """Whether the run has reached its last update, or has ended with the same limits."""
    if cfg.optimization.max_update and updates >= cfg.optimization.max_update:
        return True
    return not stamp.differences(run / "made.txt", goal(cfg, data))


def note_on_longer(cfg, run: Path) -> None:
    """Print a note if a run has more updates or epochs than the settings ask for."""
    from pn_fairseq.pipeline import checks

    text = checks.longer_than_asked(cfg, run)
    if text:
        say("train", f"note: {text}")


def note_on_changes(cfg, run: Path, data: Path) -> None:
    """Print which results of a finished run would be remade with the settings."""
    if not ((run / "made.txt").is_file() and (data / "settings.txt").is_file()):
        return
    log = Run(run).log
    updates = log.updates if log else 0
    if not is_finished(cfg, updates, run, data):
        say("train", f"note: '{run}' would be trained on from update {updates}")
    changed = changed_decoding(cfg, run)
    if changed:
        values = ", ".join(f"{key}={value}" for key, value in changed.items())
        say("train", f"note: '{run}' would be decoded again, with {values}")


def changed_decoding(cfg, run: Path) -> dict[str, object]:
    """The settings read by ``pn average`` and ``pn generate`` that differ from those of a run."""
    before = Run(run).settings_by_name
    changed = {}
    for key, value in flat(OmegaConf.to_container(cfg)).items():
        if role_of(key).decoding and before.get(key) != value:
            changed[key] = value
    return changed


def take_settings_of_decoding(cfg, run: Path) -> str:
    """Write the settings that ``pn average`` and ``pn generate`` read into a finished run's
    config.yaml; return a text that lists them.
    """
    changed = changed_decoding(cfg, run)
    if not changed:
        return "nothing to do"
    config = load_config(run / "config.yaml")
    for key, value in changed.items():
        OmegaConf.update(config, key, value, force_add=True)
    with atomic_write(run / "config.yaml", "w") as file:
        file.write(OmegaConf.to_yaml(config))
    return f"now with {', '.join(f'{key}={value}' for key, value in changed.items())}"


def begin(cfg, batches, layout: RankLayout, data: Path, run: Path, argv: list[str]) -> None:
    """What the first rank does before it trains: lock the run, and record what is trained, and
    how.
    """
    run.mkdir(parents=True, exist_ok=True)
    lock(
        Run(run).lock,
        f"'{run}' is being trained by another process: wait for it, or use another --run",
    )
    (run / "made.txt").unlink(missing_ok=True)
    remove_cut_off(run)
    files = {
        "config.yaml": OmegaConf.to_yaml(cfg).encode(),
        "data": f"{data}\n".encode(),
        "data.settings": (data / "settings.txt").read_bytes(),
    }
    for name, content in files.items():
        with atomic_write(run / name) as file:
            file.write(content)
    record = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": argv,
        **dataclasses.asdict(batches),
        "ranks_of_this_machine": int(os.environ.get("LOCAL_WORLD_SIZE", 1)),  # torchrun sets it
        **describe_machine(),
    }
    if not layout.gpu:
        record["gpus"] = []
    with (run / "starts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    say(
        "train",
        f"{batches}{'' if layout.gpu else ', on the CPU'}; fairseq's log is {run / 'train.log'}",
    )


def being_written(run: Path) -> Path:
    """The checkpoint that an interrupted save has left, or the folder of the checkpoints."""
    partial = next((run / "checkpoints").glob("checkpoint*.pt.tmp"), None)
    return partial.with_suffix("") if partial else run / "checkpoints"


def remove_cut_off(run: Path) -> None:
    """Remove the files that an interrupted save has left in a run that this process trains."""
    for file in (run / "checkpoints").glob("checkpoint*.pt.tmp"):
        file.unlink(missing_ok=True)


def train(cfg, layout: RankLayout, data: Path, run: Path) -> None:
    """fairseq's training, as one of its ranks.

    Raises:
        TrainingFailed: the training raised an exception, whose traceback is in the log.
    """
    import torch
    from fairseq.distributed.utils import call_main
    from fairseq_cli.train import main as fairseq_main

    rank = layout.rank or 0
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A rank in a collective call waits for the others forever, so it must not outlive torchrun,
        # however torchrun ends.
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)
    settings = OmegaConf.to_yaml(cfg), (data / "settings.txt").read_bytes()
    wanted = goal(cfg, data)
    # the handler below receives all of fairseq's log, not only that of fairseq_cli.train
    cfg.common.log_file = None
    # fairseq reads torchrun's variables itself, but divides the local rank by the number of GPUs.
    cfg.distributed_training.distributed_rank = rank
    cfg.distributed_training.device_id = layout.local_rank % max(1, torch.cuda.device_count())
    OmegaConf.set_struct(cfg, True)

    def checked_main(cfg) -> None:
        if layout.world_size > 1:
            of_ranks: list = [None] * layout.world_size
            torch.distributed.all_gather_object(of_ranks, settings)
            for number, settings_of_rank in enumerate(of_ranks):
                if settings_of_rank != of_ranks[0]:
                    raise UserError(
                        f"rank {number} was started with different settings or data than rank 0"
                    )
        fairseq_main(cfg)

    with logging_to(run / "train.log", cfg.optimization.max_update, rank) as logger:
        try:
            call_main(cfg, checked_main)
            if not rank:
                write_settings(run / "made.txt", wanted)
        except UserError:
            raise
        except KeyboardInterrupt:
            if not rank:
                remove_cut_off(run)
            raise
        except Exception as error:
            logger.exception("the training failed")
            raise explained(error, cfg, run) from error


def explained(error: Exception, cfg, run: Path) -> UserError | TrainingFailed:
    """The one line for an error of the training: a mistake of the user, a fault of the machine,
    or a bug.
    """
    import torch

    metric = cfg.checkpoint.best_checkpoint_metric
    if isinstance(error, KeyError) and error.args == (metric,):
        known = "a metric of validation, such as loss; bleu needs task.eval_bleu=true"
        return UserError(f"checkpoint.best_checkpoint_metric={metric} is not {known}")
    if isinstance(error, NotFiniteError):
        return TrainingFailed(str(error))
    text = str(error).strip()
    first_line = text.partition("\n")[0]
    reason = f"{type(error).__name__}: {first_line} (the traceback is in {run / 'train.log'})"
    for link in error_chain(error):
        number = getattr(link, "errno", None)
        file = getattr(link, "filename", None) or being_written(run)
        if number == errno.EFBIG:
            return TrainingFailed(
                f"{file}: there is no space for a file of its size, or a limit of file size "
                f"(ulimit -f); raise the limit or use another disk, then {RESUME}"
            )
        if number in (errno.ENOSPC, errno.EDQUOT):
            return TrainingFailed(
                f"{file}: the disk is full; free some space, or keep fewer checkpoints "
                f"(checkpoint.keep_interval_updates, checkpoint.keep_last_epochs), then {RESUME}"
            )
    if "out of memory" in text or isinstance(error, MemoryError):
        advice = (
            f"lower dataset.max_tokens; an update still has tokens_per_update tokens, then {RESUME}"
        )
    elif isinstance(error, OSError | torch.distributed.DistError) or re.search(
        "connection (clos|res)|timed out", text, re.I
    ):
        advice = RESUME  # a fault of another rank, machine or file system
    else:
        advice = "this is a bug of pn_fairseq or fairseq: please report it"
    return TrainingFailed(f"{reason}; {advice}")


@contextlib.contextmanager
def logging_to(log: Path, total: int, rank: int):
    """Write fairseq's log, only errors on ranks other than 0, and show the progress."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    file = logging.FileHandler(log, encoding="utf-8", delay=True)
    file.setFormatter(
        logging.Formatter(
            "%(asctime)s | %(levelname)s | %(name)s | %(message)s", "%Y-%m-%d %H:%M:%S"
        )
    )
    file.setLevel(logging.ERROR if rank else logging.INFO)
    file.handleError = lambda record: None  # a full disk: saving a checkpoint names the file
    handlers = [file] if rank else [file, Progress(total)]
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield root
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


class Progress(logging.Handler):
    """One line of progress from fairseq's JSON records: rewritten on a terminal, repeated at
    intervals in a log.
    """

    def __init__(self, total: int):
        super().__init__(logging.INFO)
        self.total, self.valid, self.shown = total, "", 0.0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        pretrained = re.match("loading pretrained model from (.*): optimizer, lr scheduler", text)
        resumed = re.match(r"Loaded checkpoint .*/(.*) \(epoch \d+ @ ([1-9]\d*) updates\)", text)
        if pretrained:
            say("train", f"begins with the weights of {pretrained[1]}")
        elif resumed:
            say("train", f"resuming from {resumed[1]}, update {resumed[2]}")
        elif re.match("Stopping training due to|early stop since", text):
            self.show(text.split(", minimum")[0], keep=True)
        elif text.startswith("{"):
            with contextlib.suppress(ValueError, KeyError):
                self.show_record(json.loads(text))

    def show_record(self, values: dict) -> None:
        if "valid_num_updates" in values:
            loss = float(values.get("valid_nll_loss", values["valid_loss"]))
            self.valid = f", validation {loss:.3f} bits per token"
            self.show(f"update {values['valid_num_updates']}{self.valid}", keep=True)
        elif "ups" in values:
            updates, speed = int(values["num_updates"]), float(values["ups"])
            line = f"update {updates}"
            if self.total:
                line += f" of {self.total}"
            line += f", loss {float(values['loss']):.3f}{self.valid}"
            line += f", {float(values['wps']):.0f} tokens/s"
            if speed and self.total:
                minutes = max(self.total - updates, 0) / speed / 60
                line += f", {minutes:.1f} minutes left"
            self.show(line)

    def show(self, text: str, keep: bool = False) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K[train] {text}", end="\n" if keep else "", file=sys.stderr, flush=True)
        elif keep or time.monotonic() - self.shown >= LOG_SECONDS:
            self.shown = self.shown if keep else time.monotonic()
            say("train", text)

    def close(self) -> None:
        if sys.stderr.isatty():
            print(file=sys.stderr)
        super().close()
