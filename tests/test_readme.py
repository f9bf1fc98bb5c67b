"""What the README says about the code is true."""

import re

from pn_fairseq.norms import NORMS

from .scripts_helpers import ROOT

README = (ROOT / "README.md").read_text("utf-8")


def test_table_of_norms_is_the_registry():
    rows = re.findall(r"^\| `([a-z-]+)` \| `transformer_([a-z]+)_\*` \|", README, re.M)
    assert rows == [(name, entry.short) for name, entry in NORMS.items()]


def test_named_files_exist():
    named = set(re.findall(r"(?<![\w/])((?:scripts|configs|data|benchmarks)/[\w./-]+\w)", README)) - {
        "configs/CONFIG.yaml"
    }
    assert len(named) > 5
    for path in named:
        assert (ROOT / path).exists(), path


def test_pictures_exist():
    for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).is_file(), path


def test_the_repository_names_no_path_outside_itself():
    assert not re.search(r"(?<![\w.])(/home|/root|/tmp)/", README)
