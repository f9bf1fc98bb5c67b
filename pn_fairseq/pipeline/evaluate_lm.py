"""``pn evaluate-lm``: the perplexity of a language model's run."""

import contextlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pn_fairseq import __version__
from pn_fairseq.common.command import ArgumentParser, UserError, without_fairseqs_log
from pn_fairseq.common.files import only_writer, write_lines, write_settings
from pn_fairseq.pipeline import RUN_HELP, add_norm_module, outdated, stamp
from pn_fairseq.pipeline.runs import Run, open_run


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a model on a split of its data."""

    nll: float  # negative log-likelihood per token, in nats
    subset: str
    tokens: int  # number of tokens in the split, ends of lines included
    unit: str  # word, subword or byte
    vocabulary: int  # size of fairseq's dictionary
    unknown: int  # how many of the tokens are <unk>
    block: int  # longest input of the model
    # tokens of a block that are only context; with 0 the first token of a block has no context
    context: int
    causal: bool  # False if the model sees the tokens that it predicts
    # nll with batch statistics, without dropout; None without norms that use them
    batch_nll: float | None = None
    # fairseq's sample_break_mode: none for blocks of one length, eos for sentences
    blocks: str = "none"

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nll, 700))

    @property
    def batch_perplexity(self) -> float:
        """The perplexity with batch statistics; NaN without norms that use them."""
        return math.nan if self.batch_nll is None else math.exp(min(self.batch_nll, 700))

    @property
    def bits(self) -> float:
        """Bits per token."""
        return self.nll / math.log(2)

    @property
    def signature(self) -> str:
        parts = {
            "tokens": self.tokens,
            "unit": self.unit,
            "vocabulary": self.vocabulary,
            "unk": self.unknown,
            "block": self.block,
            "context": self.context,
            "stride": self.block - self.context,
        }
        if self.blocks != "none":
            parts["blocks"] = self.blocks
        parts["causal"] = "yes" if self.causal else "NO"
        parts["version"] = __version__
        return "|".join(["ppl", *(f"{name}:{value}" for name, value in parts.items())])

    def text(self) -> str:
        """The printed lines."""
        caution = "" if self.causal else ", not causal: the model sees the tokens that it predicts"
        unit = "byte: " if self.unit == "byte" else "token:"
        lines = [
            f"perplexity:     {self.perplexity:.2f}{caution}",
            f"bits per {unit} {self.bits:.4f}",
        ]
        if self.batch_nll is not None:
            lines.append(
                "with statistics of the batch, as in training: perplexity "
                f"{self.batch_perplexity:.2f}"
            )
        lines.append(f"signature:      {self.signature}")
        return "\n".join(lines)


def result_file(run: Path, subset: str, context: int = 0) -> Path:
    """The file with a perplexity: one for each subset and number of context tokens."""
    return run / "evaluate_lm" / f"{subset}{f'-context{context}' if context else ''}.json"


def read_perplexity(run: Path, subset: str = "test", context: int = 0) -> Perplexity:
    """The perplexity that :func:`evaluate` wrote."""
    file = result_file(run, subset, context)
    try:
        values = json.loads(file.read_text("utf-8"))
        return Perplexity(**{name: values[name] for name in Perplexity.__dataclass_fields__})
    except FileNotFoundError:
        raise UserError(f"there is no {file} (pn evaluate-lm writes it)") from None
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{file} cannot be read ({error}); pn evaluate-lm writes it again"
        ) from None


def evaluate(
    run: Run,
    checkpoint: Path,
    subset: str = "test",
    context: int = 0,
    norm_module: str | None = None,
) -> Perplexity:
    """Score all tokens of a split, in blocks as in training, each with ``context`` tokens of
    context.
    """
    index = run.bin / f"{subset}.idx"
    if not index.is_file():
        raise UserError(f"the data has no '{subset}': there is no {index}")
    output = result_file(run.path, subset, context)
    inputs = {
        "checkpoint": [checkpoint],
        "data": [index, index.with_suffix(".bin"), *sorted(run.bin.glob("dict.*"))],
    }
    wanted = stamp.made_from({"subset": subset, "context": context}, inputs)
    stamp_file = stamp.stamp_of(output)
    if stamp.done("evaluate-lm", stamp_file, wanted, output):
        with contextlib.suppress(UserError):  # a damaged file
            return read_perplexity(run.path, subset, context)
    with only_writer(output):
        result = measure(run, checkpoint, subset, context, norm_module)
        stamp_file.unlink(missing_ok=True)
        shown = {
            "perplexity": result.perplexity,
            "bits_per_token": result.bits,
            "signature": result.signature,
        }
        write_lines(output, [json.dumps({**shown, **asdict(result)}, indent=1)])
        recorded = outdated.record_of_result([checkpoint], run.checkpoints)
        write_settings(stamp_file, wanted | recorded)
    return result


def measure(
    run: Run, checkpoint: Path, subset: str, context: int, norm_module: str | None
) -> Perplexity:
    """The computation of :func:`evaluate`."""
    from pn_fairseq.common.checkpoints import load_checkpoint
    from pn_fairseq.models.from_checkpoint import with_norm_module
    from pn_fairseq.models.recalibrate_checkpoint import ModelWithData
    from pn_fairseq.norms.core.base import running_norms
    from pn_fairseq.pipeline.checks import open_data

    state = with_norm_module(load_checkpoint(checkpoint), norm_module)
    with without_fairseqs_log():
        loaded = ModelWithData(state, str(checkpoint), run.bin)
    block = loaded.cfg.task.tokens_per_sample
    blocks = loaded.cfg.task.sample_break_mode or "none"
    if not 0 <= context < block:
        raise UserError(
            f"--context-window {context} must be at least 0 and less than the blocks of {block} "
            "tokens"
        )
    if context and blocks != "none":
        raise UserError(
            "--context-window is for blocks of one length; this run has "
            f"task.sample_break_mode={blocks}"
        )
    loaded.task.args.tokens_per_sample = block - context
    max_tokens = max(run.get("dataset.max_tokens", 0), block)
    norms = running_norms(loaded.model)
    batch_nll = None
    with without_fairseqs_log():
        loaded.task.load_dataset(subset)
        nll, tokens, unknown = score(loaded, subset, context, max_tokens)
        for norm in norms:
            norm.train()
        if norms:
            batch_nll, _, _ = score(loaded, subset, context, max_tokens)
    dictionary = loaded.task.target_dictionary
    data = open_data(run.bin, subset, dictionary)  # keeps data.sizes alive
    expected = int(data.sizes.sum())
    if tokens != expected:
        raise UserError(f"{tokens} of the {expected} tokens of {subset} were scored")
    symbols = dictionary.symbols[dictionary.nspecial :]
    words = [word for word in symbols if "madeupword" not in word]
    return Perplexity(
        nll=nll,
        subset=subset,
        tokens=tokens,
        unit=unit_of(words),
        vocabulary=len(dictionary),
        unknown=unknown,
        block=block,
        context=context,
        # the attribute masked belongs to tensorized attention
        causal=all(getattr(module, "masked", True) for module in loaded.model.modules()),
        batch_nll=batch_nll,
        blocks=blocks,
    )


def unit_of(words: Sequence[str]) -> str:
    """What the words of a dictionary are: byte (two hexadecimal digits), subword or word."""
    if words and all(re.fullmatch("[0-9a-f]{2}", word) for word in words):
        return "byte"
    return "subword" if any(word.endswith("@@") or word[0] == "▁" for word in words) else "word"


def score(loaded, subset: str, context: int, max_tokens: int) -> tuple[float, int, int]:
    """Negative log-likelihood per token in nats, number of tokens, and number of <unk> tokens.

    ``loaded`` is a :class:`~pn_fairseq.models.recalibrate_checkpoint.ModelWithData`.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from pn_fairseq.fairseq_patches.adaptive_loss import losses

    task, model, dictionary = loaded.task, loaded.model, loaded.task.target_dictionary
    try:
        batches = task.eval_lm_dataloader(
            task.dataset(subset),
            num_workers=0,
            max_tokens=max_tokens,
            max_positions=model.max_positions(),
            context_window=context,
        )
    except ValueError as error:  # blocks that are too long: fairseq_patches/eval_lm_blocks.py
        raise UserError(f"{subset}: {error}") from error
    adaptive = getattr(model.decoder, "adaptive_softmax", None)
    total, tokens, unknown = 0.0, 0, 0
    with torch.no_grad():
        for sample in loaded.on_device(batches, len(batches), "scoring"):
            output, target = model(**sample["net_input"])[0].float(), sample["target"]
            if adaptive:
                loss = losses(adaptive, output, target, dictionary.pad()).sum()
            else:
                scores, words = output.flatten(0, -2), target.flatten()
                loss = cross_entropy(scores, words, ignore_index=dictionary.pad(), reduction="sum")
            total += loss.double().item()
            tokens += int(target.ne(dictionary.pad()).sum())
            unknown += int(target.eq(dictionary.unk()).sum())
    return total / max(tokens, 1), tokens, unknown


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="pn evaluate-lm",
        description="Print a language model's perplexity over all tokens of a split, with a "
        "signature that states what was counted. For a model with running statistics, also print "
        "the perplexity with the statistics of the batch, as in training, to show the difference "
        "from evaluation.",
        epilog="Writes DIR/evaluate_lm/SUBSET.json (with context: SUBSET-contextN.json), and does "
        "nothing if this file exists for the same checkpoint and data. pn report compares runs by "
        "SUBSET.json.",
    )
    add = parser.add_argument
    add("--run", type=Path, required=True, metavar="DIR", help=RUN_HELP)
    averaged = "default DIR/checkpoints/averaged.pt (written by pn average)"
    add("--checkpoint", type=Path, metavar="FILE", help=averaged)
    add("--subset", default="test", metavar="NAME", help="test (default) or valid")
    context = (
        "each block except the first starts with N tokens of context, which are not scored "
        "(default: 0)"
    )
    add("--context-window", type=int, default=0, metavar="N", help=context)
    add_norm_module(parser)
    args = parser.parse_args(argv)
    run = open_run(args.run, same_data=True)
    if run.get("task._name") != "language_modeling":
        raise UserError(
            f"'{args.run}' is not the run of a language model (task {run.get('task._name')})"
        )
    (checkpoint,) = run.checkpoint_files(args.checkpoint and [args.checkpoint], "evaluate-lm")
    print(evaluate(run, checkpoint, args.subset, args.context_window, args.norm_module).text())
