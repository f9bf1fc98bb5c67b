"""The model ``tensorized_lm_pn``: the tensorized transformer (Ma et al. 2019) as a causal language
model.

The model of the authors' code is not causal (docs/language_modeling.md); ``--tensorized-unmasked``
replicates it.
"""

import logging
import math
from argparse import BooleanOptionalAction
from functools import partial
from itertools import pairwise

import torch
from fairseq.models import FairseqDecoder, FairseqLanguageModel, register_model
from fairseq.modules import AdaptiveSoftmax, FairseqDropout
from torch import Tensor, nn
from torch.nn import functional as F

from pn_fairseq.models.initial_weights import add_flags, initial_weights
from pn_fairseq.models.layers import LayerStack, wrap_layer
from pn_fairseq.models.norm_options import NormOptions
from pn_fairseq.models.normed_model import NormedModel
from pn_fairseq.models.tensorized_attention import TensorizedAttention
from pn_fairseq.models.transformer_lm_pn import bands, keep_block_length

logger = logging.getLogger(__name__)

#: Settings that must be at least 1.
SIZES = ("decoder_embed_dim", "decoder_ffn_embed_dim", "decoder_layers", "core_rank", "cores")

#: Standard deviation of the initial weights.
STD = 0.02


class TensorizedLayer(nn.Module):
    """Block-term attention and a feed-forward network, each with a residual connection and a norm.

    Pre-norm: y = x + dropout(f(norm(x))). Post-norm: y = norm(x + dropout(f(x))).
    """

    def __init__(self, args, norms: NormOptions):
        super().__init__()
        dim, inner = args.decoder_embed_dim, args.decoder_ffn_embed_dim
        self.post_norm = args.post_norm
        self.attention = TensorizedAttention(
            dim,
            args.core_rank,
            args.max_target_positions,
            args.cores,
            args.core_softmax,
            masked=not args.tensorized_unmasked,
            std=STD,
        )
        self.fc1, self.fc2 = nn.Linear(dim, inner), nn.Linear(inner, dim)
        for linear in (self.fc1, self.fc2):
            nn.init.normal_(linear.weight, std=STD)
            nn.init.zeros_(linear.bias)
        self.attention_norm = norms.build("decoder", dim, heads=1)
        self.final_layer_norm = norms.build("decoder", dim, heads=1)
        name = type(self).__name__
        self.dropout = FairseqDropout(args.dropout, module_name=name)
        self.activation_dropout = FairseqDropout(args.activation_dropout, module_name=name)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        content_bias: Tensor,
        position_bias: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """``x`` (T, B, C); the other arguments go to the attention."""
        inner = x if self.post_norm else self.attention_norm(x, mask)
        output = self.attention(inner, positions, content_bias, position_bias, mask)
        x = x + self.dropout(output)
        if self.post_norm:
            x = self.attention_norm(x, mask)
        inner = x if self.post_norm else self.final_layer_norm(x, mask)
        hidden = self.activation_dropout(F.relu(self.fc1(inner)))
        x = x + self.dropout(self.fc2(hidden))
        return self.final_layer_norm(x, mask) if self.post_norm else x


class TiedAdaptiveSoftmax(AdaptiveSoftmax):
    """fairseq's adaptive softmax over the rows of one embedding, with biases but without
    projections.

    The first ``cutoff[0]`` tokens and one cluster for each further band are the head; a band is its
    cluster's tail.
    """

    def __init__(self, embedding: nn.Embedding, cutoff: str):
        nn.Module.__init__(self)
        self.vocab_size = embedding.num_embeddings
        ends = bands("adaptive_softmax_cutoff", cutoff, self.vocab_size - 1)
        self.cutoff = [*ends, self.vocab_size]
        self.embedding = embedding
        self.bias = nn.Parameter(torch.zeros(self.vocab_size))
        self.clusters = nn.Linear(embedding.embedding_dim, len(ends))
        nn.init.normal_(self.clusters.weight, std=STD)
        nn.init.zeros_(self.clusters.bias)
        self.dropout_module = nn.Identity()
        self.lsm = nn.LogSoftmax(dim=1)

    def _band(self, first: int, end: int, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding.weight[first:end], self.bias[first:end])

    def head(self, x: Tensor) -> Tensor:
        return torch.cat([self._band(0, self.cutoff[0], x), self.clusters(x)], dim=-1)

    @property
    def tail(self) -> list:
        return [partial(self._band, *band) for band in pairwise(self.cutoff)]

    def upgrade_state_dict_named(self, state_dict, name):
        """Accept weights without a ``version``, unlike fairseq's method."""


class TensorizedDecoder(LayerStack, FairseqDecoder):
    """Embedding, layers and an output layer that shares the embedding; full or adaptive softmax,
    with biases.

    It is not an incremental decoder of fairseq: generation computes the whole prefix for each
    token.
    """

    def __init__(self, args, norms: NormOptions, dictionary):
        super().__init__(dictionary)
        dim, self.length = args.decoder_embed_dim, args.max_target_positions
        self.padding_idx = dictionary.pad()
        self.embed_tokens = nn.Embedding(len(dictionary), dim, self.padding_idx)
        nn.init.normal_(self.embed_tokens.weight, std=STD)
        with torch.no_grad():
            self.embed_tokens.weight[self.padding_idx].zero_()
        self.embed_scale = math.sqrt(dim)
        self.register_buffer("positions", sinusoids(self.length, dim), persistent=False)
        self.content_bias = nn.Parameter(torch.empty(args.core_rank).normal_(std=STD))
        self.position_bias = nn.Parameter(torch.empty(args.core_rank).normal_(std=STD))
        self.dropout = FairseqDropout(args.dropout, module_name=type(self).__name__)
        self.layers = nn.ModuleList()
        for _ in range(args.decoder_layers):
            self.layers.append(wrap_layer(TensorizedLayer(args, norms), args))
        if norms.decoder_norm_last and not args.decoder_final_norm:
            raise ValueError("--decoder-norm-last needs --decoder-final-norm")
        self.layer_norm = None
        if args.decoder_final_norm:
            self.layer_norm = norms.build("decoder", dim, heads=1, last=True)
        self.adaptive_softmax = self.output_bias = None
        cutoff = args.adaptive_softmax_cutoff
        if cutoff:
            self.adaptive_softmax = TiedAdaptiveSoftmax(self.embed_tokens, cutoff)
        else:
            self.output_bias = nn.Parameter(torch.zeros(len(dictionary)))

    def extract_features(self, prev_output_tokens, encoder_out=None, **_):
        """Features, (B, T, C), and a dict as from fairseq's decoders.

        Raises:
            ValueError: ``prev_output_tokens``, (B, T), exceeds T_max positions.
        """
        time = prev_output_tokens.size(1)
        if time > self.length:
            raise ValueError(
                f"a block of {time} tokens is longer than the model's --tokens-per-sample "
                f"{self.length}"
            )
        mask = self.mask_of(prev_output_tokens)
        x = self.embed_scale * self.embed_tokens(prev_output_tokens)
        x = self.layer_input(self.dropout(x).transpose(0, 1))
        positions = self.layer_input(self.dropout(self.positions[:time].to(x)))
        for layer in self.layers:
            x = layer(x, positions, self.content_bias, self.position_bias, mask)
        if self.layer_norm is not None:
            x = self.layer_norm(x, mask)
        return x.transpose(0, 1), {"attn": [None]}

    def output_layer(self, features: Tensor, **_) -> Tensor:
        """Logits, (B, T, V); for an adaptive softmax the features themselves."""
        if self.adaptive_softmax is not None:
            return features
        return F.linear(features, self.embed_tokens.weight, self.output_bias)

    def max_positions(self) -> int:
        return self.length


def sinusoids(length: int, dim: int) -> Tensor:
    """Position vectors, (length, dim): sines, then cosines, of the distances length - 1, ..., 0
    to the block's end.
    """
    distance = torch.arange(length - 1, -1, -1.0)
    angles = distance[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :dim]


@register_model("tensorized_lm_pn")
class TensorizedLanguageModel(NormedModel, FairseqLanguageModel):
    """The tensorized transformer with the norms of ``--decoder-norm``; a legacy model like
    ``transformer_pn``.
    """

    def __init__(self, decoder: TensorizedDecoder, norms: NormOptions):
        super().__init__(decoder)
        self.use_norms(norms)

    @classmethod
    def add_args(cls, parser):
        add = parser.add_argument
        integer = {"type": int, "metavar": "N"}
        probability = {"type": float, "metavar": "P"}
        yes_or_no = {"action": BooleanOptionalAction}
        switch = {"action": "store_true"}
        add("--decoder-embed-dim", help="channels", **integer)
        add("--decoder-ffn-embed-dim", help="channels within the feed-forward network", **integer)
        add("--decoder-layers", help="number of layers", **integer)
        add(
            "--dropout",
            help="probability of dropout on embeddings, positions and residual branches",
            **probability,
        )
        add(
            "--activation-dropout",
            help="the same after the activation (default: that of --dropout)",
            **probability,
        )
        add(
            "--core-rank",
            help="R, the size of a core and of queries, keys and values (default: 40)",
            **integer,
        )
        add("--cores", help="h, the number of cores, whose mean is used (default: 1)", **integer)
        add(
            "--core-softmax",
            help="softmax over the core, as in the paper; --no-core-softmax: the core itself, as "
            "in the authors' code",
            **yes_or_no,
        )
        add(
            "--post-norm",
            help="norms after the residual connections (Ma et al. 2019) instead of before the "
            "sublayers (PowerNorm)",
            **yes_or_no,
        )
        add("--decoder-final-norm", help="a norm after the last layer", **yes_or_no)
        add(
            "--adaptive-softmax-cutoff",
            help="ends of the bands of an adaptive softmax, as in 20000,40000; needs --criterion "
            "adaptive_loss",
            metavar="N,N",
        )
        add(
            "--tensorized-unmasked",
            help="leave the causal mask out, as the authors' code does: the model sees the tokens "
            "that it predicts. For replication only",
            **switch,
        )
        add("--checkpoint-activations", help="recompute activations in the backward pass", **switch)
        add(
            "--offload-activations", help="the same, with the inputs of layers on the CPU", **switch
        )
        add(
            "--min-params-to-wrap",
            help="smallest number of parameters of a layer that FSDP shards",
            **integer,
        )
        NormOptions.add_args(parser, encoder=False)
        add_flags(parser, attention=False)

    @classmethod
    def build_model(cls, args, task):
        """Build the model.

        Raises:
            ValueError: a setting does not fit; the message contains its value.
        """
        keep_block_length(args, task)
        for name in SIZES:
            value = getattr(args, name)
            if value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if args.tensorized_unmasked:
            logger.warning(
                "--tensorized-unmasked: this model is not causal, it sees the tokens that it "
                "predicts, and its perplexity is not that of a language model"
            )
        norms = NormOptions.from_args(args, encoder=False)
        if norms.decoder_norm_placement != "pre" or norms.qk_norm:
            raise ValueError(
                "tensorized_lm_pn has only --post-norm, no --decoder-norm-placement and no "
                "--qk-norm"
            )
        with initial_weights(args):
            return cls(TensorizedDecoder(args, norms, task.target_dictionary), norms)
