"""``fairseq-train --help`` lists the architectures of this plugin, with their norms; a typo in ``--arch`` gets advice.

fairseq's help says nothing of architectures, and has no flags of models. To a typo it answers with all architectures.
"""

from argparse import ArgumentTypeError

from fairseq import options
from fairseq.models import ARCH_MODEL_REGISTRY

from pn_fairseq.common.command import did_you_mean
from pn_fairseq.fairseq_patches import patch
from pn_fairseq.norms import NORMS


def architecture(name: str) -> str:
    if name not in ARCH_MODEL_REGISTRY:
        raise ArgumentTypeError(f"unknown architecture {name!r}{did_you_mean(name, ARCH_MODEL_REGISTRY)}")
    return name


@patch(options, "add_model_args", "parser")
def add_model_args(original, parser):
    group = original(parser)
    arch = next(action for action in group._group_actions if action.dest == "arch")
    norms = ", ".join(f"transformer_{entry.short}_* ({name})" for name, entry in NORMS.items())
    arch.type = architecture
    arch.help += f"; of pn_fairseq, by norm: {norms}; * is tiny, iwslt or wmt_en_de_big"
    return group
