"""The fairseq model ``transformer_pn`` and its architectures, registered on import."""

from pn_fairseq.models import architectures, transformer_pn

__all__ = ["architectures", "transformer_pn"]
