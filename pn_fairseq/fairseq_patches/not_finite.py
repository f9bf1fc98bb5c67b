"""A loss or gradient that is not finite ends the run with a message that says where it arose and what to try.

fairseq repeats the update with hooks that log the first module whose output is NaN or infinite. Its hooks on the
backward pass end in ``StopIteration`` on a module that returns a dict without tensors, as its own encoders do. With
several ranks it reports "gradients are inconsistent between workers" instead.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from fairseq.nan_detector import NanDetector
from fairseq.trainer import Trainer

from pn_fairseq.common.errors import NotFiniteError
from pn_fairseq.fairseq_patches import patch

#: What fairseq says when a number is not finite. With several ranks it lists the norms of their gradients.
_MESSAGES = re.compile(r"gradients are (Nan/Inf|inconsistent.*\b(nan|inf)\b)|Minimum loss scale reached", re.S)
#: What the detectors found in this update, in words.
_first_modules: list[str] = []


def _tensors(output):
    if torch.is_tensor(output):
        yield output
    elif isinstance(output, dict | list | tuple):
        for part in output.values() if isinstance(output, dict) else output:
            yield from _tensors(part)


@patch(NanDetector, "add_hooks", "self module")
def add_hooks(_, detector, module):
    """The hooks on the backward pass are on the tensors of the output."""

    def watch(module, inputs, output):
        if detector.forward:
            detector.fhook_fn(module, inputs, output)
        for tensor in _tensors(output) if detector.backward else ():
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: detector.bhook_fn(module, (), gradient))

    detector.fhooks.append(module.register_forward_hook(watch))


@patch(NanDetector, "_detect", "self tensor name backward")
def detect(original, detector, tensor, name, backward):
    if message := original(detector, tensor, name, backward):
        gradient = "the gradient of " if backward else ""
        _first_modules.append(f"{message.split()[0]} first in {gradient}the output of {name or 'the model'}")
    return message


@contextmanager
def explained(trainer: Trainer) -> Iterator[None]:
    """An update in which a number that is not finite ends in a :class:`NotFiniteError`."""
    _first_modules.clear()
    try:
        yield
    except NotFiniteError:  # of the same update, which fairseq repeats under --amp
        raise
    except Exception as error:
        # The repeated update may end in another error.
        fault = error if isinstance(error, FloatingPointError) else error.__context__
        if not isinstance(fault, FloatingPointError) or not _MESSAGES.search(str(fault)):
            raise
        loss_scale = getattr(getattr(trainer.optimizer, "scaler", None), "loss_scale", None)
        raise NotFiniteError(trainer.get_num_updates() + 1, loss_scale, *_first_modules[:1]) from error
