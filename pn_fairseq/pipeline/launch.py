"""The ranks of a training run: their number, which one this process is, and torchrun, which starts
them.

``pn train`` starts torchrun itself, on several machines with the options in torchrun's variables
``PET_...``. Alternatively the user starts torchrun, which starts ``pn train`` as each rank
(docs/several_gpus.md).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from unittest import mock

from pn_fairseq.common.command import UserError

#: Advice after a failure of the machine.
RESUME = "run the same command again to resume"


@dataclass(frozen=True)
class RankLayout:
    """The ranks that this process launches on its machine, or the rank as which torchrun started
    it.
    """

    gpu: bool  # whether the ranks compute on GPUs
    world_size: int = 1
    # number of this process; None if it must launch the ranks, or is the only rank
    rank: int | None = None
    local_rank: int = 0  # its number on its machine, and the number of its GPU
    machines: int = 1  # a process launches ranks on each

    @property
    def ranks_per_machine(self) -> int:
        return self.world_size // self.machines


def find_layout(env: Mapping[str, str], gpus: int, ranks: int | None = None) -> RankLayout:
    """Read torchrun's environment variables, or else ``--ranks`` of this machine, with ``gpus``
    visible GPUs.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return RankLayout(
            gpus > 0, int(env["WORLD_SIZE"]), int(env["RANK"]), int(env.get("LOCAL_RANK", 0))
        )
    machines = env.get("PET_NNODES", "1")
    if not machines.isdecimal() or machines == "0":
        raise UserError(
            f"PET_NNODES={machines}: the number of machines of a training run is a whole number "
            "above 0"
        )
    return RankLayout(gpus > 0, processes(ranks, gpus) * int(machines), machines=int(machines))


def processes(ranks: int | None, gpus: int) -> int:
    """The number of processes: one per GPU, one without a GPU, or ``--ranks``."""
    count = ranks or max(1, gpus)
    if gpus and count > gpus:
        raise UserError(
            f"--ranks {count}, but {gpus} GPU{'s are' if gpus > 1 else ' is'} visible, and a GPU "
            "takes one process (CUDA_VISIBLE_DEVICES= uses the CPU)"
        )
    return count


class TrainingFailed(Exception):
    """The training ended with an error that is not the user's mistake; the text is one line."""


def torchrun(layout: RankLayout, arguments: list[str]) -> int:
    """Launch the ranks of this machine, each ``python -m pn_fairseq train ARGUMENTS``, wait, and
    return the exit code.

    torchrun stops all ranks when one of them fails or when torchrun gets a signal.

    Raises:
        TrainingFailed: a rank failed. The text names the rank, and its error or the signal that
            killed it.
        KeyboardInterrupt: a signal ended the training.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    launch = ["--nproc-per-node", str(layout.ranks_per_machine), "--module", "pn_fairseq"]
    if layout.machines == 1:
        launch.insert(0, "--standalone")
    options = get_args_parser().parse_args(launch)
    # torchrun's parser would mistake --run for one of its own options
    options.training_script_args = ["train", *arguments]
    try:
        # This process, not its ranks, writes the line about an interruption or a failure.
        with mock.patch.dict(os.environ, PN_FAIRSEQ_STEP="1", PN_FAIRSEQ_RANK="1"):
            run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode in (130, 143):
            raise KeyboardInterrupt(failure.exitcode - 128) from error
        if failure.exitcode == 2:
            return 2  # a mistake of the user, which the rank has already reported
        if failure.exitcode < 0:
            how = f"was killed by {failure.signal_name()}, and all ranks were stopped"
            raise TrainingFailed(f"rank {rank} {how}; {RESUME}") from error
        raise TrainingFailed(f"rank {rank}: {failure.message}") from error
    except SignalException as error:
        raise KeyboardInterrupt(int(error.sigval)) from error
    return 0
