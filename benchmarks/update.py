"""Would another attention or loss make an update faster? ``python -m benchmarks.update``.

One trainer of ``fairseq-train`` with LayerNorm makes updates on random batches, in turn as fairseq computes them and
with one part replaced. Printed are medians: seconds, and how many times as long as fairseq's update in the same round;
and the norm of the difference of the gradient, divided by the norm of the gradient, with the same weights and
dropout. fairseq's self-attention calls torch's, which takes one fused kernel (``scaled_dot_product_attention``); its
attention to the encoder multiplies matrices by itself.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.modules import MultiheadAttention
from fairseq.trainer import Trainer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import hide_messages, keep_memory
from benchmarks.results import in_turns, output_file, positive, quartiles, ratios, settings_of, write_csv
from benchmarks.training import BATCHES, make_batches, make_trainer, update
from benchmarks.training import parse as parse_training

BASE = "as it is"


class FusedLoss(torch.autograd.Function):
    """fairseq's label-smoothed cross-entropy of logits (N, V) in fewer passes over them: the sum over tokens.

    (1 - eps - e) nll + e Σ_v -log p_v with e = eps / (V - 1) has the gradient p - e - (1 - eps - e) [v = target].
    """

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, eps: float, pad: int) -> tuple[Tensor, Tensor]:
        real, size = target.ne(pad), logits.size(-1)
        p = torch.softmax(logits, -1, dtype=torch.float32)
        log_sum = logits.amax(-1).float() - p.amax(-1).log()
        nll = ((log_sum - logits.gather(1, target[:, None])[:, 0].float()) * real).sum()
        smooth = ((size * log_sum - logits.sum(-1, dtype=torch.float32)) * real).sum()
        ctx.each = eps / (size - 1)
        ctx.of_target, ctx.dtype = 1 - eps - ctx.each, logits.dtype
        ctx.save_for_backward(p, target, real)
        return ctx.of_target * nll + ctx.each * smooth, nll

    @staticmethod
    def backward(ctx, of_loss: Tensor, _) -> tuple:
        p, target, real = ctx.saved_tensors
        weight = (real * of_loss)[:, None]
        # Σ_v over the smoothed part counts p V times: (1 - eps - e) + V e = 1.
        gradient = (p * weight).sub_(weight * ctx.each).scatter_add_(1, target[:, None], -weight * ctx.of_target)
        return gradient.to(ctx.dtype), None, None, None


@contextmanager
def fused_loss(trainer: Trainer) -> Iterator[None]:
    def compute_loss(self, model, output, sample, reduce=True):
        target = model.get_targets(sample, output).view(-1)
        return FusedLoss.apply(output[0].view(target.numel(), -1), target, self.eps, self.padding_idx)

    with patch.object(LabelSmoothedCrossEntropyCriterion, "compute_loss", compute_loss):
        yield


@contextmanager
def own_attention(trainer: Trainer) -> Iterator[None]:
    """fairseq's products of matrices and softmax in self-attention, too."""
    layers = [module for module in trainer.model.modules() if isinstance(module, MultiheadAttention)]
    for layer in layers:
        layer.skip_embed_dim_check = True
    yield
    for layer in layers:
        layer.skip_embed_dim_check = False


@contextmanager
def fused_everywhere(trainer: Trainer) -> Iterator[None]:
    """torch's attention to the encoder, too: it is not taken for ``static_kv``."""
    forward = MultiheadAttention.forward

    def without_static(self, *args, static_kv=False, incremental_state=None, **more):
        static_kv = static_kv and incremental_state is not None
        return forward(self, *args, static_kv=static_kv, incremental_state=incremental_state, **more)

    with patch.object(MultiheadAttention, "forward", without_static):
        yield


@contextmanager
def plain(trainer: Trainer) -> Iterator[None]:
    yield


#: What is replaced.
VARIANTS: dict[str, Callable] = {
    BASE: plain,
    "self-attention by torch without the fused kernel": lambda trainer: sdpa_kernel(SDPBackend.MATH),
    "self-attention by fairseq's products of matrices": own_attention,
    "attention to the encoder by the fused kernel": fused_everywhere,
    "loss in fewer passes": fused_loss,
}


def gradient_of(trainer: Trainer, batch: dict) -> Tensor:
    """The gradient of the loss for all weights, with the same dropout in each call."""
    torch.manual_seed(1)
    trainer.model.zero_grad()
    trainer.criterion(trainer.model, batch)[0].backward()
    return torch.cat([weight.grad.flatten() for weight in trainer.model.parameters() if weight.grad is not None])


def main(argv=None) -> None:
    others = "The other options, such as --dtype and --threads, are those of python -m benchmarks.training."
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.update", description=about, epilog=others)
    parser.add_argument("--rounds", type=positive, default=10, metavar="N", help="updates of each (default: 10)")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also write a CSV file")
    own, words = parser.parse_known_args(argv)
    keep_memory()
    hide_messages()
    args = parse_training([*words, "--rounds", str(own.rounds)])
    torch.set_num_threads(args.threads)
    trainer, batches = make_trainer("ln", args.dtype[0], args), make_batches(args)
    gradients = {}
    for name, replaced in VARIANTS.items():
        with replaced(trainer):
            gradients[name] = gradient_of(trainer, batches[0]).float()
    norm = gradients[BASE].norm()
    differences = {name: float((gradient - gradients[BASE]).norm() / norm) for name, gradient in gradients.items()}

    def work(name: str) -> Callable[[int], None]:
        def run(number: int) -> None:
            with VARIANTS[name](trainer):
                update(trainer, batches[number % BATCHES])

        return run

    seconds = in_turns({name: work(name) for name in VARIANTS}, own.rounds, warm=1)
    rows = []
    for name, taken in seconds.items():
        low, middle, high = ratios(taken, seconds[BASE])
        median, difference = quartiles(taken)[1], differences[name]
        print(f"{name:<50} {median:.3f} s  {middle:.3f} ({low:.3f} to {high:.3f})  gradient {difference:.0e}")
        measured = {"seconds": median, "times": middle, "times_low": low, "times_high": high}
        measured = {key: f"{value:.4g}" for key, value in (measured | {"gradient_difference": difference}).items()}
        rows.append({"update": name, **settings_of(args), "dtype": args.dtype[0], **measured})
    if own.output:
        write_csv(own.output, rows)


if __name__ == "__main__":
    main()
