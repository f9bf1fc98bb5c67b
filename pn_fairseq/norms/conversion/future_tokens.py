"""A warning about norms that show a causal decoder its future tokens.

In training, a norm that mixes tokens (:attr:`.ChannelNorm.mixes_tokens`) computes the output of a
token from statistics of its batch, which include later tokens of the sentence.
"""

import warnings
from itertools import accumulate

from torch import nn

from pn_fairseq.norms.conversion.mask_arguments import attends
from pn_fairseq.norms.core.channel import ChannelNorm

#: Base classes of fairseq's decoders that generate from left to right, and of those that do not.
_CAUSAL = "FairseqIncrementalDecoder"
_NOT_CAUSAL = "FairseqNATDecoder"

#: Attributes that state whether a Hugging Face module, such as an attention, is causal.
_MARKS = ("is_causal", "is_decoder")

#: Endings of the class names of Hugging Face's language models.
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")


def mixes_by_warmup(norm: nn.Module) -> bool:
    """Whether ``norm`` mixes tokens only in its psi warm-up, as PN does."""
    has_warmup = hasattr(norm, "psi_warmup_updates") and not hasattr(norm, "window")
    return has_warmup and norm.mixes_tokens == "at first"


def mixes(norm: nn.Module) -> bool:
    """Whether ``norm``, with its settings, mixes tokens at any time."""
    if mixes_by_warmup(norm):
        return norm.psi_warmup_updates > 0
    return norm.mixes_tokens != "never"


def in_decoders(model: nn.Module, norms: dict[str, ChannelNorm]) -> list[str]:
    """Those of ``norms``, by their names in ``model``, that mix tokens in a causal decoder."""
    return [name for name, norm in norms.items() if mixes(norm) and is_in_causal_part(model, name)]


def leak(names: list[str], norm: ChannelNorm) -> str:
    """A description of the leak through the norms ``names``, of which ``norm`` is the first."""
    when = ""
    if mixes_by_warmup(norm):
        when = f"for the {norm.psi_warmup_updates} updates of the psi warm-up, "
    elif norm.mixes_tokens == "at first":
        when = "at first, "
    are = f"{names[0]} is"
    compute = "computes"
    if len(names) > 1:
        are = f"{names[0]} and {len(names) - 1} other norms are"
        compute = "compute"
    return (
        f"{are} in a decoder and, {when}in training, {compute} with statistics of all tokens of a "
        "batch: a causal decoder sees future tokens through them (a leak), which it lacks when it "
        "generates."
    )


def warn_of_future_tokens(model: nn.Module, norms: dict[str, ChannelNorm], stacklevel: int) -> None:
    """Give one warning for :func:`convert_norms` if some of ``norms`` are :func:`in_decoders`."""
    names = in_decoders(model, norms)
    if not names:
        return
    first = norms[names[0]]
    remedies = []
    if any(_is_called_encoder(name) for name, _ in model.named_modules()):
        remedies.append(f"convert only the encoder ({_only_encoder(norms.keys() - set(names))})")
    if mixes_by_warmup(first):
        remedies.append("give psi_warmup_updates=0")
    remedies.append(
        "take a norm that never mixes tokens, such as 'rms' (docs/norms.md, Properties)"
    )
    advice = remedies[-1]
    if len(remedies) > 1:
        advice = f"{', '.join(remedies[:-1])}, or {advice}"
    warnings.warn(
        f"{leak(names, first)} {advice[0].upper()}{advice[1:]}.",
        stacklevel=stacklevel,
    )


def _only_encoder(elsewhere: set[str]) -> str:
    """How to convert the norms ``elsewhere``, which are in no decoder."""
    prefixes = {name.partition("encoder.")[0] for name in elsewhere if "encoder." in name}
    if len(prefixes) != 1 or not all("encoder." in name for name in elsewhere):
        return "only="
    return f"only='{prefixes.pop()}encoder.*'"


def _is_called_encoder(name: str) -> bool:
    """Whether the name of a module, such as "model.encoder.norm", says that it is in an encoder."""
    return any("encoder" in key and "decoder" not in key for key in name.split("."))


def is_in_causal_part(model: nn.Module, name: str) -> bool:
    """Whether the module ``name`` of ``model`` is in a decoder.

    Decoders are those of torch and fairseq, the parts of a Hugging Face model whose attentions say
    that they are causal, its language models, and modules that are called a decoder and attend to
    an encoder.
    """
    keys = name.split(".")[:-1]
    path = dict(zip(accumulate(keys, getattr, initial=model), ["", *keys], strict=True))
    verdict = None
    is_apart = False
    for module, key in reversed(path.items()):
        if isinstance(module, (nn.TransformerDecoder, nn.TransformerDecoderLayer)):
            return True
        bases = {cls.__name__ for cls in type(module).__mro__}
        if _CAUSAL in bases:
            return _NOT_CAUSAL not in bases
        if verdict is None and not is_apart:
            verdict = _verdict(module)
        is_apart = is_apart or _is_called_encoder(key) or _has_attention_of_its_own(module)
    if verdict is None and not _is_called_encoder(name):
        is_language_model = any(type(module).__name__.endswith(_LANGUAGE_MODELS) for module in path)
        verdict = is_language_model or any(map(_is_own_decoder, path.values(), path))
    return bool(verdict)


def _is_own_decoder(key: str, module: nn.Module) -> bool:
    """Whether ``module``, which its parent calls ``key``, is called a decoder, and it or a part of
    it attends to other tokens.
    """
    for name in (key.lower(), type(module).__name__.lower()):
        if "decoder" in name and "encoder" not in name:
            return any(attends(part) for part in module.modules())
    return False


def _verdict(module: nn.Module) -> bool | None:
    """Whether ``module`` or a module in it says that it is causal; None: they say nothing."""
    values = [getattr(part, mark, None) for part in module.modules() for mark in _MARKS]
    marks = [value for value in values if isinstance(value, bool)]
    return any(marks) if marks else None


def _has_attention_of_its_own(module: nn.Module) -> bool:
    kinds = (nn.MultiheadAttention, nn.ModuleList)
    return any(isinstance(part, kinds) for part in module.modules())
