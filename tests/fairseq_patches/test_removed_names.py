"""The installed fairseq uses no name that the pinned NumPy or torch has removed, once it is
patched.
"""

import ast
import importlib
import inspect
import sys
from pathlib import Path

import fairseq
import pytest

import pn_fairseq.models  # noqa: F401 (applies the patches)

#: File -> the removed names that remain in it, each for a reason.
KNOWN = {
    # Pipeline parallelism, which torch gave up and this project does not have; imported where it is
    # asked for.
    "fairseq/model_parallel/models/pipeline_parallel_transformer/model.py": {
        "torch.distributed.pipeline.sync.Pipe",
        "torch.distributed.pipeline.sync.utils.partition_model",
    }
}
LIBRARIES = ("numpy", "torch")


def imported(dotted: str):
    """The module or the member of a module with this name.

    Raises:
        ImportError, AttributeError: it does not exist.
    """
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        if not dotted.startswith(error.name):
            raise  # a package that is not installed
        parent, _, name = dotted.rpartition(".")
        return getattr(imported(parent), name)


def removed_names(file: Path, module: str) -> set[str]:
    """The names and keyword arguments of NumPy and torch in ``file`` that do not exist.

    What a patch has put into the module counts as its ``np`` or ``torch``.
    """
    removed = set()
    meaning = {}
    tree = ast.parse(file.read_text("utf-8"))

    def value_of(dotted: str):
        try:
            return imported(dotted)
        except (ImportError, AttributeError) as error:
            if str(error.name).split(".")[0] in LIBRARIES or isinstance(error, AttributeError):
                removed.add(dotted)  # else it needs a package that is not installed

    for node in ast.walk(tree):
        names = node.names if isinstance(node, ast.Import | ast.ImportFrom) else ()
        parent = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.level == 0 else ""
        for name in names:
            if f"{parent}{name.name}".split(".")[0] in LIBRARIES:
                full = f"{parent}{name.name}"
                top = name.name.split(".")[0]
                if parent or name.asname:
                    meaning[name.asname or top] = full
                else:
                    meaning[top] = top
                value_of(full)

    def evaluated(node: ast.AST):
        """Name and value of a chain of attributes such as ``np.compat.long``; None where it is
        none of a library.
        """
        if isinstance(node, ast.Name) and node.id in meaning:
            patched = getattr(sys.modules.get(module), node.id, None)
            return meaning[node.id], value_of(meaning[node.id]) if patched is None else patched
        parent = evaluated(node.value) if isinstance(node, ast.Attribute) else None
        if parent is None:
            return None
        name = f"{parent[0]}.{node.attr}"
        value = parent[1]
        is_namespace = inspect.ismodule(value) or isinstance(value, type)
        if not is_namespace and not name.startswith("numpy.compat"):
            return name, None  # of an object, such as a tensor
        if hasattr(value, node.attr):
            return name, getattr(value, node.attr)
        return name, value_of(name)

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            evaluated(node)
        if not isinstance(node, ast.Call):
            continue
        function_name, function = evaluated(node.func) or ("", None)
        if not callable(function):
            continue
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:  # of C code
            continue
        known = {parameter.name for parameter in parameters}
        if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters):
            given = {keyword.arg for keyword in node.keywords if keyword.arg}
            removed |= {f"{function_name}({name}=)" for name in given - known}
    return removed


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_fairseq_uses_no_removed_name():
    packages = Path(fairseq.__file__).parent.parent
    remaining = {}
    for file in [*packages.glob("fairseq/**/*.py"), *packages.glob("fairseq_cli/*.py")]:
        path = file.relative_to(packages)
        if path.parts[1] != "examples":
            names = removed_names(file, ".".join(path.with_suffix("").parts))
            if names:
                remaining[path.as_posix()] = names
    assert remaining == KNOWN


def test_a_removed_name_is_found(tmp_path):
    file = tmp_path / "old.py"
    file.write_text(
        "import numpy as np, torch\nfrom torch.nn import Linear, Gone\nnp.compat.long; "
        "np.float(1); Linear.forward"
        "\nnp.percentile([1], 2, interpolation='lower'); Linear.no; torch.ones(2).no\n"
    )
    found = removed_names(file, "old") - {"numpy.compat.long"}
    assert found == {
        "torch.nn.Gone",
        "numpy.compat",
        "numpy.float",
        "numpy.percentile(interpolation=)",
        "torch.nn.Linear.no",
    }
