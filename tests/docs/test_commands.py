"""Commands in README.md, CONTRIBUTING.md and docs/ fit the commands that exist: names, options,
variables, settings.
"""

import importlib
import itertools
import re
from functools import cache

import pytest

from pn_fairseq.__main__ import VERBS
from pn_fairseq.pipeline.data.recipes import RECIPES
from pn_fairseq.pipeline.steps import experiments

from ..scripts_helpers import in_process, run, words_of
from .pages import PAGES, ROOT, Command, block_commands, inline_commands, inline_options, ours

#: Options of such commands that pages mention.
OTHER_OPTIONS = {"--extra-index-url", "--index-url", "--no-build-isolation", "--sample-break-mode"}
OTHER_OPTIONS |= {"--nnodes", "--node-rank", "--nproc-per-node"}  # of torchrun
OTHER_OPTIONS |= {"--gpus-per-node", "--requeue"}  # of sbatch
OTHER_OPTIONS |= {"--lnv", "--mean_detach", "--std_detach"}  # of the AdaNorm authors' code
OTHER_OPTIONS |= {"--no-isolation"}  # of build
# of fairseq: a scheduler's, and fairseq-score's
OTHER_OPTIONS |= {"--update2lr", "--sentence-bleu"}
#: Variables that programs read and no help text names.
VARIABLES = {"CUDA_VISIBLE_DEVICES"}
#: pn reproduce trains with these configurations.
CONFIGS = {"demo": "demo"} | {name: corpus.config for name, corpus in experiments().items()}

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def help_of(tool: str) -> str:
    """The help text of a tool, in process where it is Python's.

    Raises:
        LookupError: there is no such tool.
    """
    if tool == "make":
        files = (ROOT / "Makefile", ROOT / "scripts/make_venv.sh")
        return "".join(file.read_text("utf-8") for file in files)
    if tool.startswith(("python -m benchmarks.", "python -m docs.tools.")):
        module = tool.removeprefix("python -m ").replace(".", "/")
        return (ROOT / f"{module}.py").read_text("utf-8")  # names its options
    if tool.startswith("python examples/"):
        return (ROOT / tool.removeprefix("python ")).read_text("utf-8")
    if tool in ("fairseq-train", "fairseq-generate"):
        return fairseq_help(tool)
    if tool == "fairseq-hydra-train":
        return "--config-dir --config-name --multirun"
    if tool.endswith(".sh"):
        path = ROOT / (tool if "/" in tool else f"scripts/{tool}")
        if not path.is_file():
            raise LookupError(f"there is no {tool}")
        words = words_of(path)
        return pn_help(*words) if words else run("bash", path, "--help").stdout
    return pn_help(*tool.split()[1:])


def pn_help(*words: str) -> str:
    result = in_process(*words, "--help", check=False)
    if result.returncode:
        raise LookupError(f"there is no pn {' '.join(words)}")
    return result.stdout


def fairseq_help(tool: str) -> str:
    """All option strings of fairseq's command for this project's models and the criterion, ... of
    the README.
    """
    from fairseq import options

    importlib.import_module("pn_fairseq.models")
    chosen = "--criterion label_smoothed_cross_entropy --optimizer adam".split()
    chosen += "--lr-scheduler inverse_sqrt --arch".split()
    found = set()
    for arch in ("transformer_pn_iwslt", "transformer_lm_pn_tiny", "tensorized_lm_pn_tiny"):
        task = "language_modeling" if "_lm_" in arch else "translation"
        words = ["data", "--task", task]
        parser = options.get_generation_parser()
        if tool == "fairseq-train":
            words += [*chosen, arch]
            parser = options.get_training_parser()
        options.parse_args_and_arch(parser, words)  # adds the options of what was chosen
        found |= parser._option_string_actions.keys()
    return " ".join(found)


def has(text: str, option: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text) is not None


def faults(command: Command) -> list[str]:
    found = ours(command)
    if found is None:
        return []
    tool, words = found
    try:
        text = help_of(tool)
    except LookupError as error:
        return [f"{command.text}: {error}"]
    wrong = []
    for word in words:
        if tool == "make" and "=" not in word and not re.search(rf"^{word}:", text, re.M):
            wrong.append(f"no target {word}")
        option = word.partition("=")[0]
        if tool != "make" and re.match(r"--[a-z]", word) and not has(text, option):
            wrong.append(f"{tool} has no {option}")
    for name in {*command.variables} - VARIABLES:
        if name not in text:
            wrong.append(f"{tool} does not name {name}")
    return [f"{command.text}: {fault}" for fault in wrong]


@by_page
def test_commands_exist_and_have_these_options(page):
    found = []
    for command in block_commands(page) + inline_commands(page):
        found += faults(command)
    assert found == []


def test_options_in_sentences_exist():
    """`--keep-case` in a sentence is an option of some command."""
    tools = [f"pn {verb}" for verb in VERBS]
    tools += [f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.sh")]
    tools += [f"pn prepare {name}" for name in RECIPES]
    tools += [f"pn reproduce {name}" for name in experiments()]
    tools += ["pn reproduce --study compare_norms"]
    tools += [f"python -m benchmarks.{name}" for name in ("norms", "training", "decoding", "gpu")]
    text = " ".join(map(help_of, [*tools, "fairseq-train", "fairseq-generate", "pn"]))
    unknown = {}
    for page in PAGES:
        for option in inline_options(page):
            if option not in OTHER_OPTIONS and not has(text, option):
                unknown[option] = page.name
    assert unknown == {}


def values_of_settings() -> dict[str, dict[str, set[str]]]:
    """Configuration -> setting -> its values in the training commands of all code blocks."""
    found: dict[str, dict[str, set[str]]] = {}
    for command in itertools.chain(*map(block_commands, PAGES)):
        tool, words = ours(command) or ("", [])
        name = re.fullmatch(r"pn (?:train|reproduce (\w+))", tool)
        if not name or "$" in command.text:
            continue
        config = CONFIGS.get(name[1], name[1]) if name[1] else words[0]
        settings = found.setdefault(config, {})
        for word in words:
            key, equals, value = word.partition("=")
            if equals and re.fullmatch(r"\+*\w+(\.\w+)+", key):
                settings.setdefault(key, set()).add(value)
    return found


@pytest.mark.parametrize("config", values_of_settings())
def test_settings_exist(config):
    """Composed at once, since that takes a second: one value of each, and all architectures by
    name.
    """
    settings = pytest.importorskip("pn_fairseq.pipeline.training_settings")
    values = values_of_settings()[config]
    overrides = [f"{key}={min(value)}" for key, value in values.items()]
    settings.compose(ROOT / "configs" / f"{config}.yaml", overrides, world_size=1, on_cpu=True)
    assert values.get("model._name", set()) <= settings.ARCH_MODEL_REGISTRY.keys()
