"""The filters of pyproject.toml hide warnings of other packages, and none of this project."""

import ast
import re
import tomllib

from .scripts_helpers import ROOT


def texts_of_warnings() -> set[str]:
    """The strings of each file that warns, which has the beginning of every warning among them."""
    texts = set()
    for path in (ROOT / "pn_fairseq").rglob("*.py"):
        source = path.read_text("utf-8")
        if "warnings.warn(" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    return texts


def test_no_filter_hides_a_warning_of_this_project():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    texts = texts_of_warnings()
    assert any(text.startswith("convert_norms leaves some norms as they are") for text in texts)
    for line in settings["tool"]["pytest"]["ini_options"]["filterwarnings"]:
        action, message, *_ = line.split(":")
        assert action == "ignore"
        assert len(message) > 10
        hidden = [text for text in texts if re.match(message, text)]
        assert not hidden, line
