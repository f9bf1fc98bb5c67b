"""Files of all rooms."""

from pathlib import Path

import pytest

from pn_fairseq.common.files import short_names


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/a/run", "/b/run2"], ["run", "run2"]),
        (["/a/run", "/b/run"], ["a/run", "b/run"]),
        (["/run/x", "/a/run/x"], ["/run/x", "a/run/x"]),
    ],
)
def test_short_names_tell_paths_apart(paths, names):
    assert short_names([Path(path) for path in paths]) == names
