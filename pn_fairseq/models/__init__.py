"""What ``--user-dir`` loads: the models with these norms, their architectures and tasks, and the
patches of fairseq.

Importing this package registers all of them, whether fairseq was imported before or not.
"""

from pn_fairseq import fairseq_patches, tasks

fairseq_patches.apply()

from pn_fairseq.models import architectures, tensorized_lm_pn, transformer_lm_pn, transformer_pn  # noqa: E402

__all__ = ["architectures", "tasks", "tensorized_lm_pn", "transformer_lm_pn", "transformer_pn"]
