"""Reading and writing fairseq checkpoints without trusting them.

A PyTorch checkpoint is a pickle, and unpickling runs any code that the file names. From torch 2.6
on, ``torch.load`` by default accepts only tensors and plain containers, and so refuses fairseq's
own checkpoints, which hold an ``argparse.Namespace``. This module allows, by name, only what
fairseq's checkpoints hold. It needs torch and NumPy, but not fairseq.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import warnings
import zipfile
from collections.abc import Iterator

import numpy as np
import torch

from pn_fairseq.common.checkpoint_files import (
    GET_ANOTHER,
    CheckpointError,
    check_input_path,
    check_output_path,
)
from pn_fairseq.common.errors import error_chain
from pn_fairseq.common.files import atomic_write

try:
    from numpy._core import multiarray
except ImportError:  # NumPy 1
    from numpy.core import multiarray


_DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()

# The three ways in which torch reports that a file asks for an object that is not on the list of
# safe ones.
_REFUSED_OBJECT = re.compile(
    r"GLOBAL (\S+)|allowlisted\s+via `add_safe_globals`,? but got <class '([^']+)'>|unrecognized "
    r"function (.+)"
)


def allow_fairseq_checkpoints() -> None:
    """Let ``torch.load(weights_only=True)``, the default from torch 2.6 on, read fairseq's
    checkpoints.

    It allows ``argparse.Namespace`` (the model's arguments inside ``cfg``) and the pieces as which
    NumPy numbers and arrays of numbers are pickled (the n-gram counts that ``--eval-bleu`` leaves
    among the metrics). None of them runs code from the file. Calling it again changes nothing.
    """
    allowed = [argparse.Namespace, np.ndarray, np.dtype]
    # Loading an array also restores its dtype, whose class torch looks up.
    allowed += [type(np.dtype(name)) for name in _DTYPES]
    # torch compares names, and NumPy 2 renamed the module: a file that either version wrote must
    # load with both.
    for function in (multiarray._reconstruct, multiarray.scalar):
        allowed += [
            (function, f"{module}.multiarray.{function.__name__}")
            for module in ("numpy._core", "numpy.core")
        ]
    torch.serialization.add_safe_globals(allowed)


def load_checkpoint(path: str | os.PathLike) -> dict:
    """Read a fairseq checkpoint into CPU memory, without running code from the file.

    The checksums of all records are compared first, which ``torch.load`` does not do: a flipped bit
    in a weight would otherwise go unnoticed.

    Args:
        path: a ``.pt`` file that fairseq wrote.

    Returns:
        The checkpoint's dict; ``"model"`` maps parameter and buffer names to tensors.

    Raises:
        CheckpointError: the file is missing, a directory, unreadable, empty, cut off or damaged,
            asks for an object that :func:`allow_fairseq_checkpoints` does not list (the message
            names it; it was not created), or holds no ``"model"`` dict of tensors.
    """
    check_input_path(path)
    allow_fairseq_checkpoints()
    with readable(path), warnings.catch_warnings():
        # The warning adds nothing to the error that follows.
        warnings.filterwarnings("ignore", message="Detected pickle protocol")
        state = torch.load(os.fspath(path), map_location="cpu", weights_only=True)
    _check_state(path, state)
    return state


@contextlib.contextmanager
def readable(path: str | os.PathLike, *errors: type[Exception]) -> Iterator[None]:
    """Compare the checksums of all records of a checkpoint, and explain why the block cannot load
    the file.

    ``errors``: the exceptions of the block that indicate a bad file (default: all, since a damaged
    pickle can raise any).

    Raises:
        CheckpointError: the file is cut off or damaged, or asks for an object that is not allowed.
    """
    expected: tuple[type[Exception], ...] = (Exception,)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                record = archive.testzip()
            if record is not None:
                raise CheckpointError(
                    f"{path}: is damaged ({record} does not match its checksum); {GET_ANOTHER}"
                )
        expected = errors or expected
        yield
    except CheckpointError:
        raise
    except expected as error:
        raise CheckpointError(f"{path}: {_explain_load_error(path, error)}") from error


#: torch's lines about the weights that do not fit a model, and what they mean.
_MISFITS = (
    (
        re.compile(
            r"size mismatch for (\S+): .* shape torch.Size\((.*?)\) from .* model is "
            r"torch.Size\((.*?)\)"
        ),
        "{0} is {1} in the checkpoint and {2} in the model",
    ),
    (re.compile(r'Missing key\(s\) in state_dict: "([^"]+)"'), "the checkpoint has no {0}"),
    (re.compile(r'Unexpected key\(s\) in state_dict: "([^"]+)"'), "the model has no {0}"),
)


def explain_misfit(error: Exception) -> str:
    """torch's RuntimeError about weights that do not fit a model, as one line: which weight, its
    shapes, advice.
    """
    text = str(error)
    misfits = [
        (match, meaning) for pattern, meaning in _MISFITS for match in pattern.finditer(text)
    ]
    if not misfits:
        return " ".join(text.split())
    # An embedding is as large as the vocabulary, so its size says more than the other differences.
    vocabulary = [
        (match, meaning)
        for match, meaning in misfits
        if re.search("size mismatch.*(embed_tokens|output_projection)", match[0])
    ]
    match, meaning = (vocabulary or misfits)[0]
    advice = (
        "use the settings of the model that the checkpoint was trained with, or another checkpoint"
    )
    if vocabulary:
        advice = (
            "the checkpoint was trained with another vocabulary; use the data that it was trained "
            "on, or prepare other text with that data's vocabulary (pn prepare text --like DATA)"
        )
    return f"the weights do not fit the model: {meaning.format(*match.groups())}; {advice}"


def _explain_load_error(path: str | os.PathLike, error: Exception) -> str:
    text = str(error)
    with open(path, "rb") as file:
        looks_like_zip = file.read(2) == b"PK"
    refused = _REFUSED_OBJECT.search(text)
    if refused:
        name = next(group for group in refused.groups() if group)
        # Without a zip file's checksums, the name may also be a fragment of another name.
        damaged = "" if looks_like_zip else ", or is damaged"
        return (
            f"asks for {name}, which no fairseq checkpoint needs{damaged}; the file was not loaded "
            "and nothing in it was executed. If you trust its source, save it again without that "
            "object"
        )
    if isinstance(error, MemoryError) or "allocate memory" in text:
        return "does not fit into memory; use a machine with more of it"
    if looks_like_zip:
        return f"is cut off or damaged; {GET_ANOTHER}"
    reason = text.split("WeightsUnpickler error:")[-1].strip().splitlines()
    # On a text file, the pickle reader raises errors that show only a key: KeyError: 97.
    detail = (
        f" ({type(error).__name__}: {reason[0]})"
        if reason and not isinstance(error, KeyError)
        else ""
    )
    return f"is not a PyTorch checkpoint, or is damaged{detail}; {GET_ANOTHER}"


def _check_state(path: str | os.PathLike, state: object) -> None:
    advice = "use a checkpoint*.pt file written by fairseq"
    if (
        not isinstance(state, dict)
        or not isinstance(state.get("model"), dict)
        or not state["model"]
    ):
        raise CheckpointError(
            f"{path}: is not a fairseq checkpoint (it holds no 'model' dict); {advice}"
        )
    for key, value in state["model"].items():
        if (
            not isinstance(key, str)
            or not isinstance(value, torch.Tensor)
            or value.layout != torch.strided
        ):
            problem = f"model entry {key!r}, a {type(value).__name__}, is not a named dense tensor"
            raise CheckpointError(f"{path}: is not a fairseq checkpoint ({problem}); {advice}")


def save_checkpoint(state: dict, path: str | os.PathLike) -> None:
    """Write ``state`` to ``path``, which stays unchanged after any error. A symbolic link at
    ``path`` is kept.

    Raises:
        CheckpointError: the directory is missing or not writable, or the disk is full.
    """
    check_output_path(path)
    try:
        with atomic_write(os.path.realpath(path)) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        # torch's zip writer replaces an OSError or a Ctrl-C by a RuntimeError of its own.
        cause = next(
            (link for link in error_chain(error) if isinstance(link, (OSError, KeyboardInterrupt))),
            error,
        )
        if isinstance(cause, OSError):
            reason = cause.strerror or cause
            raise CheckpointError(
                f"{path}: cannot be written ({reason}); an earlier file is untouched"
            ) from error
        raise cause from error
