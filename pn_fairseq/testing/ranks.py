"""Processes that train together on the CPU, with gloo."""

import multiprocessing
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pn_fairseq.norms import load_norms


def run_ranks(work: Callable, world: int, *arguments, norm_modules: tuple[str, ...] = ()) -> list:
    """Run ``work(rank, world, *arguments)`` in ``world`` processes of one process group; return
    their results.

    ``norm_modules`` are files of norms that the processes load first
    (:func:`pn_fairseq.norms.load_norms`).
    """
    # A server that has imported torch forks the processes: each would need seconds to import it.
    multiprocessing.set_forkserver_preload([work.__module__])
    with tempfile.TemporaryDirectory() as folder:
        arguments = (work, world, folder, norm_modules, arguments)
        mp.start_processes(_start, args=arguments, nprocs=world, start_method="forkserver")
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world)]


def _start(rank: int, work: Callable, world: int, folder: str, norm_modules, arguments) -> None:
    torch.set_num_threads(1)
    for path in norm_modules:
        load_norms(path)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    try:
        torch.save(work(rank, world, *arguments), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()
