"""What the tests of converted models share: a mask, and small models whose norms get none."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from pn_fairseq.norms import convert_norms
from pn_fairseq.testing.helpers import of_kinds

B = 3
T = 7
C = 12
LENGTHS = torch.tensor([7, 4, 2])
MASK = torch.arange(T) >= LENGTHS[:, None]

CONVERTED_NORMS = of_kinds("batch", "batch about 0", "running", "batch and running")


class FeedForward(nn.Module):
    """A residual network over tokens whose norms get no mask."""

    def __init__(self, norm=nn.LayerNorm, channels=C):
        super().__init__()
        self.inner = nn.Linear(channels, channels)
        self.norm = norm(channels)
        self.outer = nn.Linear(channels, channels)
        self.last = norm(channels)

    def forward(self, x, lengths=None):
        return self.last(x + self.outer(self.norm(self.inner(x)).relu()))


class ByVariance(nn.Module):
    """As T5's and Llama's norms; with offset 1 as Gemma's, with the gain ``scale`` as
    torchtune's.
    """

    def __init__(self, offset=0.0, gain="weight"):
        super().__init__()
        self.variance_epsilon = 1e-3
        self.offset = offset
        self.gain = gain
        self.register_parameter(gain, nn.Parameter(torch.rand(C)))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (getattr(self, self.gain) + self.offset) * x


def random_tokens():
    return torch.randn(B, T, C)


def converted(norm="batch", **options):
    """A :class:`FeedForward` with other norms."""
    return convert_norms(FeedForward(), norm, **options)


def refuses(message):
    return pytest.raises(ValueError, match=message)


def warns(message):
    return pytest.warns(UserWarning, match=message)


@contextmanager
def silent():
    """A warning in the block is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def recorded():
    """A list that gets, at the end of the block, the text of each warning in it."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught]


def randomized(model):
    """Gains, biases and running statistics away from what they are initially."""
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "bias", None) is not None and module.weight.dim() == 1:
                nn.init.uniform_(module.weight, 0.5, 2)
                nn.init.normal_(module.bias)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                nn.init.uniform_(buffer, 0.5, 2)
            else:
                buffer.fill_(3)
    return model
