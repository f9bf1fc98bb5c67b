"""The plugin: registers the models and their architectures in fairseq, and applies the patches of fairseq.

``--user-dir`` imports it, and so does everything of the pipeline that builds a model.
"""

from pn_fairseq import fairseq_patches, models

fairseq_patches.apply()

__all__ = ["models"]
