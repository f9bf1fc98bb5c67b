"""Where the norms of a layer go: before, after or inside its sublayers, for every norm.

x is the residual stream, F a sublayer (self-attention, cross-attention or feed-forward network)
with its dropout, N a norm with the padding mask, and l = 1 ... L the number of a layer. A file of
``--norm-module`` adds a placement with :func:`register_placement`.
"""

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pn_fairseq.common.errors import unknown
from pn_fairseq.models.inner_norms import NormedInput

#: Name of a placement -> its class.
PLACEMENTS: dict[str, type["Pre"]] = {}
_SCALED = r"\b(fc1|fc2|v_proj|out_proj)\."  # parameters that ``deep`` and ``sub`` scale


def register_placement(name: str):
    """Decorate a subclass of :class:`Pre` to make it the placement ``name``."""

    def register(cls):
        if name in PLACEMENTS:
            raise ValueError(f"the placement {name!r} exists already")
        if PLACEMENTS and not issubclass(cls, Pre):
            raise ValueError(f"the placement {name!r} is not a subclass of {__name__}.Pre")
        PLACEMENTS[name] = cls
        return cls

    return register


def find_placement(name: str) -> type["Pre"]:
    """The class of the placement ``name``, or ValueError."""
    if name not in PLACEMENTS:
        raise ValueError(unknown("placement", name, PLACEMENTS))
    return PLACEMENTS[name]


@dataclass(frozen=True)
class Depth:
    """The side of a placement, "encoder" or "decoder", and the layers of both (no encoder: 0)."""

    side: str
    encoder: int
    decoder: int

    @property
    def layers(self) -> int:
        return self.encoder if self.side == "encoder" else self.decoder


@register_placement("pre")
class Pre:
    """x + F(N(x)); after the last layer N(x). Wang et al. 2019, arXiv 1906.01787.

    The base of every placement. It belongs to the layer with the ``number`` l; :meth:`enter` and
    :meth:`leave` are called once for all layers of a side.
    """

    input_norm = False  #: whether a norm follows the embeddings
    last_norm = True  #: whether a norm follows the last layer
    folds = True  #: whether ``pn fold`` can fold the norms into the projections after them
    #: whether a layer computes the same in a model of another depth (``--encoder-layers-to-keep``)
    prunes = True

    def __init__(self, depth: Depth, number: int = 1):
        self.depth, self.number = depth, number

    def equip(self, layer: nn.Module, build) -> None:
        """Add further norms, from ``build(channels)``, to a layer of fairseq that has its own
        norms, and scale its initial weights.
        """

    def enter(self, x: Tensor) -> Tensor:
        """The stream (T, B, C or more) from the embedded input x (T, B, C)."""
        return x

    def before(self, layer: nn.Module, sublayer: str, x: Tensor, mask: Tensor | None) -> Tensor:
        """Input of a sublayer ("self_attn", "encoder_attn" or "final", the feed-forward network)
        from the stream.
        """
        return _norm(layer, sublayer)(x, mask)

    def after(
        self,
        layer: nn.Module,
        sublayer: str,
        x: Tensor,
        output: Tensor,
        mask: Tensor | None,
        entry: Tensor,
    ):
        """The stream after a sublayer with the output F; ``x`` is the stream before it,
        ``entry`` before the layer.
        """
        return layer.residual_connection(output, x)

    def leave(self, x: Tensor, norm: nn.Module | None, mask: Tensor | None) -> Tensor:
        """Output of the last layer from the stream; ``norm`` is the norm after the last layer."""
        return x if norm is None else norm(x, mask)


def _norm(layer: nn.Module, sublayer: str, position: str = "") -> nn.Module:
    return getattr(layer, f"{sublayer}{position}_layer_norm")


@register_placement("post")
class Post(Pre):
    """N(x + F(x)). Vaswani et al. 2017; fairseq without ``--encoder-normalize-before``."""

    last_norm = False
    folds = False

    def before(self, layer, sublayer, x, mask):
        return x

    def after(self, layer, sublayer, x, output, mask, entry):
        return _norm(layer, sublayer)(layer.residual_connection(output, x), mask)


def scale_initial_weights(layer: nn.Module, factor: float, names: str) -> None:
    """Multiply the parameters whose names match the regular expression by ``factor``."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if re.search(names, name):
                parameter.mul_(factor)


@register_placement("deep")
class Deep(Post):
    """DeepNorm: N(αx + F(x)), with smaller initial weights. Wang et al. 2022, arXiv 2203.00555.

    With N_e encoder layers and M_d decoder layers, α is 0.81 (N_e⁴ M_d)^(1/16) in the encoder and
    (3 M_d)^(1/4) in the decoder. The weights of fc1, fc2, v_proj and out_proj are multiplied by
    1.15 (N_e⁴ M_d)^(-1/16) in the encoder and by (12 M_d)^(-1/4) in the decoder. In a model that
    has only a decoder, α is (2 M_d)^(1/4), and the weights are multiplied by (8 M_d)^(-1/4).
    """

    prunes = False

    def __init__(self, depth, number=1):
        super().__init__(depth, number)
        if depth.side == "encoder":
            root = (depth.encoder**4 * depth.decoder) ** (1 / 16)
            self.alpha, self.factor = 0.81 * root, 1.15 / root
            return
        has_encoder = depth.encoder > 0
        self.alpha = ((3 if has_encoder else 2) * depth.decoder) ** 0.25
        self.factor = ((12 if has_encoder else 8) * depth.decoder) ** -0.25

    def equip(self, layer, build):
        scale_initial_weights(layer, self.factor, _SCALED)

    def after(self, layer, sublayer, x, output, mask, entry):
        return super().after(layer, sublayer, self.alpha * x, output, mask, entry)


@register_placement("resi-dual")
class ResiDual(Post):
    """Two streams x and r; both start as the embedded input. A sublayer computes x ← N(x + F(x))
    and r ← r + F(x), with the old x in F; after the last layer x + N(r). Xie et al. 2023, arXiv
    2304.14802.

    The streams are halves of the channels: (T, B, 2C).
    """

    last_norm = True

    def enter(self, x):
        return torch.cat((x, x), dim=-1)

    def before(self, layer, sublayer, x, mask):
        return x.chunk(2, dim=-1)[0]

    def after(self, layer, sublayer, x, output, mask, entry):
        x, r = x.chunk(2, dim=-1)
        x = super().after(layer, sublayer, x, output, mask, entry)
        return torch.cat((x, r + output), dim=-1)

    def leave(self, x, norm, mask):
        x, r = x.chunk(2, dim=-1)
        return x + super().leave(r, norm, mask)


@register_placement("b2t")
class BottomToTop(Post):
    """Post-norm, and the layer's input is also added before its last norm; with L layers in a side,
    its weight matrices are multiplied by 1 / √L, as in the authors' code. Takase et al. 2023, arXiv
    2206.00330.
    """

    def equip(self, layer, build):
        scale_initial_weights(layer, self.depth.layers**-0.5, r"^(?!.*layer_norm).*weight$")

    def after(self, layer, sublayer, x, output, mask, entry):
        x = entry + x if sublayer == "final" else x
        return super().after(layer, sublayer, x, output, mask, entry)


@register_placement("sandwich")
class Sandwich(Pre):
    """x + N₂(F(N₁(x))); after the last layer N(x). Ding et al. 2021 (CogView), arXiv 2105.13290."""

    def equip(self, layer, build):
        for sublayer in ("self_attn", "encoder_attn", "final"):
            if getattr(layer, f"{sublayer}_layer_norm", None) is not None:
                layer.add_module(f"{sublayer}_output_layer_norm", build(layer.embed_dim))

    def after(self, layer, sublayer, x, output, mask, entry):
        output = _norm(layer, sublayer, "_output")(output, mask)
        return super().after(layer, sublayer, x, output, mask, entry)


@register_placement("peri")
class Peri(Sandwich):
    """Sandwich, and a norm on the embedded input. Kim et al. 2025, arXiv 2502.02732."""

    input_norm = True


@register_placement("sub")
class Sub(Pre):
    """Sub-LN: pre-norm, and a second norm before out_proj of the self-attention and before fc2,
    with larger initial weights. Wang et al. 2022, arXiv 2210.06423.

    With N_e encoder layers and M_d decoder layers, the weights of fc1, fc2, v_proj and out_proj are
    multiplied by √(ln(3 M_d) · ln(2 N_e) / 3) in the encoder and by √ln(3 M_d) in the decoder; in a
    model that has only a decoder by √ln(2 M_d). The weights of the cross-attention are not
    multiplied.
    """

    def equip(self, layer, build):
        encoder_layers, decoder_layers = self.depth.encoder, self.depth.decoder
        factor_squared = math.log((3 if encoder_layers else 2) * decoder_layers)
        if self.depth.side == "encoder":
            factor_squared *= math.log(2 * encoder_layers) / 3
        scale_initial_weights(layer, math.sqrt(factor_squared), r"^(?!encoder_attn).*" + _SCALED)
        attention = layer.self_attn
        attention.out_proj = NormedInput(build(layer.embed_dim), attention.out_proj)
        # otherwise torch's own function reads the weight of out_proj
        attention.skip_embed_dim_check = True
        layer.fc2 = NormedInput(build(layer.fc2.in_features), layer.fc2)


@register_placement("mix")
class Mix(Pre):
    """``post`` in the first ⌊L / 4⌋ layers, ``pre`` in the others; after the last layer N(x). Li et
    al. 2024, arXiv 2412.13795.
    """

    folds = prunes = False

    def __init__(self, depth, number=1):
        super().__init__(depth, number)
        is_post = number <= depth.layers // 4
        self.inner = Post(depth, number) if is_post else Pre(depth, number)
        self.before, self.after = self.inner.before, self.inner.after


@register_placement("scaled")
class Scaled(Pre):
    """x + F(N(x) / √l); after the last layer N(x). Sun et al. 2025, arXiv 2502.05795."""

    folds = prunes = False

    def before(self, layer, sublayer, x, mask):
        return super().before(layer, sublayer, x, mask) / math.sqrt(self.number)
