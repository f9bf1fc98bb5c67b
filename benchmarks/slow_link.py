"""Ranks in two network namespaces of one machine, with a slow link between them.

    sudo .venv/bin/python -m benchmarks.slow_link --ranks 4 -- benchmarks.ranks --device cpu \\
        --dtype float32 --rows 512 --channels 128

needs Linux, root and the command ``ip``. The namespaces stand for two machines: ``torchrun`` runs
in both, each with half of the ranks. The link is a pair of tun devices. This process takes every
packet from one of them, and writes it to the other after the time that a link of ``--mbit`` needs
for it and the packets before it, plus ``--ms``.
"""

import argparse
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable

from benchmarks.results import positive
from pn_fairseq.common import command

#: From <linux/if_tun.h>.
TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000

#: The namespaces of this process; each has a device of the same name.
NAMES = tuple(f"pn{os.getpid()}-{node}" for node in (0, 1))
ADDRESSES = ("10.99.0.1", "10.99.0.2")


def relay(ends: tuple[int, int], mbit: float, ms: float, running: Callable[[], bool]) -> None:
    """Pass packets between two file descriptors, in both directions, while ``running()``."""
    packets = {end: deque() for end in ends}
    free = dict.fromkeys(ends, 0.0)
    while running():
        now = time.monotonic()
        for end, other in (ends, ends[::-1]):
            while packets[end] and packets[end][0][0] <= now:
                os.write(other, packets[end].popleft()[1])
        due = min([queue[0][0] for queue in packets.values() if queue], default=now + 0.05)
        for end in select.select(ends, [], [], max(due - time.monotonic(), 0.0))[0]:
            packet = os.read(end, 65536)
            free[end] = max(free[end], time.monotonic()) + 8e-6 * len(packet) / mbit
            packets[end].append((free[end] + 1e-3 * ms, packet))


def open_end(name: str, address: str) -> int:
    """A tun device in a namespace; the kernel removes it when the file descriptor is closed."""
    try:
        end = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
        for words in (
            f"netns add {name}",
            f"link set {name} netns {name}",
            f"-n {name} address add {address}/24 dev {name}",
            f"-n {name} link set lo up",
            f"-n {name} link set {name} up",
        ):
            subprocess.run(["ip", *words.split()], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise command.UserError(f"{error}: this needs Linux, root and the command ip") from error
    return end


def start(node: int, ranks: int, module: list[str]) -> subprocess.Popen:
    """torchrun in a namespace."""
    rendezvous = f"--nnodes 2 --node-rank {node} --master-addr {ADDRESSES[0]} --master-port 29500"
    torchrun = f"torch.distributed.run {rendezvous} --nproc-per-node {ranks // 2} -m"
    words = ["ip", "netns", "exec", NAMES[node], sys.executable, "-m", *torchrun.split(), *module]
    return subprocess.Popen(words, env={**os.environ, "GLOO_SOCKET_IFNAME": NAMES[node]})


def _running(nodes: list[subprocess.Popen]) -> bool:
    """Whether a node still runs and none has failed."""
    codes = [node.poll() for node in nodes]
    return None in codes and not any(codes)


def main(argv=None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="benchmarks.slow_link", description=__doc__, formatter_class=formatter
    )
    parser.add_argument("--ranks", type=positive, default=2, help="an even number (default: 2)")
    parser.add_argument(
        "--mbit", type=positive, default=100, help="Mbit/s in each direction (default: 100)"
    )
    parser.add_argument("--ms", type=float, default=1.0, help="delay of each packet (default: 1)")
    parser.add_argument("module", nargs="+", help="the module to run, and its arguments")
    args = parser.parse_args(argv)
    if args.ranks % 2:
        raise command.UserError(f"--ranks {args.ranks} is not even")
    nodes: list[subprocess.Popen] = []
    try:
        ends = tuple(open_end(*end) for end in zip(NAMES, ADDRESSES, strict=True))
        nodes += [start(node, args.ranks, args.module) for node in (0, 1)]
        # a packet does not wait for a processor
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        relay(ends, args.mbit, args.ms, lambda: _running(nodes))
    finally:
        for node in nodes:
            node.terminate()
            node.wait()
        for name in NAMES:
            if os.path.exists(f"/run/netns/{name}"):
                subprocess.run(["ip", "netns", "delete", name])
    return max(abs(node.returncode) for node in nodes)


if __name__ == "__main__":
    sys.exit(command.run("benchmarks.slow_link", main))
