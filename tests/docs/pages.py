"""README.md, CONTRIBUTING.md and docs/*.md as code blocks and commands."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

#: A word that begins a command of this project or of fairseq in inline code.
TOOL = re.compile(
    r"((scripts/)?[a-z0-9_]+\.sh|pn(?= [a-z])|fairseq-(train|generate|hydra-train)|make|"
    r"python -m (pn_fairseq|benchmarks\.\w+))(?![\w-])(?!.*(\.\.\.|[*]))"
)
ASSIGNMENT = re.compile(r"[A-Z_]+=")
#: First words of commands that are not this project's. Their options are not checked.
OTHERS = {
    "pip",
    "sacrebleu",
    "export",
    "echo",
    "srun",
    "sbatch",
    "torchrun",
    "sed",
    "tensorboard",
    ".",
    "pre-commit",
}
USER_DIR = "pn --user-dir"


@dataclass(frozen=True)
class Command:
    """A command of a code block or of inline code; ``text`` is one line."""

    page: str
    text: str
    not_run: bool = False

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"

    @property
    def words(self) -> list[str]:
        """The words without variables that are set for the command."""
        words = shlex.split(self.text, comments=True)
        while words and ASSIGNMENT.match(words[0]):
            words = words[1:]
        return words

    @property
    def variables(self) -> list[str]:
        """The names of the variables that are set for the command."""
        return re.findall(r"(?:^|\s)([A-Z_]+)=", self.text)


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


def block_commands(page: Path) -> list[Command]:
    """The commands of the ``bash`` blocks. ``a && b`` and ``a | b`` are two; loops are left out.

    The comment ``# not run ...`` behind a command marks it; on a line of its own it marks the rest
    of the block.
    """
    commands = []
    for block in blocks(page, "bash"):
        block = re.sub(r"^for .*?done\b.*?$", "", block, flags=re.M | re.S)
        rest_not_run = False
        block = re.sub(r"^#(SBATCH |!).*$", "", block, flags=re.M)
        block = re.sub(rf"\$\((?!{USER_DIR}\))[^)]*\)", "", block)  # commands within a command
        for line in block.replace("\\\n", " ").splitlines():
            text, _, comment = f" {line}".partition(" # ")
            rest_not_run |= not text.strip() and comment.startswith("not run")
            not_run = rest_not_run or comment.startswith("not run")
            parts = [" ".join(part.split()) for part in re.split(r"\s(?:&&|\|)\s", text)]
            commands += [Command(page.name, part, not_run) for part in parts if part]
    return commands


def inline_commands(page: Path) -> list[Command]:
    """Inline code that begins with a tool."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    return [Command(page.name, span) for span in spans if TOOL.match(span)]


def inline_options(page: Path) -> list[str]:
    """Options that stand alone in inline code, as in `--keep-case` or `--bpe N`."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    options = []
    for span in re.findall(r"`(-[^`]+)`", text):
        options += re.findall(r"(?<![\w-])--[a-z][\w-]*", span)
    return options


def ours(command: Command) -> tuple[str, list[str]] | None:
    """The tool of this project or of fairseq that a command calls, and its other words; None for
    other commands.
    """
    words = command.words
    if words and words[0] in OTHERS:  # srun ... pn train ..., torchrun ... -m pn_fairseq train ...
        while words and words[0] not in ("pn", "pn_fairseq"):
            words = words[1:]
        words[:1] = ["pn"] if words else []
    if not words or words[:3] == ["python", "-m", "pytest"]:
        return None
    if words[:3] == ["python", "-m", "pn_fairseq"]:
        words = ["pn", *words[3:]]
    if words[0] == "pn":
        length = _length_of_a_verb(words)
        return " ".join(words[:length]), words[length:]
    if words[:2] == ["python", "-m"]:
        return " ".join(words[:3]), words[3:]
    if words[0] == "python" and words[1].startswith("examples/"):
        return " ".join(words[:2]), words[2:]
    return words[0], words[1:]


def _length_of_a_verb(words: list[str]) -> int:
    """How many words name a command of pn: ``pn train``, ``pn prepare verses``, ``pn reproduce
    --study FILE``.
    """
    if len(words) == 1 or words[1].startswith("-"):
        return 1
    if words[1] not in ("prepare", "reproduce") or len(words) == 2 or words[2] == "NAME":
        return 2
    if words[2] != "--study":
        return 3
    return 2 if words[3] == "FILE" else 4
