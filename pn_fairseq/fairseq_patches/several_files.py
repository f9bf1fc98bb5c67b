"""Several training or validation sets in one folder (``train``, ``train1``, ...;
``--combine-valid-subsets``) load.

fairseq repeats the first set ``--upsample-primary`` times, by default -1 times, and fails.
"""

from fairseq.data import ConcatDataset

from pn_fairseq.fairseq_patches import patch


@patch(ConcatDataset, "__init__", "self datasets sample_ratios")
def init(original, dataset, datasets, sample_ratios=1):
    if not isinstance(sample_ratios, int):
        sample_ratios = [1 if ratio == -1 else ratio for ratio in sample_ratios]
    return original(dataset, datasets, sample_ratios)
