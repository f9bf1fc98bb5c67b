"""``fairseq-train --help`` lists the architectures of this plugin, with their norms.

fairseq's help says nothing of architectures, and has no flags of models.
"""

from fairseq import options

from pn_fairseq.fairseq_patches import patch
from pn_fairseq.norms import NORMS


@patch(options, "add_model_args", "parser")
def add_model_args(original, parser):
    group = original(parser)
    arch = next(action for action in group._group_actions if action.dest == "arch")
    norms = ", ".join(f"transformer_{entry.short}_* ({name})" for name, entry in NORMS.items())
    arch.help += f"; of pn_fairseq, by norm: {norms}; * is tiny, iwslt or wmt_en_de_big"
    return group
