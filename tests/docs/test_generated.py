"""The computed tables of the documentation are what is computed now."""

import pytest

from docs.tools.generated import COMMAND, TABLES, block

from .pages import ROOT


@pytest.mark.parametrize(("page", "name"), [(page, name) for page, tables in TABLES.items() for name in tables])
def test_table_is_up_to_date(page, name):
    found = block(page, name).findall((ROOT / "docs" / page).read_text("utf-8"))
    assert found == [TABLES[page][name]()], f"docs/{page} differs: {COMMAND} writes it anew"
