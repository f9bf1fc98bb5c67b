"""The model ``transformer_lm_pn``: fairseq's pre-norm decoder as a language model, with a choice
of norms.
"""

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from fairseq.modules import AdaptiveInput
from fairseq.utils import eval_str_list, safe_getattr

from pn_fairseq.fairseq_patches.run_settings import writable
from pn_fairseq.models.initial_weights import add_flags, initial_weights
from pn_fairseq.models.norm_options import NormOptions
from pn_fairseq.models.normed_model import NormedModel
from pn_fairseq.models.transformer_pn import TransformerPNConfig, TransformerPNDecoder


def keep_block_length(args, task) -> None:
    """Write ``max_target_positions`` into the settings of a model, and so into its checkpoints.

    This is the longest block that the model accepts: ``--max-target-positions``, else
    ``--tokens-per-sample``.
    """
    if safe_getattr(args, "max_target_positions", None) is None:
        with writable(args):
            args.max_target_positions = (
                safe_getattr(task.args, "max_target_positions") or task.args.tokens_per_sample
            )


def bands(name: str, cutoff: str, largest: int) -> list[int]:
    """The ends of the bands of an adaptive softmax or input, ascending numbers of at most
    ``largest``.

    Raises:
        ValueError: ``cutoff``, the setting ``name``, contains anything else.
    """
    ends = []
    for end in cutoff.strip("[] ").split(","):
        ends.append(int(end) if end.strip().isdecimal() else -1)
    numbers = [0, *ends, largest + 1]
    if sorted(set(numbers)) != numbers:
        raise ValueError(
            f"--{name.replace('_', '-')} {cutoff} must be ascending numbers, as in 20000,40000, of "
            f"at most {largest}, which the size of the vocabulary allows"
        )
    return ends


@register_model("transformer_lm_pn")
class TransformerPNLanguageModel(NormedModel, TransformerLanguageModel):
    """fairseq's decoder-only transformer, pre-norm, with the norms of ``--decoder-norm`` in every
    place.

    A legacy model in fairseq's terms, without a registered dataclass, like ``transformer_pn``.
    """

    def __init__(self, decoder):
        super().__init__(decoder)
        self.use_norms(decoder.cfg.norms)

    @classmethod
    def add_args(cls, parser):
        gen_parser_from_dataclass(parser, TransformerLanguageModelConfig(), delete_default=True)
        NormOptions.add_args(parser, encoder=False)
        add_flags(parser)

    @classmethod
    def build_model(cls, args, task):
        """Build the model.

        Raises:
            ValueError: the settings request something that this model does not support, or
                contradict each other.
        """
        keep_block_length(args, task)
        for name in ("character_embeddings", "layernorm_embedding"):
            if safe_getattr(args, name, False):
                raise ValueError(
                    f"transformer_lm_pn has no --{name.replace('_', '-')}; leave the flag out"
                )
        if not args.decoder_normalize_before:
            raise ValueError(
                "transformer_lm_pn is a pre-norm model: it needs decoder_normalize_before=True"
            )
        if args.decoder_layers_to_keep:
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        if args.adaptive_input and not args.adaptive_input_cutoff:
            raise ValueError("--adaptive-input needs --adaptive-input-cutoff")
        cutoffs = ["adaptive_softmax_cutoff"]
        if args.adaptive_input:
            cutoffs.append("adaptive_input_cutoff")
        for name in cutoffs:
            cutoff = getattr(args, name)
            if cutoff:
                bands(name, cutoff, len(task.target_dictionary))  # raises if cutoff does not fit
        if args.tie_adaptive_weights:
            _check_tied(args)
        cfg = TransformerPNConfig.from_namespace(args)
        cfg.norms = NormOptions.from_args(args, encoder=False)
        with initial_weights(args):
            embedding = _embedding(cls, args, task)
            return cls(
                TransformerPNDecoder(cfg, task.target_dictionary, embedding, no_encoder_attn=True)
            )


def _check_tied(args) -> None:
    """Check what fairseq asserts: the adaptive softmax can share its weights only with an adaptive
    input of the same shape.
    """
    if not args.adaptive_input:
        raise ValueError("--tie-adaptive-weights needs --adaptive-input")
    same = {
        "adaptive_input_factor": "adaptive_softmax_factor",
        "adaptive_input_cutoff": "adaptive_softmax_cutoff",
        "decoder_input_dim": "decoder_output_dim",
    }
    for of_input, of_output in same.items():
        given, needed = getattr(args, of_input), getattr(args, of_output)
        if given != needed:
            raise ValueError(
                f"--tie-adaptive-weights needs the same {of_input}={given} and {of_output}={needed}"
            )


def _embedding(cls, args, task):
    if not args.adaptive_input:
        return cls.build_embedding(args, task.source_dictionary, args.decoder_input_dim)
    return AdaptiveInput(
        len(task.source_dictionary),
        task.source_dictionary.pad(),
        args.decoder_input_dim,
        args.adaptive_input_factor,
        args.decoder_embed_dim,
        eval_str_list(args.adaptive_input_cutoff, type=int),
        safe_getattr(args, "quant_noise_pq", 0),
        safe_getattr(args, "quant_noise_pq_block_size", 8),
    )
