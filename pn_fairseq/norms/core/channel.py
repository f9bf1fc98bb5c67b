"""What all norms share: affine parameters, layer-scale in front, and the layouts of activations
and masks.
"""

import inspect

import torch
from torch import Tensor, nn

from pn_fairseq.norms.core.checks import (
    advice_on_momentum,
    check_input,
    check_positive,
    check_whole,
)
from pn_fairseq.norms.core.compiled import handle_of
from pn_fairseq.norms.core.layer_scale import LayerScale
from pn_fairseq.norms.core.nested import over_tokens
from pn_fairseq.norms.core.sharding import is_distributed, register

_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def no_fast_path(module: nn.Module, args: tuple) -> None:
    """A hook that does nothing: see :class:`ChannelNorm`. A lambda could not be pickled."""


class ChannelNorm(nn.Module):
    """A norm over activations. One without state defines :meth:`normalize`.

    Args:
        num_features: number of channels C.
        eps: added to the second moment before the root, here and in layer-scale.
        affine: if True, the norm has the parameters that :attr:`learned` names. The other
            parameters are None.
        layer_scale_groups: groups of the :class:`LayerScale` in front; 0: none.
        batch_first: activations are (B, T, C) instead of (T, B, C), as in
            ``torch.nn.TransformerEncoderLayer``.

    Raises:
        ValueError: an argument or an input does not fit; the message holds its value.
    """

    #: Whether a token's y in training depends on other, also later, tokens of the batch: "never",
    #: "always", or "at first": until warm-ups and schedules end, and after that only in channels
    #: where a factor is clipped.
    mixes_tokens = "never"

    #: What training normalizes by, in words, such as "batch". Norms with the same words form one
    #: kind: where slow tests are left out, the first registered norm of each kind still runs the
    #: long ones.
    normalizes_by = "token"

    #: Which of ``weight`` (gain, initially 1) and ``bias`` (initially 0), (C,), the norm has; no
    #: bias without a weight.
    learned: tuple[str, ...] = ("weight", "bias")

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        layer_scale_groups: int = 0,
        batch_first: bool = False,
        **unknown,
    ):
        if unknown:
            advice = advice_on_momentum(unknown, inspect.signature(type(self)).parameters)
            raise TypeError(
                f"{type(self).__name__} has no argument {', '.join(map(repr, unknown))}{advice}"
            )
        super().__init__()
        self.num_features = check_whole("num_features", num_features, minimum=1)
        self.eps = check_positive("eps", eps)
        self.affine = affine
        self.layer_scale_groups = layer_scale_groups
        self.batch_first = batch_first
        self.layer_scale = LayerScale(num_features, layer_scale_groups, eps, batch_first)
        if not self.is_torch_layer_norm():
            # In evaluation, torch.nn.TransformerEncoderLayer takes a fast path: it reads weight,
            # bias and eps of its norms and computes LayerNorm itself, unless a submodule has a
            # hook. This hook is on layer_scale: most norms do not call that module, so the hook
            # costs no time.
            self.layer_scale.register_forward_pre_hook(no_fast_path)
        for name in ("weight", "bias"):
            parameter = None
            if affine and name in self.learned:
                parameter = nn.Parameter(torch.empty(num_features))
            self.register_parameter(name, parameter)
        self.handle = handle_of(self)
        self._built_on_meta = torch.get_default_device().type == "meta"
        ChannelNorm.reset_parameters(self)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.handle = handle_of(self)

    def __init_subclass__(cls, **keywords):
        """Put the arguments that a constructor passes on as ``**common`` into its signature, for
        ``help`` and :mod:`.registry`.

        Raises:
            TypeError: :attr:`learned` is a bias without a weight.
        """
        super().__init_subclass__(**keywords)
        if "bias" in cls.learned and "weight" not in cls.learned:
            raise TypeError(f"{cls.__name__}: learned = {cls.learned} is a bias without a weight")
        own = list(inspect.signature(cls.__init__).parameters.values())[1:]
        named = {parameter.name: parameter for parameter in own if parameter.kind not in _REST}
        if any(parameter.kind == parameter.VAR_KEYWORD for parameter in own):
            base = next(base for base in cls.__mro__[1:] if "__init__" in vars(base))
            for name, parameter in inspect.signature(base).parameters.items():
                if name not in named and parameter.kind not in _REST:
                    named[name] = parameter.replace(kind=parameter.KEYWORD_ONLY)
        cls.__signature__ = inspect.Signature(list(named.values()))

    # In a model that exports methods, as fairseq's models do, TorchScript would compile the hook of
    # ``layer_scale`` and the property.
    __jit_ignored_attributes__ = ("layer_scale",)
    __jit_unused_properties__ = ("_is_hf_initialized", "gain")

    @property
    def gain(self) -> Tensor | None:
        """The factor of each channel, (C,).

        Norms read the gain here, because in a converted model it may be 1 + ``weight``.
        """
        return self.weight

    def reset_parameters(self) -> None:
        """Set ``weight`` to 1 and ``bias`` to 0."""
        if self.gain is not None:
            nn.init.ones_(self.gain)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def _is_hf_initialized(self) -> bool:
        return self.__dict__.get("_is_hf_initialized", False)

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, value: bool) -> None:
        """``from_pretrained`` of transformers sets this attribute of every module, after it has
        given uninitialized memory to the tensors that the checkpoint lacks. While it does so,
        torch.nn.init leaves the other tensors unchanged, also in the reset below.
        """
        self.__dict__["_is_hf_initialized"] = value
        if self._built_on_meta:
            self._built_on_meta = False
            self.reset_parameters()

    def set_num_updates(self, num_updates: int) -> None:
        """Tell the norm how many optimizer updates are completed."""

    def is_torch_layer_norm(self) -> bool:
        """Whether y is LayerNorm with ``weight``, ``bias`` and ``eps``, so that torch may compute
        it instead.
        """
        return False

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Normalize ``x``, (T, B, C) or (N, C), or (B, T, C) with ``batch_first``.

        ``padding_mask`` is (B, T), in both layouts, or (N,); bool, True = padding. Padding is
        normalized like other tokens and enters no statistic, except with the variant ``release`` of
        some norms. The result has the shape and dtype of ``x`` and is contiguous for all strides of
        ``x``, like the result of ``torch.nn.LayerNorm``; only ``none`` without layer-scale returns
        ``x`` itself. The arithmetic is float64 for a float64 ``x``, otherwise float32.

        ``x`` may be a nested tensor, (B, *, C) without padding, for both values of ``batch_first``.
        """
        if x.is_nested:
            return over_tokens(self.forward, x, padding_mask)
        check_input(x, padding_mask, self.num_features, self.batch_first)
        if type(x) is not Tensor and is_distributed(x):
            register()
        return self.normalize(self.layer_scale(x) if self.layer_scale_groups else x)

    def normalize(self, h: Tensor) -> Tensor:
        """y for the layer-scaled activations h, (..., C), in their shape and type, for each token
        by itself.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        arguments = inspect.signature(type(self)).parameters
        kept = []
        for name, value in vars(self).items():
            if name in arguments and value is not None:
                kept.append(f"{name}={value}")
        return ", ".join(kept)
