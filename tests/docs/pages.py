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
    return [
        option
        for span in re.findall(r"`(-[^`]+)`", text)
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)
    ]


def ours(command: Command) -> tuple[str, list[str]] | None:
    """The tool of this project or of fairseq that a command calls, and its other words; None for
    other commands.
    """
    words = command.words
    if words and words[0] in OTHERS:  # srun ... pn train ..., torchrun ... -m pn_fairseq train ...
        begin = next(
            (number for number, word in enumerate(words) if word in ("pn", "pn_fairseq")),
            len(words) - 1,
        )
        words = [*(["pn"] if begin + 1 < len(words) else []), *words[begin + 1 :]]
    if not words or words[:3] == ["python", "-m", "pytest"]:
        return None
    if words[:3] == ["python", "-m", "pn_fairseq"]:
        words = ["pn", *words[3:]]
    if words[0] == "pn":
        verb = 1 + (len(words) > 1 and not words[1].startswith("-"))
        verb += (
            words[1:2] in (["prepare"], ["reproduce"])
            and len(words) > 2
            and words[2] not in ("NAME", "--study")
        )
        verb += 2 * (words[1:3] == ["reproduce", "--study"] and words[3] != "FILE")
        return " ".join(words[:verb]), words[verb:]
    if words[:2] == ["python", "-m"]:
        return " ".join(words[:3]), words[3:]
    if words[0] == "python" and words[1].startswith("examples/"):
        return " ".join(words[:2]), words[2:]
    return words[0], words[1:]
