"""The sections of a report about settings: what differs, what is the same, and the commands."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from pn_fairseq.report.page import Block, Code, Element, Heading, Inline, Missing, Paragraph, Table
from pn_fairseq.report.runs import Run
from pn_fairseq.report.systems import SEED, Corpus, comparable, differing, shown
from pn_fairseq.report.wording import command, here

#: The settings that one asks for first; all others are in config.yaml.
_SUMMARY = re.compile(
    r"encoder norm$|size$|average_last$|tokens_per_update$|sentences per update$"
    r"|model\.|criterion\.|optimizer\.|lr_scheduler\."
    r"|optimization\.(max_update|max_epoch|lr|stop_min_lr|clip_norm)$"
    r"|dataset\.(max_tokens|required_batch_size_multiple|validate_interval_updates)$"
    r"|checkpoint\.(keep_last_epochs|keep_interval_updates|save_interval_updates|patience)$"
    r"|common\.(seed|fp16|bf16|amp|memory_efficient_fp16)$|generation\.(beam|lenpen)$"
)

#: What train.sh adds by itself: places, and how an update is spread over the workers that there are.
_ADDED_BY_TRAIN = re.compile(
    r"\+*(common\.(user_dir|log_file|tensorboard_logdir)|task\.data|checkpoint\.save_dir|hydra\.run\.dir"
    r"|distributed_training\.distributed_(world_size|no_spawn|init_method|backend)"
    r"|optimization\.update_freq|dataset\.max_tokens_valid)="
)


def settings(corpus: Corpus) -> list[Element]:
    """What differs between the systems of a corpus, and what does not."""
    known = [system for system in corpus.systems if system.runs[0].settings is not None]
    elements: list[Element] = [Heading(3, "Settings that differ")]
    if not known:
        return [*elements, Paragraph(Missing("Not known: there is no config.yaml that can be read."))]
    values = {run.name: comparable(run) for system in known for run in system.runs}
    names = [name for name in differing(list(values.values())) if name != SEED]
    if names:
        header = ["setting", *(system.label for system in known)]
        rows = []
        for name in names:
            row: list[Inline] = [Code(name)]
            for system in known:
                row.append(", ".join(dict.fromkeys(shown(values[run.name].get(name)) for run in system.runs)))
            rows.append(row)
        elements.append(Table(header, rows))
        elements.append(
            Paragraph("Seeds and places are left out. \"default\": not set, so fairseq's or the architecture's.")
        )
    else:
        elements.append(Paragraph("None but the seed and the places."))
    common = {
        name: value
        for name, value in next(iter(values.values())).items()
        if name not in names and (name != SEED or len({one.get(SEED) for one in values.values()}) == 1)
    }
    told = {name: value for name, value in common.items() if _SUMMARY.match(name) and not _is_off(name, value)}
    elements.append(Heading(3, "Settings in common"))
    kinds = {name: value for name, value in common.items() if name.endswith("._name")}
    rows = [[Code(name), shown(value)] for name, value in (kinds | told).items()]
    elements.append(Table(["setting", "value"], rows))
    rest = len(common) - len(rows)
    elements.append(
        Paragraph(
            [
                f"{rest} more are the same in all runs, most of them off or fairseq's defaults; ",
                Code("config.yaml"),
                " in any run's folder has them.",
            ]
        )
    )
    return elements


def _is_off(name: str, value: object) -> bool:
    # fairseq's ways to say "not": false, -1, no text; and 0 as a limit.
    return value is False or value in (-1, "") or (value == 0 and "max_" in name)


def commands(corpus: Corpus) -> list[Element]:
    """The commands that make these runs again."""
    lines, lacking = [], []
    for run in corpus.runs:
        words = _train_command(run)
        if words is None:
            lacking.append(run.name)
        else:
            lines.append(command(words))
    elements: list[Element] = [Heading(3, "Commands")]
    if lines:
        elements.append(Block("\n".join(lines)))
        elements.append(
            Paragraph(
                [
                    "After each, with its ",
                    Code("--run"),
                    ": ",
                    Code("scripts/average.sh"),
                    ", ",
                    Code("scripts/generate.sh"),
                    " and ",
                    Code("scripts/score.sh"),
                    ".",
                ]
            )
        )
    if lacking:
        elements.append(
            Paragraph(Missing(f"Not recorded (no hydra/.hydra in the run's folder): {', '.join(lacking)}."))
        )
    return elements


def _config(hydra: dict) -> str:
    """What train.sh was told as CONFIG: a name in configs/, or the path of another file."""
    name = str(hydra["job"]["config_name"])
    for source in hydra.get("runtime", {}).get("config_sources", []):
        if source["provider"] == "command-line" and Path(source["path"]).name != "configs":
            return here(Path(source["path"]) / f"{name}.yaml")
    return name


def _train_command(run: Run) -> list[str] | None:
    folder = run.path / "hydra/.hydra"
    try:
        overrides = yaml.safe_load((folder / "overrides.yaml").read_text("utf-8"))
        config = _config(yaml.safe_load((folder / "hydra.yaml").read_text("utf-8"))["hydra"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None
    if not isinstance(overrides, list):
        return None
    chosen = [str(one) for one in overrides if not _ADDED_BY_TRAIN.match(str(one))]
    # train.sh hands this on to hydra in a way that it does not take itself.
    chosen = [one.lstrip("+") if re.match(r"\+*tokens_per_update=", one) else one for one in chosen]
    data = ["--data", here(run.data_path)] if run.data_path else []
    return ["scripts/train.sh", config, *data, "--run", here(run.path), *(here(one) for one in chosen)]
