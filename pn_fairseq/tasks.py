"""Tasks for fairseq, registered on import."""

import numpy as np
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask


@register_task("translation_random_batches", dataclass=TranslationConfig)
class TranslationRandomBatches(TranslationTask):
    """Translation whose training batches hold random sentences.

    fairseq fills a batch with sentences of similar length, so a batch holds little padding, but
    sentences of one length only. Here the sentences of a training batch are drawn at random, with
    the seed ``common.seed`` and once for all epochs. ``dataset.max_tokens`` counts padding, as in
    fairseq. Validation and test batches are fairseq's.
    """

    def load_dataset(self, split, epoch=1, combine=False, **kwargs):
        super().load_dataset(split, epoch, combine, **kwargs)
        if split == self.cfg.train_subset:
            dataset = self.datasets[split]
            dataset.ordered_indices = lambda: np.random.permutation(len(dataset))
