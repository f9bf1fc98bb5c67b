"""Run the workers of this machine under torchrun.

launch.py STARTS RANK WORKERS ADDRESS PORT DEVICE ARGUMENTS_OF_FAIRSEQ_HYDRA_TRAIN...

torchrun stops all workers when one of them dies or when it gets a signal. Exit code: 0; 1 if a worker failed; 128 and
the number of the signal that ended it.
"""

import os
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, run


def complain(text: str) -> None:
    print(f"train.sh: error: {text}", file=sys.stderr, flush=True)


def main(starts: str, rank: str, workers: str, address: str, port: str, device: str, *training: str) -> int:
    where = ["--standalone"]
    if int(starts) > 1:
        where = ["--nnodes", starts, "--node-rank", rank, "--master-addr", address, "--master-port", port]
    os.environ["PN_LAUNCHER"] = str(os.getpid())
    os.environ["PN_DEVICE"] = device
    worker = str(Path(__file__).resolve().parent / "worker.py")
    arguments = get_args_parser().parse_args([*where, "--nproc-per-node", workers, worker, *training])
    try:
        run(arguments)
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        how = f"was ended by {signal.Signals(-failure.exitcode).name}" if failure.exitcode < 0 else "failed"
        complain(
            f"worker {number} {how}, and all were stopped; what it said is above. The same command goes on from the "
            "last checkpoint"
        )
        return 1
    except SignalException as error:
        complain(f"ended by {error.sigval.name}; the same command goes on from the last checkpoint")
        return 128 + error.sigval
    except KeyboardInterrupt:
        complain("ended by SIGINT; the same command goes on from the last checkpoint")
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
