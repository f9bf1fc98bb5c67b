"""PN's nu under stress, with and without its guard: ``python -m benchmarks.stability``."""

import torch

from pn_fairseq.norms import PowerNorm

CHANNELS = 8
TOKENS = 256
ALPHA = 0.9
SPIKE = 60


class Stress:
    """Steps of PN on noise, with a disturbance from step SPIKE on, and the same recursion
    without ``max(0, .)``.
    """

    def __init__(self, disturb, steps: int = 120):
        generator = torch.Generator().manual_seed(0)
        self.norm = PowerNorm(CHANNELS, alpha_fwd=ALPHA, alpha_bwd=ALPHA)
        self.norm.collecting = True
        unguarded = torch.zeros(CHANNELS, dtype=torch.float64)
        self.psi2 = []
        self.nu = []
        self.unguarded = []
        self.finite = True
        for step in range(steps):
            x = torch.randn(TOKENS, CHANNELS, generator=generator)
            dy = torch.randn(TOKENS, CHANNELS, generator=generator) + 0.3 * x
            x, dy = disturb(step, x, dy)
            x.requires_grad_()
            psi = (self.norm.running_psi2 + 1e-5).sqrt()
            normalized = (x.detach() / psi).double()
            y = self.norm(x)
            y.backward(dy)
            gamma_moment = normalized.square().mean(0)
            lambda_moment = (dy.double() * normalized).mean(0)
            kept = 1 - (1 - ALPHA) * gamma_moment
            unguarded = unguarded * kept + (1 - ALPHA) * lambda_moment
            self.psi2.append(self.norm.running_psi2.clone())
            self.nu.append(self.norm.nu.clone())
            self.unguarded.append(unguarded)
            numbers = (y, x.grad, self.norm.weight.grad, self.norm.bias.grad, *self.norm.buffers())
            self.finite &= all(bool(number.isfinite().all()) for number in numbers)


def growing(step, x, dy):
    """Activations grow 8x a step for ten steps."""
    if SPIKE <= step < SPIKE + 10:
        x = x * 8.0 ** (step - SPIKE + 1)
    return x, dy


def one_large(step, x, dy):
    if step == SPIKE:
        x = x * 100.0
    return x, dy


def one_spike(step, x, dy):
    if step == SPIKE:
        dy = dy * 1e4
    return x, dy


def _largest(vectors: list[torch.Tensor]) -> float:
    return max(float(vector.abs().max()) for vector in vectors)


def main() -> None:
    disturbances = {
        "none": lambda step, x, dy: (x, dy),
        "activations grow 8-fold in each of ten steps": growing,
        "one batch 100 times larger": one_large,
        "one gradient 10,000 times larger": one_spike,
    }
    print(f"{'disturbance':46} {'largest |nu|':>12} {'unguarded':>12}  finite  guarded steps")
    for name, disturb in disturbances.items():
        stress = Stress(disturb)
        guarded = _largest(stress.nu)
        unguarded = _largest(stress.unguarded)
        acted = int(stress.norm.diagnostics()["guarded_steps"])
        print(f"{name:46} {guarded:12.3g} {unguarded:12.3g}  {stress.finite!s:6}  {acted}")


if __name__ == "__main__":
    main()
