"""``--num-batch-buckets``, ``--sample-break-mode eos`` and language models' generation work with
NumPy 2.

fairseq uses names that NumPy has removed: ``compat.long``, ``int``, ``float`` and ``interpolation``
of ``percentile``.
"""

import builtins
from types import ModuleType, SimpleNamespace

import numpy
from fairseq.data import data_utils, language_pair_dataset, token_block_dataset
from fairseq.modules import dynamic_crf_layer


class Numpy1(ModuleType):
    """NumPy with the removed names, for the modules of fairseq that use them."""

    compat = SimpleNamespace(long=builtins.int)
    int, float = builtins.int, builtins.float

    @staticmethod
    def percentile(values, percentages, interpolation="linear"):
        return numpy.percentile(values, percentages, method=interpolation)

    def __getattr__(self, name):
        return getattr(numpy, name)


for module in (data_utils, dynamic_crf_layer, language_pair_dataset, token_block_dataset):
    module.np = Numpy1("numpy")
