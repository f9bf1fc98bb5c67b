"""The computed parts of the documentation are what is computed now."""

import pytest

from docs.tools import figures, generated

from .pages import ROOT

COMMANDS = {"python -m docs.tools.generated": generated.TABLES, "python -m docs.tools.figures": figures.PAGES}


@pytest.mark.parametrize(
    ("command", "page", "name"),
    [
        pytest.param(command, page, name, marks=pytest.mark.slow if name == "compiled" else ())
        for command, pages in COMMANDS.items()
        for page, parts in pages.items()
        for name in parts
    ],
)
def test_part_is_up_to_date(command, page, name):
    found = generated.block(name).findall((ROOT / "docs" / page).read_text("utf-8"))
    assert found == [COMMANDS[command][page][name]()], f"docs/{page} differs: {command} writes it again"
