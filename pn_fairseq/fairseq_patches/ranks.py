"""Several ranks on CPUs: ``--distributed-world-size``, ``torchrun`` and ``--ddp-backend pytorch_ddp`` work.

fairseq starts as many ranks as there are GPUs: on a CPU it ends with exit code 0 and has done nothing. Under torchrun
it divides by the number of GPUs or, without ``--distributed-world-size``, lets every rank train alone and overwrite the
checkpoints of the others. It passes a device number to torch's DistributedDataParallel, which refuses it for a model on
the CPU.
"""

import os
from unittest import mock

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.models import distributed_fairseq_model
from torch.multiprocessing import ProcessExitedException
from torch.nn.parallel import DistributedDataParallel

from pn_fairseq.common.environment import patches_enabled
from pn_fairseq.fairseq_patches import patch


def launched_ranks() -> int:
    """The number of ranks that torchrun has started; 1 without torchrun."""
    launched = os.environ.keys() >= {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"}
    return int(os.environ["WORLD_SIZE"]) if launched else 1


@patch(distributed_utils, "call_main", "cfg main kwargs")
def call_main(original, cfg, main, **kwargs):
    """Every command of fairseq but generation calls this, to start its ranks."""
    settings, launched = cfg.distributed_training, launched_ranks()
    if launched > 1 and settings.distributed_init_method is None:
        settings.distributed_world_size = launched
    if settings.distributed_world_size == 1 or not (cfg.common.cpu or not torch.cuda.is_available()):
        return original(cfg, main, **kwargs)
    if settings.distributed_backend == "nccl":
        settings.distributed_backend = "gloo"
    devices = 1 if launched > 1 else settings.distributed_world_size
    with mock.patch.object(torch.cuda, "device_count", lambda: devices):
        if settings.distributed_init_method is None:
            distributed_utils.infer_init_method(settings)
        if not settings.distributed_no_spawn:
            try:
                return original(cfg, main, **kwargs)
            except ProcessExitedException as error:  # the rank has said why
                raise SystemExit(error.exit_code) from error
    return original(cfg, main, **kwargs)


def distributed_data_parallel(module, device_ids=None, output_device=None, **options) -> DistributedDataParallel:
    """torch's DistributedDataParallel, without device numbers for a module on the CPU."""
    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        device_ids = output_device = None
    return DistributedDataParallel(module, device_ids=device_ids, output_device=output_device, **options)


if patches_enabled():
    distributed_fairseq_model.DistributedDataParallel = distributed_data_parallel
