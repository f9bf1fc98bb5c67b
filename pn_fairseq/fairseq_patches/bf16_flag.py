"""``--bf16`` and ``--memory-efficient-bf16`` work on GPUs and CPUs (fairseq issue 4696).

On the command line fairseq takes them for TPUs only, and fails where torch_xla is not installed. Under hydra,
``common.bf16=true`` works without this patch.
"""

import importlib.util

from fairseq import options

from pn_fairseq.fairseq_patches import patch


@patch(options, "parse_args_and_arch", "parser input_args parse_known suppress_defaults modify_parser")
def parse_args_and_arch(original, *args, **kwargs):
    parsed = original(*args, **kwargs)
    settings = parsed[0] if isinstance(parsed, tuple) else parsed
    if getattr(settings, "bf16", False) and importlib.util.find_spec("torch_xla") is None:
        settings.tpu = False
    return parsed
