"""One data-parallel worker, as launch.py starts it: fairseq-hydra-train, told its rank and its GPU."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if sys.platform == "linux":
    # A worker in a collective call waits for the others for ever: it is not to outlive its launcher, however that ends.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["PN_LAUNCHER"]):
        sys.exit("worker.py: its launcher is gone")

rank = int(os.environ["RANK"])
device = os.environ["PN_DEVICE"] or os.environ["LOCAL_RANK"]
sys.argv[1:] = [
    *sys.argv[1:],
    f"distributed_training.distributed_rank={rank}",
    f"distributed_training.device_id={device}",
]
if rank:
    # The first worker writes them.
    sys.argv.append("hydra.output_subdir=null")

from fairseq_cli.hydra_train import cli_main  # noqa: E402 (not before the signal is set)

cli_main()
