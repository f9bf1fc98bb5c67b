"""Everything between the command line of train.sh and the training, which then takes the place of this process.

start.py CONFIG_FILE DATA RUN [key=value ...]

Finds out where this start stands among all (machines.py). The first one mends cut-off checkpoints, composes and checks
the settings (compose.py) and writes config.yaml, data, data.settings and starts.jsonl into RUN; then all train.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
import shutil
import sys
import warnings
from datetime import UTC, datetime
from pathlib import Path

import torch
from machines import Place, agree, find_place, own_cores

from pn_fairseq.cli import UserError, command
from pn_fairseq.machine import describe

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent.parent / "pn_fairseq"


def say(text: str) -> None:
    print(f"[train] {text}", file=sys.stderr, flush=True)


def quoted(text: str | Path) -> str:
    """``text`` as one value in hydra's syntax, whatever characters a path has."""
    escaped = str(text).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def fingerprint(config: Path, data: Path, run: Path, overrides: list[str]) -> str:
    """What has to be the same on all machines, which see one file system."""
    parts = [config.read_bytes(), (data / "settings").read_bytes(), str(run).encode(), *(o.encode() for o in overrides)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def lock(run: Path) -> None:
    """Keep others from training in ``run`` for as long as this process, or what takes its place, is there."""
    with contextlib.suppress(PermissionError):  # somebody else's run, which can be finished at best
        descriptor = os.open(run / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"'{run}' is being trained by another process: wait for it, or name another --run"
            ) from None
        except OSError:
            return  # a file system without locks
        os.set_inheritable(descriptor, True)


def make(run: Path) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory '{run}' (--run): {error.strerror}") from None


def replace(path: Path, write) -> None:
    """``path`` as ``write(beside)`` makes it, whole or as it was."""
    beside = path.with_name(f"{path.name}.partial")
    write(beside)
    os.replace(beside, path)


def prepare(config: Path, data: Path, run: Path, overrides: list[str], place: Place, starts: list[dict]) -> dict:
    """What the first start does, and tells the others: whether there is something to train, and with what settings."""
    there = run.is_dir()
    if there:
        lock(run)
        import repair_checkpoints

        for line in repair_checkpoints.repair(run / "checkpoints"):
            say(line)
    # Here, because only the first start needs fairseq now.
    from compose import (
        batch_overrides,
        check_model,
        check_same_run,
        compose_batches,
        compose_settings,
        is_finished,
        names,
    )
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    workers = sum(start["workers"] for start in starts)
    try:
        batches = compose_batches(config, overrides, workers)
        # One override of each: hydra takes no two of the same key.
        taken = {"tokens_per_update", "optimization.update_freq", "dataset.max_tokens", "dataset.max_tokens_valid"}
        rest = [override for override in overrides if batches.max_tokens is None or not names([override]) & taken]
        asked = [override for override in overrides if names([override]) != {"tokens_per_update"}]
        distributed = [f"distributed_training.distributed_world_size={workers}"]
        if workers > 1:
            distributed.append("distributed_training.distributed_no_spawn=true")
            distributed.append("distributed_training.distributed_init_method='env://'")
            if not place.gpu and "distributed_training.distributed_backend" not in names(overrides):
                distributed.append("distributed_training.distributed_backend=gloo")
        overrides = [*rest, *batch_overrides(batches, compose_settings(config, asked)), *distributed]
        settings = compose_settings(config, overrides)
        check_model(settings, data, batches)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
        lines = [line.strip() for line in f"{error}\n{cause}".splitlines() if line.strip()]
        raise UserError(lines[0]) from None
    if (run / "checkpoints/checkpoint_last.pt").exists() and (run / "config.yaml").exists():
        check_same_run(settings, data, run)
        if is_finished(settings, run):
            return {"finished": True}
    if not there:
        make(run)
        lock(run)
    replace(run / "config.yaml", lambda beside: OmegaConf.save(settings, beside))
    replace(run / "data", lambda beside: beside.write_text(f"{data}\n", encoding="utf-8"))
    replace(run / "data.settings", lambda beside: shutil.copyfile(data / "settings", beside))
    record = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "workers": workers,
        "tokens_per_update": batches.tokens_per_update,
        "update_freq": batches.update_freq,
        "max_tokens": batches.max_tokens,
        "machines": [{"workers": start["workers"], "gpus": start["gpus"]} for start in starts],
        **describe(),
    }
    with (run / "starts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    say(f"{batches}{'' if place.gpu else ', on the CPU'}{f', {len(starts)} starts' if len(starts) > 1 else ''}")
    return {"finished": False, "overrides": overrides, "workers": workers}


def uses_cpu(overrides: list[str]) -> bool:
    return any(o.lstrip("+").lower() == "common.cpu=true" for o in overrides)


@command("train.sh")
def main(argv: list[str] | None) -> int:
    config, data, run = (Path(part) for part in argv[:3])
    overrides = argv[3:]
    place = find_place(os.environ, 0 if uses_cpu(overrides) else torch.cuda.device_count())
    ours = [
        f"common.user_dir={quoted(PACKAGE)}",
        f"task.data={quoted(data / 'bin')}",
        f"checkpoint.save_dir={quoted(run / 'checkpoints')}",
        f"common.log_file={quoted(run / 'train.log')}",
        f"common.tensorboard_logdir={quoted(run / 'tensorboard')}",
    ]
    settings = [*ours, *overrides]
    mine = {
        "same": fingerprint(config, data, run, overrides),
        "workers": place.workers,
        "gpus": describe()["gpus"] if place.gpu else [],
    }
    if place.rank:
        say(f"number {place.rank} of {place.starts}, waiting for the first at {place.address}:{place.port}")
    elif place.starts > 1:
        say(f"the first of {place.starts}, waiting for the others at port {place.port}")
    with contextlib.redirect_stdout(io.StringIO()):
        decided = agree(place, mine, lambda starts: prepare(config, data, run, settings, place, starts))
    if decided["finished"]:
        say(f"{run} is trained already")
        return 0
    training = [
        *("--config-dir", str(config.parent), "--config-name", config.stem),
        *(f"hydra.run.dir={quoted(run / 'hydra')}", *decided["overrides"]),
    ]
    # In place of this process, so that a signal reaches the training.
    if decided["workers"] == 1:
        os.execvp("fairseq-hydra-train", ["fairseq-hydra-train", *training])
    if not place.gpu:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, own_cores() // place.workers)))
    launch = [str(place.starts), str(place.rank), str(place.workers), place.address, str(place.port)]
    launch.append("" if place.device is None else str(place.device))
    os.execv(sys.executable, [sys.executable, str(HERE / "launch.py"), *launch, *training])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main(sys.argv[1:]))
