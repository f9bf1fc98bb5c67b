"""``--ddp-backend pytorch_ddp`` on CPUs.

fairseq hands torch's DistributedDataParallel a ``device_id`` whatever the device, which torch refuses for a model on
the CPU. Importing this module puts a function in the place where fairseq looks the class up.
"""

from fairseq.models import distributed_fairseq_model
from torch.nn.parallel import DistributedDataParallel


def distributed_data_parallel(module, device_ids=None, output_device=None, **options) -> DistributedDataParallel:
    """torch's DistributedDataParallel, without device numbers for a module on the CPU."""
    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        device_ids = output_device = None
    return DistributedDataParallel(module, device_ids=device_ids, output_device=output_device, **options)


distributed_fairseq_model.DistributedDataParallel = distributed_data_parallel
