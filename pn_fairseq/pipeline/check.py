"""``pn check``: the kernels that this machine can run, compared with plain PyTorch."""

from __future__ import annotations

from pn_fairseq.common.command import ArgumentParser


def main(argv: list[str]) -> int:
    description = "Compare the kernels that this machine can run with plain PyTorch; exit code 1 if one is wrong."
    ArgumentParser(prog="pn check", description=description).parse_args(argv)

    import pn_fairseq.norms  # noqa: F401 (defines operators)
    from pn_fairseq.kernels.check import check

    table, fine = check()
    print(table)
    return 0 if fine else 1
