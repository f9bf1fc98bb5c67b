"""A trained ``transformer_pn`` as two graphs, an encoder and a decoder step, that need neither
fairseq nor this package.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from pn_fairseq.common.checkpoints import CheckpointError
from pn_fairseq.models.fold_checkpoint import Difference, compare, fold_checkpoint
from pn_fairseq.models.from_checkpoint import changed, model_of, model_settings_of
from pn_fairseq.models.transformer_pn import TransformerPNModel

#: Names of the results of the graphs; the inputs have the names of the arguments below.
ENCODER_RESULTS = ("memory_keys", "memory_values", "padding")
DECODER_RESULTS = ("logits", "new_keys", "new_values")


class Positions(nn.Module):
    """fairseq's positional embedding as a table, from which a graph for any length can read."""

    def __init__(self, embedding: nn.Module, length: int):
        super().__init__()
        self.padding_idx = embedding.padding_idx
        tokens = torch.full((1, length + 1), self.padding_idx + 1)
        tokens[0, 0] = self.padding_idx
        rows = embedding(tokens)[0].detach()
        before = rows.new_zeros(self.padding_idx, rows.size(1))
        self.register_buffer("table", torch.cat([before, rows]))

    def forward(self, tokens: Tensor, incremental_state: dict | None = None) -> Tensor:
        sentences, length = tokens.shape
        if incremental_state is not None:
            row = self.table.narrow(0, self.padding_idx + length, 1)
            return row.expand(sentences, 1, -1)
        real = tokens.ne(self.padding_idx).long()
        positions = real.cumsum(1) * real + self.padding_idx
        return nn.functional.embedding(positions, self.table)


class EncoderGraph(nn.Module):
    """The encoder, and the keys and values that the attention of each decoder layer computes from
    its output.
    """

    def __init__(self, model: TransformerPNModel):
        super().__init__()
        self.encoder = model.encoder
        self.attentions = nn.ModuleList(layer.encoder_attn for layer in model.decoder.layers)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``tokens`` (B, T) int64.

        Keys and values (layers, B, heads, T, C / heads); padding (B, T), True = padding.
        """
        result = self.encoder.forward_scriptable(tokens)
        memory = result["encoder_out"][0]
        keys, values = [], []
        for attention in self.attentions:
            sizes = (attention.num_heads, attention.head_dim)
            for projection, heads in ((attention.k_proj, keys), (attention.v_proj, values)):
                heads.append(projection(memory).unflatten(2, sizes).permute(1, 2, 0, 3))
        padding = result["encoder_padding_mask"][0]
        return torch.stack(keys).contiguous(), torch.stack(values).contiguous(), padding


class DecoderGraph(nn.Module):
    """One step of the decoder."""

    def __init__(self, model: TransformerPNModel):
        super().__init__()
        self.decoder = model.decoder

    def forward(
        self,
        token: Tensor,
        memory_keys: Tensor,
        memory_values: Tensor,
        padding: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``token`` (B, 1), the last one of each prefix; ``keys``, ``values`` (layers, B, heads, t,
        C / heads) of the t tokens before it, t >= 0. Logits (B, V) of the next token; keys and
        values of t + 1 tokens.
        """
        past = token.new_zeros(token.size(0), keys.size(3))
        prefix = torch.cat([past, token], 1)  # only its length matters
        state: dict = {}
        layers = self.decoder.layers
        inputs = (layers, memory_keys, memory_values, keys, values)
        for layer, memory_key, memory_value, key, value in zip(*inputs, strict=True):
            of_memory = {
                "prev_key": memory_key,
                "prev_value": memory_value,
                "prev_key_padding_mask": padding,
            }
            layer.encoder_attn._set_input_buffer(state, of_memory)
            layer.self_attn._set_input_buffer(state, {"prev_key": key, "prev_value": value})
        memory = memory_keys[0].permute(2, 0, 1, 3).flatten(2)  # only its shape matters
        encoder_out = {"encoder_out": [memory], "encoder_padding_mask": [padding]}
        logits, _ = self.decoder(prefix, encoder_out, state)
        cached = [layer.self_attn._get_input_buffer(state) for layer in layers]
        new_keys = torch.stack([layer["prev_key"] for layer in cached])
        new_values = torch.stack([layer["prev_value"] for layer in cached])
        return logits[:, -1], new_keys, new_values


def exportable(state: dict, name: str) -> tuple[TransformerPNModel, TransformerPNModel, str]:
    """The model of the checkpoint ``state``, the same model with positions from a table and folded
    norms, and a line about these norms.

    Raises:
        CheckpointError: ``state`` is not a checkpoint of ``transformer_pn``, or uses something that
            the graphs do not support.
    """
    model = _without_checkpointing(state, name)
    if not isinstance(model, TransformerPNModel):
        raise CheckpointError(
            f"{name}: its model is not one of transformer_pn's, which can be exported"
        )
    option = ""
    if model.decoder.adaptive_softmax is not None:
        option = "--adaptive-softmax-cutoff"
    elif any(layer.encoder_attn is None for layer in model.decoder.layers):
        option = "--no-cross-attention"
    if option:
        raise CheckpointError(f"{name}: a model that was trained with {option} cannot be exported")
    try:
        state, outcomes, number, _ = fold_checkpoint(state, name)
        line = f"{number} of {len(outcomes)} norms folded"
    except CheckpointError as reason:
        line = f"no norms folded: {reason}"
    folded = _without_checkpointing(state, name).requires_grad_(False)
    for side, length in zip((folded.encoder, folded.decoder), folded.max_positions(), strict=True):
        if side.embed_positions is not None:
            side.embed_positions = Positions(side.embed_positions, length)
    return model, folded, line


def _without_checkpointing(state: dict, name: str) -> nn.Module:
    """The model of the checkpoint ``state``, without activation checkpointing."""
    settings = model_settings_of(state, name)
    settings = changed(settings, checkpoint_activations=False, offload_activations=False)
    return model_of(settings, state["model"], name)


@torch.no_grad()
def export_graphs(model: TransformerPNModel) -> tuple[ExportedProgram, ExportedProgram]:
    """Encoder and decoder step of a model from :func:`exportable`, for any number of sentences and
    any length.
    """
    encoder, decoder = EncoderGraph(model).eval(), DecoderGraph(model).eval()
    tokens = torch.full((3, 5), 4)
    memory = encoder(tokens)
    layers, batch, heads, _, channels = memory[0].shape
    past = torch.zeros(layers, batch, heads, 2, channels)
    of_batch, of_state = {0: Dim.AUTO, 1: Dim.AUTO}, {1: Dim.AUTO, 3: Dim.AUTO}
    shapes = ({0: Dim.AUTO}, of_state, of_state, of_batch, of_state, of_state)
    inputs = (tokens[:, :1], *memory, past, past.clone())
    return (
        torch.export.export(encoder, (tokens,), dynamic_shapes=(of_batch,), strict=True),
        torch.export.export(decoder, inputs, dynamic_shapes=shapes, strict=True),
    )


def save_onnx(
    encoder: ExportedProgram, decoder: ExportedProgram, folder: Path
) -> tuple[Callable, Callable]:
    """Write ``encoder.onnx`` and ``decoder.onnx``; return both as functions of tensors that
    onnxruntime computes.
    """
    import onnxruntime

    def run(session, *inputs: Tensor) -> list[Tensor]:
        names = [tensor.name for tensor in session.get_inputs()]
        given = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        return [torch.from_numpy(value) for value in session.run(None, given)]

    functions, level = [], logging.root.manager.disable
    logging.disable(logging.WARNING)  # onnxscript logs every operator
    try:
        for name, program, results in (
            ("encoder", encoder, ENCODER_RESULTS),
            ("decoder", decoder, DECODER_RESULTS),
        ):
            file = folder / f"{name}.onnx"
            torch.onnx.export(program, output_names=results, verbose=False).save(file)
            functions.append(partial(run, onnxruntime.InferenceSession(file)))
    finally:
        logging.disable(level)
    return tuple(functions)


def save_pt2(
    encoder: ExportedProgram, decoder: ExportedProgram, folder: Path
) -> tuple[Callable, Callable]:
    """Write ``encoder.pt2`` and ``decoder.pt2``; return both, as torch loads them, as functions of
    tensors.
    """
    files = folder / "encoder.pt2", folder / "decoder.pt2"
    for file, program in zip(files, (encoder, decoder), strict=True):
        torch.export.save(program, file)
    return tuple(torch.export.load(file).module() for file in files)


def compare_graphs(model: TransformerPNModel, encoder: Callable, decoder: Callable) -> Difference:
    """How much the logits of the two graphs differ from those of ``model`` in fairseq."""

    def graphs(src_tokens: Tensor, _, prev_output_tokens: Tensor) -> tuple[Tensor]:
        """Logits (B, t, V) after each token of the prefixes ``prev_output_tokens`` (B, t), step
        by step.
        """
        memory = encoder(src_tokens)
        layers, batch, heads, _, channels = memory[0].shape
        keys = values = torch.zeros(layers, batch, heads, 0, channels)
        steps = []
        for token in prev_output_tokens.split(1, dim=1):
            logits, keys, values = decoder(token.contiguous(), *memory, keys, values)
            steps.append(logits)
        return (torch.stack(steps, 1),)

    return compare(model, graphs)
