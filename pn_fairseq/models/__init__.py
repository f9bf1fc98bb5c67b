"""The fairseq model ``transformer_pn`` and its architectures, registered on import."""

from pn_fairseq import fairseq_patches
from pn_fairseq.models import architectures, transformer_pn

fairseq_patches.apply()

__all__ = ["architectures", "transformer_pn"]
