"""Code that reads from top to bottom: no comprehension within a comprehension, no walrus in one,
no conditional expression within another, and `# fmt: skip` only for tables of numbers.
"""

import ast

from .scripts_helpers import ROOT

FOLDERS = ("pn_fairseq", "tests", "examples", "benchmarks", "docs", "scripts")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def has_inner(node: ast.AST, kinds: tuple) -> bool:
    return any(isinstance(part, kinds) for part in ast.walk(node) if part is not node)


def offences(source: str) -> int:
    lines = source.splitlines()
    tree = ast.parse(source)
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            count += has_inner(node, (*COMPREHENSIONS, ast.NamedExpr))
        if isinstance(node, ast.IfExp):
            count += has_inner(node, (ast.IfExp,))
        if isinstance(node, ast.stmt) and lines[node.end_lineno - 1].endswith("# fmt: skip"):
            # A table of numbers calls nothing and names nothing.
            count += has_inner(node, (ast.Call, ast.Attribute))
    return count


def test_no_file_has_dense_code():
    files = [ROOT / "setup.py"]
    for folder in FOLDERS:
        files += sorted((ROOT / folder).rglob("*.py"))
    found = {}
    for file in files:
        count = offences(file.read_text("utf-8"))
        if count:
            found[str(file.relative_to(ROOT))] = count
    assert found == {}


def test_each_offence_is_counted():
    assert offences("a = [[c for c in b] for b in d]") == 1
    assert offences("a = [c for b in d if (c := b)]") == 1
    assert offences("if a := b:\n    c = [d for d in a]") == 0
    assert offences("a = b if c else d if e else f") == 1
    assert offences("a = b if c else d") == 0
    assert offences("a = f(b,  c)  # fmt: skip") == 1
    assert offences("a = (1,  2)  # fmt: skip") == 0
