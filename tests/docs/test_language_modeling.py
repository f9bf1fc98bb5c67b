import re

from .pages import ROOT


def test_demonstration_of_the_leak(capsys):
    page = (ROOT / "docs/language_modeling.md").read_text("utf-8")
    code, printed = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", page, re.S).groups()
    exec(code, {})
    assert capsys.readouterr().out == printed
