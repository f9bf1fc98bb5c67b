"""``pn info``: the version, which kernels compute on which device and why, and the patches of fairseq."""

from __future__ import annotations

import importlib.util

from pn_fairseq import __version__
from pn_fairseq.common.command import ArgumentParser
from pn_fairseq.common.environment import SWITCH, patches_enabled
from pn_fairseq.common.files import PACKAGE, configs_folder


def info() -> str:
    """What someone needs to know about this installation."""
    import torch

    from pn_fairseq import fairseq_patches, kernels

    fairseq = "" if importlib.util.find_spec("fairseq") else " (fairseq is not installed; the norms do without)"
    lines = [
        f"pn_fairseq {__version__}, torch {torch.__version__}{fairseq}",
        f"folder for --user-dir: {PACKAGE}",
        f"configurations: {configs_folder()}",
    ]
    lines += [f"kernels on {device}: {name} ({why})" for device, (name, why) in kernels.describe().items()]
    state = "on" if patches_enabled() else "off"
    lines.append(f"patches of fairseq: {state} ({SWITCH}=1 turns them off)")
    lines += [f"  {name}: {mends}" for name, mends in fairseq_patches.patches().items()]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    description = "Print the version, the kernels in use on each device, and the patches of fairseq."
    ArgumentParser(prog="pn info", description=description).parse_args(argv)
    print(info())
