"""``pn norms [NAME]``: the norms, and the options of one of them with their defaults."""

from __future__ import annotations

import inspect

from pn_fairseq.common.command import ArgumentParser, UserError, split_paths
from pn_fairseq.norms.registry import (
    NORMS,
    SHARED,
    FromRun,
    default_of,
    description_of,
    find_norm,
    load_norms,
)

EPILOG = """The options of a norm are set by --norm-options KEY=VALUE[,KEY=VALUE] of fairseq-train,
and by model.norm_options.KEY=VALUE of pn train and fairseq-hydra-train. --encoder-norm-placement
and --decoder-norm-placement set where the norms are placed, and --qk-norm adds norms to attention
(docs/placements.md)."""


def describe_norm(name: str) -> str:
    """The options and flags of the norm ``name``, one per line, with the defaults in a transformer.

    Raises:
        ValueError: no norm has that name.
    """
    entry = find_norm(name)
    flags = [option for option in SHARED if option in entry.options]
    own = {}  # an option and its default -> what it means
    for option in entry.own_options:
        own[f"{option}={_default(entry, option)}"] = description_of(entry.cls, option)
    shared = {}
    for option in flags:
        shared[f"{SHARED[option]} {_default(entry, option)}"] = description_of(entry.cls, option)
    width = max(map(len, [*own, *shared]))
    lines = [f"{name}: {entry.title} ({entry.label})", ""]
    lines.append("--norm-options:" if own else "--norm-options: none")
    lines += _table(own, width)
    lines += ["", "flags:", *_table(shared, width)]
    for variant, cls in entry.variants.items():
        changed = []
        for option in (*entry.own_options, *flags):
            default = entry.default(option, variant)
            if default != entry.default(option):
                changed.append(f"{option}={default}")
        differs = f", defaults {', '.join(changed)}" if changed else ""
        lines += ["", f"--norm-variant {variant}: {cls.__name__}{differs}"]
    return "\n".join(lines)


def _table(rows: dict[str, str], width: int) -> list[str]:
    return [f"  {row:{width}}  {text}".rstrip() for row, text in rows.items()]


def _default(entry, option: str) -> object:
    """The default of an option or a flag in a transformer, for the table."""
    default = entry.default(option)
    if isinstance(default, FromRun):
        if default.source == "updates":  # the constructor's default if a run has no last update
            return f"{default.words}, else {default_of(entry.cls, option)}"
        return default.words
    if option == "sync":
        return "on" if default else "off"
    return "VALUE (needed)" if default is inspect.Parameter.empty else default


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="pn norms", description="List the norms, or the options of one.", epilog=EPILOG
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a norm")
    parser.add_argument(
        "--norm-module", metavar="FILE[,FILE]", help="Python files that register norms of your own"
    )
    args = parser.parse_args(argv)
    try:
        if args.norm_module is not None:
            for path in split_paths(args.norm_module):
                load_norms(path)
        if args.name is not None:
            print(describe_norm(args.name))
            return 0
    except ValueError as error:
        raise UserError(str(error)) from error
    width = max(map(len, NORMS))
    for name, entry in NORMS.items():
        print(f"{name:{width}}  {entry.title} ({entry.label})")
    print("\npn norms NAME lists the options of a norm.")
    return 0
