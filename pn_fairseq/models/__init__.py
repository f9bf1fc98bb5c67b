"""The fairseq models with these norms and their architectures, registered on import."""

from pn_fairseq.models import architectures, tensorized_lm_pn, transformer_lm_pn, transformer_pn

__all__ = ["architectures", "tensorized_lm_pn", "transformer_lm_pn", "transformer_pn"]
