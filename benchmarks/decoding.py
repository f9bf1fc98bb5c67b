"""Decoding throughput with several norms, plain and folded: ``python -m benchmarks.decoding``.

Models of one size that differ in the encoder's norm translate the same batch in turn with fairseq's
beam search, so that other load on the machine affects all of them. Every hypothesis has the same
number of tokens, which makes the work equal. Printed are medians: sentences per second, and how
many times as many as with LayerNorm in the same round; a second copy of that model shows the noise.
"""

import argparse
import copy
import sys
from functools import partial

import torch
from fairseq.sequence_generator import SequenceGenerator
from torch import nn

from benchmarks import hide_messages, keep_memory
from benchmarks.models import BASE, DEFAULT, SHORT, arch_args, build
from benchmarks.results import in_turns, output_file, positive, report_speeds, settings_of
from pn_fairseq.common.checkpoints import CheckpointError, load_checkpoint
from pn_fairseq.models.architectures import SIZES
from pn_fairseq.models.fold_checkpoint import fold_checkpoint
from pn_fairseq.models.from_checkpoint import make_dictionary, model_of, model_settings_of
from pn_fairseq.norms import recalibrating
from pn_fairseq.norms.core.base import running_norms

FOLDED = " folded"

#: A copy of the base in other memory, which shows the noise.
AGAIN = f"{BASE} again"


def make_source(sentences: int, length: int, vocabulary: int) -> torch.Tensor:
    """Source tokens with about 10% padding on the left, and an end of sentence, as in fairseq."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, vocabulary, (sentences, length), generator=generator)
    tokens[:, -1] = 2
    lengths = length - torch.randint(0, max(1, length // 5), (sentences, 1), generator=generator)
    return tokens.masked_fill(torch.arange(length) < length - lengths, 1)


def random_checkpoints(
    norms: list[str], size: str, vocabulary: int, src: torch.Tensor
) -> dict[str, dict]:
    """A checkpoint with random weights for each of the norms, with running statistics that fit
    them.
    """
    states = {}
    for short in dict.fromkeys([BASE, *norms]):
        arch = f"transformer_{short}_{size}"
        torch.manual_seed(1)
        model = build(arch, vocabulary)
        with torch.no_grad(), recalibrating(model):
            model(src, None, src)
        states[short] = {"cfg": {"model": arch_args(arch)}, "model": model.state_dict()}
    return states


def make_models(states: dict[str, dict]) -> dict[str, nn.Module]:
    """The models of checkpoints, each followed by its folded form if it has one, and a copy of
    the base at the end.
    """
    models = {}
    for name, state in states.items():
        models[name] = model_of(model_settings_of(state, name), state["model"], name)
        if running_norms(models[name]):
            folded, _, _, difference = fold_checkpoint(state, name)
            print(f"{name}{FOLDED}: {difference}", file=sys.stderr)
            models[name + FOLDED] = model_of(model_settings_of(folded, name), folded["model"], name)
    models[AGAIN] = copy.deepcopy(models[BASE])
    return models


def named_file(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE")
    return name, path


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decoding", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--size", choices=list(SIZES), default="iwslt", help="size of the models (default: iwslt)"
    )
    parser.add_argument(
        "--norms", nargs="+", choices=SHORT, default=DEFAULT, help=f"default: {' '.join(DEFAULT)}"
    )
    parser.add_argument(
        "--checkpoint",
        type=named_file,
        action="append",
        metavar="NAME=FILE",
        help=f"a trained model instead of random weights; several, one named {BASE}, with "
        "vocabularies of one size",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=10,
        help="batches that each model translates (default: 10)",
    )
    parser.add_argument("--sentences", type=int, default=32, help="sentences a batch (default: 32)")
    parser.add_argument(
        "--source-length", type=int, default=24, help="tokens a source sentence (default: 24)"
    )
    parser.add_argument(
        "--target-length", type=int, default=24, help="tokens a hypothesis (default: 24)"
    )
    parser.add_argument("--beam", type=int, default=5, help="beam size (default: 5)")
    parser.add_argument(
        "--vocabulary", type=int, default=10000, help="size of the dictionary (default: 10000)"
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="threads (default: torch's)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also write a CSV file")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    if args.checkpoint and BASE not in dict(args.checkpoint):
        parser.error(f"one --checkpoint must be named {BASE}: the others are compared with it")
    return args


def main(argv=None) -> None:
    args = parse(argv)
    keep_memory()
    hide_messages()
    torch.set_num_threads(args.threads)

    try:
        if args.checkpoint:
            states = {name: load_checkpoint(path) for name, path in args.checkpoint}
            args.vocabulary = len(states[BASE]["model"]["encoder.embed_tokens.weight"])
        else:
            src = make_source(args.sentences, args.source_length, args.vocabulary)
            states = random_checkpoints(args.norms, args.size, args.vocabulary, src)
        models = make_models(states)
    except CheckpointError as error:
        print(f"benchmarks.decoding: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    del states

    src = make_source(args.sentences, args.source_length, args.vocabulary).to(args.device)
    sample = {"net_input": {"src_tokens": src, "src_lengths": src.ne(1).sum(1)}}
    dictionary = make_dictionary(args.vocabulary)
    generators = {}
    for name, model in models.items():
        model.make_generation_fast_(need_attn=False)  # as fairseq-generate
        model.to(args.device, getattr(torch, args.dtype))
        generators[name] = SequenceGenerator(
            [model],
            dictionary,
            beam_size=args.beam,
            max_len_b=args.target_length - 1,
            min_len=args.target_length - 1,  # both without the end of sentence
        )

    def turn(name: str, number: int) -> None:
        hypotheses = generators[name].generate([models[name]], sample)
        if args.device != "cpu":
            torch.cuda.synchronize()
        lengths = {len(hypothesis["tokens"]) for beam in hypotheses for hypothesis in beam}
        assert lengths == {args.target_length}, lengths

    # the first allocates
    seconds = in_turns({name: partial(turn, name) for name in models}, args.rounds, warm=1)
    models_of = "checkpoints" if args.checkpoint else f"transformer_*_{args.size}, random weights"
    print(
        f"{models_of}, {args.sentences} sentences of {args.source_length} tokens to "
        f"{args.target_length}, "
        f"beam {args.beam}, {args.dtype}, {args.device}, {args.threads} threads, torch "
        f"{torch.__version__}"
    )
    if args.checkpoint:
        args.size = "checkpoint"
    amounts = [args.sentences] * args.rounds
    report_speeds(
        "sentences",
        amounts,
        seconds,
        BASE,
        settings_of(args),
        dict.fromkeys(models, {}),
        args.output,
    )


if __name__ == "__main__":
    main()
