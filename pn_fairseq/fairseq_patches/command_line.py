"""``--help`` lists the architectures and, with ``--arch``, the model's flags; ``--bf16`` works
without a TPU.

fairseq's help lists no architecture, and is printed before the flags of the model that ``--arch``
names are added. fairseq answers a typo in ``--arch`` with all architectures, and accepts ``--bf16``
only on TPUs (fairseq issue 4696).
"""

import importlib.util
import sys
from argparse import ArgumentParser, ArgumentTypeError

from fairseq import options
from fairseq.models import ARCH_MODEL_REGISTRY

from pn_fairseq.common.command import did_you_mean
from pn_fairseq.fairseq_patches import patch
from pn_fairseq.fairseq_patches.convert_norms import add_flags
from pn_fairseq.norms import NORMS


def architecture(name: str) -> str:
    if name not in ARCH_MODEL_REGISTRY:
        raise ArgumentTypeError(
            f"unknown architecture {name!r}{did_you_mean(name, ARCH_MODEL_REGISTRY)}"
        )
    return name


@patch(options, "add_model_args", "parser")
def add_model_args(original, parser):
    group = original(parser)
    arch = next(action for action in group._group_actions if action.dest == "arch")
    norms = ", ".join(f"transformer_{entry.short}_* ({name})" for name, entry in NORMS.items())
    arch.type = architecture
    arch.help += f"; of pn_fairseq, by norm: {norms}; * is tiny, iwslt or wmt_en_de_big; "
    arch.help += "with '--arch ARCH --help' the help ends with the flags of the model"
    add_flags(group)
    return group


@patch(
    options, "parse_args_and_arch", "parser input_args parse_known suppress_defaults modify_parser"
)
def parse_args_and_arch(original, parser, input_args=None, *args, **kwargs):
    arguments = sys.argv[1:] if input_args is None else input_args
    if not {"-h", "--help"}.isdisjoint(arguments):
        finder = ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--arch", "-a")
        model = ARCH_MODEL_REGISTRY.get(finder.parse_known_args(arguments)[0].arch)
        if model is not None:
            model.add_args(parser.add_argument_group("Model-specific configuration"))
    parsed = original(parser, input_args, *args, **kwargs)
    settings = parsed[0] if isinstance(parsed, tuple) else parsed
    if getattr(settings, "bf16", False) and importlib.util.find_spec("torch_xla") is None:
        settings.tpu = False  # fairseq sets it with --bf16 (its issue 4696)
    return parsed
