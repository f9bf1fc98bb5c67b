"""The two ways into the package: fairseq's --user-dir, and an ordinary import."""

import re
import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from pn_fairseq.__main__ import VERBS

from .scripts_helpers import ROOT, assert_refused, run
from .tables import rows

REGISTER = """
import sys
from argparse import Namespace
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.utils import import_user_module
import_user_module(Namespace(user_dir=sys.argv[1]))
import pn_fairseq
print(pn_fairseq.__path__[0], "transformer_pn_iwslt" in ARCH_MODEL_REGISTRY)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The project as `pip install .` installs it where there is no compiler, away from the
    checkout.
    """
    base = tmp_path_factory.mktemp("installed")
    for folder in ("pn_fairseq", "configs", "data"):
        shutil.copytree(ROOT / folder, base / "source" / folder)
    for file in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, base / "source")
    pip = "-m pip install --quiet --no-deps --no-build-isolation --no-compile".split()
    words = [sys.executable, *pip, "--target", base / "site", base / "source"]
    run(*words, CC="false", CXX="false")
    return base / "site"


def test_importing_the_package_loads_nothing_else(tmp_path):
    code = (
        "import sys; before = set(sys.modules); import pn_fairseq; print(set(sys.modules) - before)"
    )
    assert run(sys.executable, "-c", code, cwd=tmp_path).stdout == "{'pn_fairseq'}\n"


BLOCKER = """
import sys
blocked = {"fairseq", "yaml", "scipy", "sacrebleu", "matplotlib", "omegaconf", "hydra"}
blocked |= {"tensorboardX", "pandas", *sys.argv[1:]}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""
NORMS_ALONE = """
import warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
import torch
safe = torch.serialization.get_safe_globals()
from pn_fairseq.norms import NORMS, build_norm
assert torch.serialization.get_safe_globals() == safe
common = [name for name in sys.modules if name.startswith("pn_fairseq.common.")]
assert common == ["pn_fairseq.common.errors"]
x = torch.randn(5, 3, 8, requires_grad=True)
for name in NORMS:
    norm = build_norm(name, 8, layer_scale_groups=2)
    for _ in range(2):
        norm(x, torch.arange(5) > torch.tensor([[4], [2], [3]])).sum().backward()
    norm.load_state_dict(norm.eval().state_dict())
    assert norm(x).isfinite().all()
print(sorted(name for name in blocked if name in sys.modules))
"""


@pytest.mark.ci
def test_the_norms_need_torch_alone(installed, tmp_path):
    """And their suite NumPy and pytest."""
    place = {"cwd": tmp_path, "PYTHONPATH": str(installed), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run(sys.executable, "-c", BLOCKER + NORMS_ALONE, "numpy", **place)
    assert done.stdout == "[]\n"
    assert done.stderr.count("pn_fairseq computes without its C++ kernels") == 1
    suite = (
        "from pn_fairseq.__main__ import call; sys.exit(call(['test-norms', 'rms', '--', '-k', "
        "'state_dict']))"
    )
    assert " passed" in run(sys.executable, "-c", BLOCKER + suite, **place).stdout


@pytest.mark.ci
def test_what_an_installation_needs(installed):
    (metadata,) = installed.glob("pn_fairseq-*.dist-info/METADATA")
    needed = [
        line.partition(": ")[2]
        for line in metadata.read_text().splitlines()
        if line.startswith("Requires-Dist")
    ]
    assert [name for name in needed if "extra ==" not in name] == ["torch>=2.8"]
    for extra, package in {"fairseq": "fairseq-fixed", "test": "pytest", "docs": "mkdocs"}.items():
        assert any(package in name and f'extra == "{extra}"' in name for name in needed)
    assert "Requires-Python: >=3.11\n" in metadata.read_text()
    assert "Tag: py3-none-any\n" in metadata.with_name("WHEEL").read_text(), (
        "it has no compiled kernels"
    )


@pytest.mark.ci
def test_user_dir_from_another_folder(installed):
    """Of the checkout, and of an installed package."""
    for base, path in ((ROOT, ""), (installed, installed)):
        words = [sys.executable, "-m", "pn_fairseq", "--user-dir"]
        done = run(*words, cwd="/", PYTHONPATH=str(path))
        assert done.stdout.strip() == str(base / "pn_fairseq")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("named", "path", "used"),
    [
        pytest.param("{root}/pn_fairseq", "", "{root}/pn_fairseq", marks=pytest.mark.slow),
        pytest.param(
            "{installed}/pn_fairseq",
            "{installed}",
            "{installed}/pn_fairseq",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "{root}/pn_fairseq", "{installed}", "{root}/pn_fairseq", marks=pytest.mark.slow
        ),
        ("{checkout}", "{checkout}", "{checkout}/pn_fairseq"),
    ],
)
def test_fairseq_imports_the_user_dir_that_is_named(named, path, used, installed, tmp_path):
    """The last case is a checkout that is named as the package in it: an editable installation puts
    the checkout on the path.
    """
    checkout = tmp_path / "pn_fairseq"
    shutil.copytree(ROOT / "pn_fairseq", checkout / "pn_fairseq")
    places = {"root": ROOT, "installed": installed, "checkout": checkout}
    named, path, used = (text.format(**places) for text in (named, path, used))
    result = run(sys.executable, "-c", REGISTER, named, cwd="/", PYTHONPATH=path)
    assert result.stdout.split() == [used, "True"]


def test_user_dir_under_another_name_is_refused(monkeypatch):
    pytest.importorskip("fairseq.models")
    folder = ROOT / "pn_fairseq"
    spec = spec_from_file_location(
        "renamed", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    monkeypatch.setitem(sys.modules, "renamed", module_from_spec(spec))
    with pytest.raises(
        RuntimeError, match=f"--user-dir {folder}: the folder must be called pn_fairseq"
    ):
        spec.loader.exec_module(sys.modules["renamed"])


IMPORTS = """
import pn_fairseq.norms, pn_fairseq.models, fairseq
from fairseq import checkpoint_utils
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY
print("transformer_pn_iwslt" in ARCH_MODEL_REGISTRY, end=" ")
print("translation_random_batches" in TASK_REGISTRY, end=" ")
print(checkpoint_utils.load_checkpoint_to_cpu.patched_by)
"""


@pytest.mark.ci
def test_the_norms_and_the_models_before_fairseq(tmp_path):
    """The processes of --user-dir above import fairseq first."""
    printed = run(sys.executable, "-c", IMPORTS, cwd=tmp_path, PYTHONPATH=str(ROOT)).stdout
    assert printed == "True True pn_fairseq.fairseq_patches.checkpoints\n"


def test_version_and_missing_verb(tmp_path):
    assert run(sys.executable, "-m", "pn_fairseq", "--version", cwd=tmp_path).stdout.startswith(
        "pn_fairseq 0."
    )
    assert_refused(
        run("pn", cwd=tmp_path, check=False), "pn: error: a command is missing (see pn --help)"
    )
    assert_refused(
        run("pn", "trian", check=False), "pn: error: unknown command 'trian', did you mean 'train'?"
    )


#: Words that end at once, and what is said: for the verbs that no other test starts as a program.
#: Other tests run them in their own process.
PROGRAMS = """
reproduce nowhere | nowhere.yaml
translate --run nowhere --input /dev/null | nowhere
evaluate-lm --run nowhere | nowhere
report nowhere --output new | nowhere
figures nowhere --output new | nowhere
fold nowhere.pt new.pt | nowhere.pt
export nowhere.pt --pt2 new | nowhere.pt
import-release nowhere.pt new.pt | nowhere.pt
norms nowhere | nowhere
test-norms --norm-module nowhere.py | nowhere.py
check --no-such-option | --no-such-option
"""
#: The others -> the file that starts them.
STARTED = {
    **dict.fromkeys(("train", "average", "generate", "score"), "scripts/test_end_to_end.py"),
    "prepare": "scripts_helpers.py",
    "info": "kernels/test_selection.py",
}


@pytest.mark.ci
@pytest.mark.parametrize(("words", "needle"), rows(PROGRAMS))
def test_a_mistake_in_each_program(words, needle, tmp_path):
    result = run("pn", *words.split(), cwd=tmp_path, check=False)
    assert_refused(result, f"pn {words.split()[0]}: error: ", needle)
    assert list(tmp_path.iterdir()) == []


def test_every_verb_is_started_as_a_program():
    assert {words.split()[0] for words, _ in rows(PROGRAMS)} | {*STARTED} == {*VERBS}
    for name, file in STARTED.items():
        started = re.compile(rf'script\("{name}\.sh"|run\([^)]*"{name}"')
        assert started.search((ROOT / "tests" / file).read_text("utf-8")), name


def test_the_help_has_a_line_for_every_verb():
    listed = re.findall(
        r"^  ([a-z-]+)  +\S", run("pn", "--help").stdout.partition("\ndata and")[2], re.M
    )
    assert sorted(listed) == sorted(VERBS)


@pytest.mark.slow
def test_missing_kernels_are_named_once(installed, tmp_path):
    """By a verb that computes, although it writes warnings into a log."""
    place = {"cwd": tmp_path, "PYTHONPATH": str(installed), "check": False}
    pn = run(
        sys.executable, "-P", "-m", "pn_fairseq", "train", "verses_es_en", "--data", "x", **place
    )
    line, error = pn.stderr.splitlines()
    assert line.startswith("[pn] the C++ kernels are not compiled: ")
    assert "'make venv'" in line
    assert error.startswith("pn train: error: ")
    forced = run(
        sys.executable, "-c", "import pn_fairseq.norms", PN_FAIRSEQ_KERNELS="reference", **place
    )
    assert forced.stderr == ""


@pytest.mark.ci
def test_help_needs_no_fairseq():
    """The packages that take seconds to import are needed when a command runs, not for its
    --help.
    """
    verbs = ["score", "generate", "translate", "average", "evaluate-lm", "fold", "import-release"]
    others = "fairseq fairseq_cli sentencepiece subword_nmt pandas hydra".split()
    code = f"""
import sys
sys.modules.update(dict.fromkeys({others}))
from pn_fairseq.__main__ import call
for verb in {verbs}:
    assert call([verb, "--help"]) == 0, verb
"""
    assert re.findall(r"^usage: pn (\S+) ", run(sys.executable, "-c", code).stdout, re.M) == verbs
