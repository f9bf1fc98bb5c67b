"""The conventions of ``pn_fairseq.cli``, for tools that must start at once.

``import pn_fairseq`` imports torch, which takes more than a second; ``pn_fairseq/cli/__init__.py`` itself needs the
standard library alone, so it is loaded by its path.
"""

import importlib.util
from pathlib import Path

_path = Path(__file__).resolve().parents[2] / "pn_fairseq/cli/__init__.py"
_spec = importlib.util.spec_from_file_location("pn_fairseq_cli", _path)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

ArgumentParser = _module.ArgumentParser
UserError = _module.UserError
command = _module.command
