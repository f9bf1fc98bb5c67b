"""The conventions of the command-line tools, under the name that the steps here use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pn_fairseq.pipeline.command import ArgumentParser, UserError, command  # noqa: E402, F401
