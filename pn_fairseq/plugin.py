"""The plugin: registers models, architectures and tasks in fairseq, and applies the patches of fairseq.

``--user-dir`` imports it, and so does everything of the pipeline that builds a model.
"""

from pn_fairseq import fairseq_patches, models, tasks

fairseq_patches.apply()

__all__ = ["models", "tasks"]
