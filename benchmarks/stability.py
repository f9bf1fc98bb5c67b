"""PN's nu under stress, with and without its guard: ``python -m benchmarks.stability``."""

from tests.norms.test_stability import SPIKE, Stress, growing, one_large


def one_spike(step, x, dy):
    return x, (dy * 1e4 if step == SPIKE else dy)


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
        guarded, unguarded = (max(float(nu.abs().max()) for nu in values) for values in (stress.nu, stress.unguarded))
        acted = int(stress.norm.diagnostics()["guarded_steps"])
        print(f"{name:46} {guarded:12.3g} {unguarded:12.3g}  {stress.finite!s:6}  {acted}")


if __name__ == "__main__":
    main()
