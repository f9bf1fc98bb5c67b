"""``scripts/evaluate_lm.sh``: the perplexity of a language model's run, and a comparison of runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pn_fairseq import __version__
from pn_fairseq.common.command import ArgumentParser, UserError, command
from pn_fairseq.common.files import atomic_write, checksum
from pn_fairseq.pipeline.runs import RUN, Run, open_run

#: What has to be the same for two perplexities to be compared.
SAME = ("tokens", "unit", "vocabulary", "unknown", "subset", "context", "blocks")


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a model on a split of its data."""

    nll: float  # negative log-likelihood per token, in nats
    subset: str
    tokens: int  # all of the split's, ends of lines included
    unit: str  # what a token is: word or subword
    vocabulary: int  # size of fairseq's dictionary
    unknown: int  # how many of the tokens are <unk>
    block: int  # longest input of the model
    context: int  # tokens of a block that are only context; without them its first token has none
    causal: bool  # False where the model sees the tokens that it predicts
    batch_nll: float | None = None  # nll with the statistics of the batches, without dropout; None without such norms
    made: str = ""  # checksums of the checkpoint and of the data
    blocks: str = "none"  # fairseq's sample_break_mode: none are blocks of one length, eos sentences

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nll, 700))

    @property
    def batch_perplexity(self) -> float:
        """The same with the statistics of the batches; NaN without such norms."""
        return math.nan if self.batch_nll is None else math.exp(min(self.batch_nll, 700))

    @property
    def bits(self) -> float:
        """Bits per token."""
        return self.nll / math.log(2)

    @property
    def signature(self) -> str:
        parts = {
            **{"tokens": self.tokens, "unit": self.unit, "vocabulary": self.vocabulary, "unk": self.unknown},
            **{"block": self.block, "context": self.context, "stride": self.block - self.context},
            **({} if self.blocks == "none" else {"blocks": self.blocks}),
            **{"causal": "yes" if self.causal else "NO", "version": __version__},
        }
        return "|".join(["ppl", *(f"{name}:{value}" for name, value in parts.items())])

    def text(self) -> str:
        """The lines that are printed."""
        caution = "" if self.causal else ", not causal: the model sees the tokens that it predicts"
        lines = [
            f"perplexity:     {self.perplexity:.2f}{caution}",
            f"bits per token: {self.bits:.4f}",
            f"signature:      {self.signature}",
        ]
        if self.batch_nll is not None:
            lines.insert(2, f"with statistics of the batch, as in training: perplexity {self.batch_perplexity:.2f}")
        return "\n".join(lines) + "\n"


def result_file(run: Path, subset: str) -> Path:
    return run / "evaluate_lm" / f"{subset}.json"


def read_perplexity(run: Path, subset: str = "test") -> Perplexity:
    """What :func:`evaluate` wrote."""
    file = result_file(run, subset)
    try:
        values = json.loads(file.read_text("utf-8"))
        return Perplexity(**{name: values[name] for name in Perplexity.__dataclass_fields__ if name in values})
    except FileNotFoundError:
        raise UserError(f"there is no {file} (scripts/evaluate_lm.sh writes it)") from None
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} cannot be read ({error}); scripts/evaluate_lm.sh writes it anew") from None


def different(one: Perplexity, other: Perplexity) -> str:
    """Why two perplexities cannot be compared; "" if they can."""
    names = [name for name in SAME if getattr(one, name) != getattr(other, name)]
    return ", ".join(f"{name} {getattr(one, name)} and {getattr(other, name)}" for name in names)


def evaluate(run: Run, checkpoint: Path, subset: str = "test", context: int = 0) -> Perplexity:
    """Score all tokens of a split, in blocks as in training, with ``context`` tokens of context for each block."""
    import torch

    from pn_fairseq.common.checkpoints import load_checkpoint
    from pn_fairseq.common.command import without_fairseqs_log
    from pn_fairseq.models.from_checkpoint import model_settings_of, one_line, settings_of
    from pn_fairseq.norms.base import running_norms
    from pn_fairseq.pipeline.data.binarize import lengths

    index = run.bin / f"{subset}.idx"
    if not index.is_file():
        raise UserError(f"the data has no '{subset}': there is no {index}")
    made = f"{checksum(checkpoint)} {checksum(index.with_suffix('.bin'))} {subset} {context}"
    kept = result_file(run.path, subset)
    if kept.is_file() and (found := read_perplexity(run.path, subset)).made == made:
        return found
    try:
        state = load_checkpoint(checkpoint)
        cfg = settings_of(state, str(checkpoint))
        cfg.task.data = str(run.bin)
        block = cfg.task.tokens_per_sample
        blocks = cfg.task.sample_break_mode or "none"
        if not 0 <= context < block:
            raise UserError(f"--context-window {context} must be at least 0 and less than the blocks of {block} tokens")
        if context and blocks != "none":
            raise UserError(
                f"--context-window is for blocks of one length; this run has task.sample_break_mode={blocks}"
            )
        cfg.task.tokens_per_sample = block - context
        from fairseq import tasks

        with without_fairseqs_log():
            task = tasks.setup_task(cfg.task)
            model = task.build_model(model_settings_of(state, str(checkpoint)), from_checkpoint=True)
            model.load_state_dict(state["model"], strict=True, model_cfg=cfg.model)
            task.load_dataset(subset)
    except (KeyError, RuntimeError, FileNotFoundError) as error:
        raise UserError(f"{checkpoint} and {run.bin} do not fit each other ({one_line(error)})") from error
    if torch.cuda.is_available():
        model.cuda()

    def batches() -> Iterator[dict]:
        try:
            return task.eval_lm_dataloader(
                task.dataset(subset),
                max_tokens=max(run.get("dataset.max_tokens", 0), block) or 2048,
                max_positions=model.max_positions(),
                num_workers=0,
                context_window=context,
            )
        except ValueError as error:  # blocks that are too long: fairseq_patches/eval_lm_blocks.py
            raise UserError(f"{subset}: {error}") from error

    model.eval()
    norms, batch_nll = running_norms(model), None
    with without_fairseqs_log():
        nll, tokens, unknown = score(model, task, batches())
        for norm in norms:
            norm.train()
        if norms:
            batch_nll = score(model, task, batches())[0]
    if tokens != sum(lengths(index)):
        raise UserError(f"{tokens} of the {sum(lengths(index))} tokens of {subset} were scored")
    dictionary = task.target_dictionary
    result = Perplexity(
        nll=nll,
        subset=subset,
        tokens=tokens,
        unit="subword" if any(word.endswith("@@") or word[0] == "▁" for word in dictionary.symbols) else "word",
        vocabulary=len(dictionary),
        unknown=unknown,
        block=block,
        context=context,
        causal=all(getattr(module, "masked", True) for module in model.modules()),  # of tensorized attention
        batch_nll=batch_nll,
        made=made,
        blocks=blocks,
    )
    kept.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(kept.with_suffix(".txt"), "w") as file:
        file.write(result.text())
    with atomic_write(kept, "w") as file:
        shown = {"perplexity": result.perplexity, "bits_per_token": result.bits, "signature": result.signature}
        file.write(json.dumps({**shown, **asdict(result)}, indent=1) + "\n")
    return result


def score(model, task, batches) -> tuple[float, int, int]:
    """Negative log-likelihood per token in nats, number of tokens, and how many of them are <unk>."""
    import torch
    from fairseq.utils import move_to_cuda
    from torch.nn.functional import cross_entropy

    from pn_fairseq.pipeline.data.parallel import progress

    pad, unk = task.target_dictionary.pad(), task.target_dictionary.unk()
    total, tokens, unknown = 0.0, 0, 0
    with torch.no_grad():
        for sample in progress(batches, unit="batch"):
            if next(model.parameters()).is_cuda:
                sample = move_to_cuda(sample)
            target = sample["target"].flatten()
            output = model(**sample["net_input"])[0].float()
            adaptive = getattr(model.decoder, "adaptive_softmax", None)
            if adaptive is None:
                loss = cross_entropy(output.flatten(0, 1), target, ignore_index=pad, reduction="sum")
            else:
                head, *tails = zip(*adaptive(output, sample["target"].contiguous()), strict=True)
                loss = cross_entropy(*head, ignore_index=pad, reduction="sum")
                loss = loss + sum(cross_entropy(*tail, reduction="sum") for tail in tails if tail[0] is not None)
            total += loss.double().item()
            tokens += int(target.ne(pad).sum())
            unknown += int(target.eq(unk).sum())
    return total / max(tokens, 1), tokens, unknown


def compare(runs: Sequence[Path], subset: str) -> str:
    """The perplexities of runs as a table; an error if they are over different tokens."""
    from tabulate import tabulate

    from pn_fairseq.common.files import short_names

    found = dict(zip(short_names(runs), (read_perplexity(run, subset) for run in runs), strict=True))
    first, one = next(iter(found.items()))
    for name, other in found.items():
        if why := different(one, other):
            raise UserError(f"the perplexities of {first} and {name} cannot be compared: they have {why}")
    rows = [
        [name, f"{each.perplexity:.2f}", f"{each.bits:.4f}", "" if each.causal else "not causal", each.signature]
        for name, each in found.items()
    ]
    headers = ["", "perplexity", "bits per token", "", "signature"]
    return tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True)


@command("evaluate_lm.sh")
def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="scripts/evaluate_lm.sh",
        description="Print a language model's perplexity over all tokens of a split, with a signature that says what "
        "was counted. For a model with running statistics, also print the perplexity with the statistics of the "
        "batch, as in training, to show the difference from evaluation.",
        epilog="Writes DIR/evaluate_lm/SUBSET.json and .txt. --compare reads them, and refuses perplexities that are "
        "over different tokens or with different context.",
    )
    add = parser.add_argument
    add("--run", type=Path, metavar="DIR", help=RUN)
    averaged = "default DIR/checkpoints/averaged.pt (scripts/average.sh makes it)"
    add("--checkpoint", type=Path, metavar="FILE", help=averaged)
    add("--subset", default="test", metavar="NAME", help="test (default) or valid")
    context = "each block but the first starts with N tokens of context, which are not scored (default: 0)"
    add("--context-window", type=int, default=0, metavar="N", help=context)
    add("--compare", type=Path, nargs="+", metavar="DIR", help="runs that were evaluated")
    args = parser.parse_args(argv)
    if args.compare:
        print(compare(args.compare, args.subset))
        return
    run = open_run(args.run, same_data=True)
    if run.get("task._name") != "language_modeling":
        raise UserError(f"'{args.run}' is not the run of a language model (task {run.get('task._name')})")
    (checkpoint,) = run.checkpoint_files(args.checkpoint and [args.checkpoint])
    print(evaluate(run, checkpoint, args.subset, args.context_window).text(), end="")
