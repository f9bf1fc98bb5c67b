"""A training step asks the device for no value, so a GPU never has to catch up with the host."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pn_fairseq.norms import NORMS, build_norm

CHANNELS = 8
#: What reads a value back, or has a result whose size depends on values.
READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal")


class Record(TorchDispatchMode):
    """Notes the operations of a block that would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in READS:
            self.reads.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_record_notices_what_it_is_for():
    with Record() as record:
        if torch.ones(()) > 0:
            float(torch.ones(3).masked_select(torch.tensor([True, False, True])).sum())
    assert len(record.reads) == 3


@pytest.mark.parametrize("told", [True, False], ids=["told updates", "counting itself"])
@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize(
    ("name", "variant"), [(name, variant) for name, entry in NORMS.items() for variant in ("paper", *entry.variants)]
)
def test_no_value_is_read_in_a_training_step(name, variant, masked, told):
    options = {"renorm_updates": 4, "fade_updates": 3, "outlier_filtration": True}
    norm = build_norm(name, CHANNELS, layer_scale_groups=2, psi_warmup_updates=2, variant=variant, **options)
    x = torch.randn(6, 4, CHANNELS)
    mask = torch.arange(6) >= torch.tensor([6, 4, 5, 1])[:, None] if masked else None
    with Record() as record:
        for step in range(4):  # in the warm-up and after it
            if told:
                norm.set_num_updates(step)
            # A fault, too: what to do with it is decided where the numbers are.
            inputs = (x * float("inf") if step == 3 else x).requires_grad_()
            norm(inputs, mask).backward(torch.ones_like(x))
    assert record.reads == []
