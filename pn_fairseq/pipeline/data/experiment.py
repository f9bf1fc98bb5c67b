"""What ``pn reproduce`` trains on a corpus; a recipe states it as REPRODUCE."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pn_fairseq.pipeline.published import Table


@dataclass(frozen=True)
class Experiment:
    """The models of a corpus, and the steps for each."""

    config: str  # the name of a configuration, or the path of one
    size: str  # the architectures are MODEL_NORM_SIZE
    seeds: tuple[int, ...] = (1, 2, 3)
    models: tuple[str, ...] = ("transformer",)
    norms: tuple[str, ...] = ("ln", "bn", "pnv", "pn")
    subsets: tuple[str, ...] = ("test",)  # to decode; the report is about the first

    def __post_init__(self):
        if not self.config:
            raise ValueError("an Experiment needs a configuration, which is ''")

    @property
    def steps(self) -> list[list[str]]:
        """The commands, one after the other for each run: verb and options."""
        commands = [["train"], ["average"]]
        if "transformer" not in self.models:
            return [*commands, ["evaluate-lm"]]
        for subset in self.subsets:
            options = [] if subset == "test" else ["--subset", subset]
            commands += [["generate", *options], ["score", *options]]
        return commands

    @property
    def tables(self) -> dict[str, Table]:
        """The published tables of the corpus."""
        # imported here, because it takes longer than a help text may
        from pn_fairseq.pipeline.published import LM_TABLES, PAPER

        stem = Path(self.config).stem
        tables = {**PAPER, **LM_TABLES}
        return {name: table for name, table in tables.items() if table.config.startswith(stem)}
