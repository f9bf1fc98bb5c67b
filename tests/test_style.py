"""Code that reads from top to bottom: no comprehension within a comprehension, no walrus in one,
and `# fmt: skip` only for tables of numbers.
"""

import ast

from pn_fairseq.common.files import PACKAGE

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def offences(source: str) -> int:
    lines = source.splitlines()
    tree = ast.parse(source)
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            inner = [part for part in ast.walk(node) if part is not node]
            count += any(isinstance(part, (*COMPREHENSIONS, ast.NamedExpr)) for part in inner)
        if isinstance(node, ast.stmt) and lines[node.end_lineno - 1].endswith("# fmt: skip"):
            # A table of numbers calls nothing and names nothing.
            names = [part for part in ast.walk(node) if isinstance(part, (ast.Call, ast.Attribute))]
            count += bool(names)
    return count


def test_no_file_has_dense_code():
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        count = offences(file.read_text("utf-8"))
        if count:
            found[str(file.relative_to(PACKAGE))] = count
    assert found == {}


def test_each_offence_is_counted():
    assert offences("a = [[c for c in b] for b in d]") == 1
    assert offences("a = [c for b in d if (c := b)]") == 1
    assert offences("if a := b:\n    c = [d for d in a]") == 0
    assert offences("a = f(b,  c)  # fmt: skip") == 1
    assert offences("a = (1,  2)  # fmt: skip") == 0
