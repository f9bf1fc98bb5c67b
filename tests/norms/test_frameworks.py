"""convert_norms in models of other packages."""

import pytest

from docs.tools.frameworks import CASES, Absent, errors


@pytest.mark.parametrize("norm", ["batch", "power"])
@pytest.mark.parametrize("name", CASES)
def test_framework(name, norm):
    try:
        statistics, effect = errors(CASES[name], norm)
    except Absent as absent:
        pytest.skip(str(absent))
    assert statistics < 1e-5
    assert effect < 1e-4
