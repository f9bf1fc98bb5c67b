"""Values of settings, prepared data and checkpoints, checked before a training begins.

fairseq declares types and choices: hydra compares the dataclasses of all sections but the model, whose declaration is
the parser of its flags. fairseq declares no ranges; :data:`RANGES` has the ranges of the settings that train a model.
"""

import argparse
import ast
import functools
import math
import os
import re
import warnings
from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import DictConfig, OmegaConf

from pn_fairseq.common.checkpoints import explain_misfit, load_checkpoint
from pn_fairseq.common.command import UserError
from pn_fairseq.fairseq_patches.convert_norms import parse
from pn_fairseq.models.normed_model import FoldedModelError
from pn_fairseq.pipeline.data.binarize import MAGIC, sentences
from pn_fairseq.pipeline.runs import flat

#: Pattern of dotted names, lower bound, upper bound (excluded).
RANGES = [
    (re.compile(pattern), low, high)
    for pattern, low, high in (
        (r"model\.(\w+_)?(dropout|layerdrop)|criterion\.label_smoothing", 0, 1),
        (r"model\.(encoder|decoder)_(layers|attention_heads|\w*_dim)|model\.(core_rank|cores)", 1, math.inf),
        (r"(model|task)\.max_(source|target)_positions|task\.tokens_per_sample|generation\.beam", 1, math.inf),
        (r"dataset\.(max_tokens|batch_size)(_valid)?|dataset\.required_batch_size_multiple", 1, math.inf),
        (r"dataset\.(validate_interval|num_workers\w*)|checkpoint\.save_interval_updates", 0, math.inf),
        (r"optimization\.(lr|clip_norm|max_update|max_epoch|stop_time_hours)|optimizer\.weight_decay", 0, math.inf),
        (r"optimizer\.adam_eps|lr_scheduler\.(warmup_updates|min_lr)", 0, math.inf),
        (r"optimizer\.adam_betas", 0, 1),
        (r"optimization\.stop_min_lr|lr_scheduler\.warmup_init_lr|checkpoint\.(patience|keep_\w+s)", -1, math.inf),
    )
]


def check_values(cfg: DictConfig) -> None:
    """Refuse a value of the wrong type or outside of its range."""
    check_types_of_the_model(cfg.model)
    for name, value in flat(OmegaConf.to_container(cfg)).items():
        _, low, high = next((row for row in RANGES if row[0].fullmatch(name)), (None, None, None))
        if low is None:
            continue
        for number in _numbers(name, value):
            if not low <= number < high:
                bounds = f"at least {low}" if high == math.inf else f"at least {low} and below {high}"
                raise UserError(f"{name}={value} is outside of its range: it must be {bounds}")


def _numbers(name: str, value) -> list[float]:
    if name == "optimizer.adam_betas":
        try:
            value = ast.literal_eval(value) if isinstance(value, str) else value
            first, second = map(float, value)
        except (ValueError, SyntaxError, TypeError):
            raise UserError(f"{name}={value} must be two numbers, as in \"'(0.9, 0.98)'\"") from None
        return [first, second]
    values = value if isinstance(value, list | tuple) else [value]
    return [number for number in values if isinstance(number, int | float) and not isinstance(number, bool)]


def check_types_of_the_model(settings: DictConfig) -> None:
    """Compare each setting with the type and the choices of its flag."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    ARCH_MODEL_REGISTRY[settings._name].add_args(parser)
    for action in parser._actions:
        value = settings.get(action.dest)
        if value is None or OmegaConf.is_dict(value):  # a mapping is of norm options, which check_names checks
            continue
        name = f"model.{action.dest}"
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise UserError(f"{name}={value} must be true or false")
            continue
        try:
            converted = action.type(str(value)) if action.type else value
        except (ValueError, TypeError, SyntaxError, NameError, argparse.ArgumentTypeError):
            kind = {int: "a whole number", float: "a number"}.get(action.type, "a value that fairseq accepts")
            raise UserError(f"{name}={value} must be {kind}") from None
        if action.choices and converted not in action.choices and value not in action.choices:
            raise UserError(f"{name}={value} must be one of {', '.join(map(str, action.choices))}")
    # Two settings of any model, by a patch of fairseq.
    if not isinstance(ignores := settings.get("norm_ignore_mask", False), bool):
        raise UserError(f"model.norm_ignore_mask={ignores} must be true or false")
    specifications = settings.get("convert_norms") or []
    for text in [specifications] if isinstance(specifications, str) else specifications:
        try:
            parse(text)
        except ValueError as error:
            raise UserError(f"model.convert_norms: {error}") from None


def stand_in_dictionary(cfg: DictConfig) -> Dictionary:
    """A vocabulary to build a model without data: larger than WikiText-103's and the adaptive softmax's cutoffs."""
    cutoffs = map(int, re.findall(r"\d+", str(cfg.model.get("adaptive_softmax_cutoff"))))
    return _dictionary(max(300_000, *cutoffs, 0) + 1)


@functools.cache  # a list of norms is checked with the same one
def _dictionary(size: int) -> Dictionary:
    dictionary = Dictionary()
    for number in range(size):
        dictionary.add_symbol(str(number))
    return dictionary


def open_data(folder: Path, name: str, dictionary: Dictionary):
    """fairseq's data set ``name`` in the folder bin/, whose files are whole and fit the dictionary.

    Its ``sizes`` are a view of a file that is open for as long as it exists.
    """
    path, again = folder / name, "prepare the data again (pn prepare)"
    index, content = Path(f"{path}.idx"), Path(f"{path}.bin")
    if not (index.is_file() and content.is_file()):
        raise UserError(f"{folder} has no {name}: {again}")
    with index.open("rb") as file:
        mapped = file.read(len(MAGIC)) == MAGIC
    # Of each sentence its size in 4 bytes and its place in 8.
    if mapped and (index.stat().st_size < 26 or index.stat().st_size != 26 + 12 * sentences(index)):
        raise UserError(f"{index} is cut off or damaged: {again}")
    try:
        dataset = load_indexed_dataset(str(path))
    except Exception as error:  # a damaged index can raise anything
        raise UserError(f"{index} is damaged ({type(error).__name__}: {error}): {again}") from error
    if mapped:
        dtype = np.dtype(dataset._index.dtype)
        expected = int(np.sum(dataset.sizes, dtype=np.int64)) * dtype.itemsize
        if content.stat().st_size != expected:
            raise UserError(f"{content} has {content.stat().st_size} bytes instead of {expected}: {again}")
        largest = int(np.memmap(content, dtype, "r").max()) if expected else 0
        if largest >= len(dictionary):
            raise UserError(
                f"{content} has the subword number {largest}, but its dictionary in {folder} only {len(dictionary)} "
                f"subwords: {again}"
            )
    return dataset


def check_weights(model: torch.nn.Module, file: str | os.PathLike, cfg: DictConfig) -> dict:
    """Refuse a checkpoint that is damaged or does not fit ``model``, which is on the meta device; return its state."""
    state = load_checkpoint(file)
    try:
        with warnings.catch_warnings(action="ignore"):  # nothing is copied to the meta device
            model.load_state_dict(dict(state["model"]), strict=True, model_cfg=cfg.model)
    except FoldedModelError:
        raise UserError(str(FoldedModelError(str(file)))) from None
    except Exception as error:  # also of fairseq's conversion of old weights
        raise UserError(f"{file}: {explain_misfit(error) or type(error).__name__}") from error
    return state
