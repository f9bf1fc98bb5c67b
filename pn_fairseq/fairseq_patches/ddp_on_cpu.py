"""``--ddp-backend pytorch_ddp`` works on CPUs.

fairseq passes a device number to torch's DistributedDataParallel, which refuses it for a model on the CPU.
"""

from fairseq.models import distributed_fairseq_model
from torch.nn.parallel import DistributedDataParallel

from pn_fairseq.common.environment import patches_enabled


def distributed_data_parallel(module, device_ids=None, output_device=None, **options) -> DistributedDataParallel:
    """torch's DistributedDataParallel, without device numbers for a module on the CPU."""
    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        device_ids = output_device = None
    return DistributedDataParallel(module, device_ids=device_ids, output_device=output_device, **options)


if patches_enabled():
    distributed_fairseq_model.DistributedDataParallel = distributed_data_parallel
