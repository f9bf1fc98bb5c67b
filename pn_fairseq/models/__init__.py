"""The fairseq model ``transformer_pn`` and its architectures, registered on import."""

from pn_fairseq.checkpoints import allow_fairseq_checkpoints
from pn_fairseq.models import architectures, ddp_on_cpu, fairseq_hooks, resumption, transformer_pn

allow_fairseq_checkpoints()

__all__ = ["architectures", "ddp_on_cpu", "fairseq_hooks", "resumption", "transformer_pn"]
