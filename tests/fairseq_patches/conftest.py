"""fairseq-train in this process, for two updates of a tiny model."""

import sys

import fairseq_cli.train
import pytest

from pn_fairseq.common.checkpoints import load_checkpoint

from ..models.helpers import both_sides, write_data
from ..scripts_helpers import ROOT

SIZES = both_sides(embed_dim=16, ffn_embed_dim=16, layers=2, attention_heads=2)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Run fairseq-train with the given flags; returns the checkpoint that it leaves."""
    data = write_data(tmp_path / "data")

    def run(arch: str, *flags: str) -> dict:
        given = f"{data} --user-dir {ROOT / 'pn_fairseq'} --save-dir {tmp_path / 'run'} --cpu"
        given += (
            f" --optimizer adam --lr 0.01 --max-update 2 --max-tokens 30 --no-epoch-checkpoints "
            f"--arch {arch}"
        )
        # torch waits 5 seconds for the worker of a batch that is not fetched
        given += " --num-workers 0"
        sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
        monkeypatch.setattr(sys, "argv", ["fairseq-train", *given.split(), *sizes, *flags])
        fairseq_cli.train.cli_main()
        return load_checkpoint(tmp_path / "run/checkpoint_last.pt")

    return run
