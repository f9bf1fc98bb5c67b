"""``--sample-break-mode eos``, language models' generation and ``--num-batch-buckets`` work with NumPy 2.

It has no ``np.compat.long``.
"""

from types import ModuleType, SimpleNamespace

import numpy
from fairseq.data import language_pair_dataset, token_block_dataset

from pn_fairseq.common.environment import patches_enabled


class Numpy1(ModuleType):
    """NumPy with ``compat.long``, for the two modules of fairseq that ask for it."""

    compat = SimpleNamespace(long=int)

    def __getattr__(self, name):
        return getattr(numpy, name)


if patches_enabled() and not hasattr(getattr(numpy, "compat", None), "long"):
    language_pair_dataset.np = token_block_dataset.np = Numpy1("numpy")
