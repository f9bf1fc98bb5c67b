"""``pn info``: version, kernels and patches of this installation.

``pn check``: are the kernels of this installation correct?
"""

from __future__ import annotations

import importlib.util

from pn_fairseq import __version__
from pn_fairseq.common.command import ArgumentParser
from pn_fairseq.common.files import CONFIGS, PACKAGE
from pn_fairseq.fairseq_patches import SWITCH, patches, patches_enabled


def main(argv: list[str]) -> None:
    description = (
        "Print the version, the kernels in use on each device, and the patches of fairseq."
    )
    ArgumentParser(prog="pn info", description=description).parse_args(argv)

    import torch

    from pn_fairseq import kernels

    fairseq = (
        ""
        if importlib.util.find_spec("fairseq")
        else " (fairseq is not installed; the norms do without)"
    )
    print(f"pn_fairseq {__version__}, torch {torch.__version__}{fairseq}")
    print(f"folder for --user-dir: {PACKAGE}\nconfigurations: {CONFIGS}")
    for device, (name, why) in kernels.describe().items():
        print(f"kernels on {device}: {name} ({why})")
    print(f"patches of fairseq: {'on' if patches_enabled() else 'off'} ({SWITCH}=1 turns them off)")
    for name, mends in patches().items():
        print(f"  {name}: {mends}")


def check(argv: list[str]) -> int:
    description = (
        "Compare the kernels that this machine can run with plain PyTorch; exit code 1 if one is "
        "wrong."
    )
    ArgumentParser(prog="pn check", description=description).parse_args(argv)

    from pn_fairseq.kernels.check import check

    table, fine = check()
    print(table)
    return 0 if fine else 1
