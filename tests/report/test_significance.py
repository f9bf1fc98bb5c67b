"""Simultaneous comparison with a control, against printed tables, published examples, scipy and
simulations.
"""

import itertools

import numpy as np
import pandas
import pytest
from scipy import stats

from pn_fairseq.report.intervals import Compared
from pn_fairseq.report.measures import LOSS, MEASURES
from pn_fairseq.report.significance import ERROR_RATE, POWER, Design, Interval, families


def table(text: str) -> dict[str, list[float]]:
    """A line for each system: its name, and its values."""
    values = {}
    for line in text.strip().splitlines():
        name, numbers = line.split(":")
        values[name] = [float(number) for number in numbers.split()]
    return values


#: Dunnett 1955, section 4: blood counts of a control group and of animals under two drugs.
BLOOD = table("""
control: 7.40 8.50 7.20 8.24 9.84 8.32
drug A: 9.76 8.80 7.68 9.36
drug B: 12.80 9.68 12.16 9.20 10.55
""")
#: Minutes of recovery under blankets (Westfall et al. 1999; `recovery` of R's package multcomp),
#: one of which is usual.
RECOVERY = table("""
control: 15 13 12 16 16 17 13 13 16 17 17 19 17 15 13 12 16 10 17 12
b1: 13 16 9
b2: 5 8 9
b3: 14 16 16 12 7 12 13 13 9 16 13 18 13 12 13
""")
#: Dunnett 1964, two-sided, 5%, equal numbers of values, by degrees of freedom: 1 to 9 systems and a
#: control.
CRITICAL = table("""
10: 2.23 2.57 2.76 2.89 2.99 3.07 3.14 3.19 3.24
20: 2.09 2.38 2.54 2.65 2.73 2.80 2.86 2.90 2.95
30: 2.04 2.32 2.47 2.58 2.66 2.72 2.77 2.82 2.86
""")


def rows(
    values: dict[str, tuple], own_seeds: bool = False, machine: str = "one"
) -> pandas.DataFrame:
    """Rows of report.csv; every system has the seeds 1, 2, ..., or seeds that no other has."""
    control, *_ = values
    records = []
    for system, scores in values.items():
        for seed, value in enumerate(scores, 1):
            record = {"system": system, "machine": machine, "tokenized": value}
            record["compared with"] = None if system == control else control
            record["seed"] = len(records) if own_seeds else seed
            records.append(record)
    return pandas.DataFrame(records)


def design_of(systems: int, blocks: int) -> Design:
    """A control and other systems, each with a run in every block."""
    return Design(list(itertools.product(range(systems + 1), range(blocks))), 0)


def assert_interval(found: Interval, low: float, high: float, p_value: float, **tolerance) -> None:
    actual = (found.low, found.high, found.p_value)
    assert actual == pytest.approx((low, high, p_value), **tolerance)


def only(frame: pandas.DataFrame):
    (family,), untested = families(frame, "tokenized")
    assert untested == {}
    return family


@pytest.mark.parametrize("values", [BLOOD, RECOVERY])
def test_without_blocks_it_is_dunnetts_test(values):
    """Unequal numbers of values; scipy integrates in another way."""
    family = only(rows(values, own_seeds=True))
    control, *others = values.values()
    result = stats.dunnett(*others, control=control, random_state=1)
    interval = result.confidence_interval(0.95)
    for number, found in enumerate(family.intervals.values()):
        low, high = interval.low[number], interval.high[number]
        assert_interval(found, low, high, result.pvalue[number], abs=5e-3)


def test_published_estimates_of_the_blankets():
    """Bretz, Hothorn and Westfall 2010, "Multiple comparisons using R", section 4.1: estimates
    and standard errors.
    """
    family = only(rows(RECOVERY, own_seeds=True))
    published = {"b1": (-2.1333, 1.6038), "b2": (-7.4667, 1.6038), "b3": (-1.6667, 0.8848)}
    for name, (difference, error) in published.items():
        separate = family.separate[name]
        half = error * stats.t.isf(0.025, 37)
        assert separate.difference == pytest.approx(difference, abs=1e-4)
        assert (separate.high - separate.low) / 2 == pytest.approx(half, abs=1e-3)


@pytest.mark.parametrize("degrees", CRITICAL)
def test_critical_values_are_those_of_dunnetts_table(degrees):
    for systems, value in enumerate(CRITICAL[degrees], 1):
        runs = [(name, "one block") for name in range(systems + 1)]
        design = Design(runs * 3, 0)
        design.degrees = int(degrees)
        assert design.critical() == pytest.approx(value, abs=0.0075)  # printed with two digits


def test_one_system_with_blocks_is_the_paired_t_test():
    values = {"ln": (20.0, 21.5, 19.0, 20.5), "pn": (20.4, 22.5, 19.1, 21.0)}
    family = only(rows(values))
    expected = stats.ttest_rel(values["pn"], values["ln"])
    low, high = expected.confidence_interval(0.95)
    for found in (family.intervals["pn"], family.separate["pn"]):
        assert_interval(found, low, high, expected.pvalue)
    assert list(family.pairs["pn"].values()) == pytest.approx([0.4, 1.0, 0.1, 0.5])


def test_blocks_take_the_effect_of_the_seed_out_of_the_noise():
    """Balanced: the noise is what is left after the means of systems and seeds; effects of seeds
    change nothing.
    """
    table = np.random.default_rng(0).normal(size=(15, 3))
    design = design_of(systems=14, blocks=3)
    differences, deviation = design.fit((table + [5.0, -7.0, 0.0]).ravel())
    means = table.mean(axis=1)
    plain = table - means[:, None]
    residual = plain - plain.mean(axis=0)
    assert design.degrees == 28
    assert deviation == pytest.approx(np.sqrt((residual**2).sum() / 28))
    assert differences == pytest.approx(means[1:] - means[0])
    assert design.errors == pytest.approx(np.sqrt(2 / 3))


def test_blocks_of_several_machines_by_simulation():
    """Machines that change all values, blocks that lack systems, a system that shares no block with
    the control: the differences have no bias, and no true difference is called one in 5% of the
    experiments.
    """
    runs = []
    for name, seed in itertools.product(("ln", "pn", "bn", "rms"), (1, 2, 3)):
        runs.append((name, ("first", seed)))
    for name, seed in (("ln", 1), ("pn", 1), ("ada", 1), ("bn", 4), ("ada", 4)):
        runs.append((name, ("second", seed)))
    for name, seed in itertools.product(("gn", "pn"), (7, 8)):
        runs.append((name, ("third", seed)))
    design, generator = Design(runs, "ln"), np.random.default_rng(3)
    assert design.systems == ["pn", "bn", "rms", "ada", "gn"]
    assert design.degrees == len(runs) - (6 + 7 - 1)  # systems, and blocks but for one
    effects = {"first": 0.0, "second": 9.0, "third": -4.0}
    values = generator.normal(size=(len(runs), 40_000))
    values += np.array([[effects[machine]] for _, (machine, _) in runs])
    differences, deviation = design.fit(values)
    assert differences.mean(axis=1) == pytest.approx(0, abs=0.02)
    assert differences.std(axis=1) == pytest.approx(design.errors, rel=0.02)
    bounds = design.critical() * deviation * design.errors[:, None]
    share = (np.abs(differences) > bounds).any(axis=0).mean()
    assert share == pytest.approx(ERROR_RATE, abs=0.004)


def test_machines_are_blocks():
    """What a machine does to all systems cancels, and a run of a system that no machine compares
    adds nothing.
    """
    values = {"ln": (20.0, 21.5, 19.0), "pn": (20.4, 22.5, 19.1)}
    expected = only(rows(values)).intervals["pn"]
    frame = rows(values)
    third = frame["seed"] == 3
    frame.loc[third, "machine"] = "two"
    frame.loc[third, "tokenized"] += 7
    lonely = rows({"ln": (99.0,)}, machine="three")
    family = only(pandas.concat([frame, lonely]))
    found = family.intervals["pn"]
    assert_interval(found, expected.low, expected.high, expected.p_value)
    assert list(family.pairs["pn"].values()) == pytest.approx([0.4, 1.0, 0.1])
    assert family.blocks == 4


@pytest.mark.parametrize(
    ("difference", "noise", "systems", "planned", "everything"),
    [(1.0, 0.61, 14, 7, 11), (1.0, 0.54, 5, 6, 8), (0.5, 0.54, 5, 19, 27)],
)
def test_blocks_that_find_a_difference(difference, noise, systems, planned, everything):
    """By simulation: the numbers have 80% power, and one block less has not."""

    generator = np.random.default_rng(5)
    for less, enough in ((0, True), (1, False)):
        design = design_of(systems, planned - less)
        critical = stats.t.isf(ERROR_RATE / 2, design.degrees)
        assert (design.detectable(critical) <= difference / noise) == enough
        design = design_of(systems, everything - less)
        critical = design.critical()
        assert (design.detectable(critical) <= difference / noise) == enough
        values = generator.normal(size=(design.runs, 40_000), scale=noise)
        differences, deviation = design.fit(values)
        found = np.abs(differences[0] + difference) > critical * deviation * design.errors[0]
        assert (found.mean() > POWER - 0.005) == enough


def test_what_is_not_tested_says_why():
    values = {"ln": (1.0, 1.2), "pn": (2.0, 2.3), "one": (2.0,)}
    values |= {"other": (3.0, 3.1), "bn": (3.0, 3.9)}
    frame = rows(values)
    frame.loc[frame["system"] == "other", "machine"] = "another"
    frame.loc[frame["system"] == "bn", "seed"] = np.nan  # not known: not the same seed
    family, untested = families(frame, "tokenized")
    assert list(family[0].intervals) == ["pn"]
    apart = "no seed on one machine in common with ln"
    assert untested == {"one": "one seed", "other": apart, "bn": apart}
    elsewhere = rows({"ln": (), "pn": (2.0, 2.3)}, machine="another")
    frame = pandas.concat([rows({"ln": (1.0, 1.2)}), elsewhere])
    assert families(frame, "tokenized") == ([], {"pn": apart})
    for of_ln, of_pn, why in (
        ((), (2.0, 2.3), "ln was not measured"),
        ((1.0,), (2.0, 2.3), "ln has one seed"),
        ((1.0, 1.0), (2.0, 2.0), "no spread over seeds, or too few runs"),
    ):
        frame = rows({"ln": of_ln, "pn": of_pn})
        assert families(frame, "tokenized") == ([], {"pn": why})


@pytest.mark.parametrize(
    ("measure", "low", "high", "verdict"),
    [
        ("tokenized", 0.1, 0.5, "better"),
        ("tokenized", -0.5, -0.1, "worse"),
        ("tokenized", -0.3, 0.3, "equivalent within ±0.3"),
        ("tokenized", -0.2, 0.31, "inconclusive"),
        ("bits", 0.01, 0.03, "worse"),
        ("bits", -0.03, -0.01, "better"),
        ("bits", -0.021, 0.01, "inconclusive"),
        ("bits", -0.02, 0.01, "equivalent within ±0.02"),
        ("bits", 0.005, 0.015, "worse, but within ±0.02"),
    ],
)
def test_verdicts(measure, low, high, verdict):
    interval = Interval((low + high) / 2, low, high, 0.5)
    assert verdict.startswith(interval.verdict(MEASURES[measure]))
    assert Compared(MEASURES[measure], [], {}).verdict(interval) == verdict


@pytest.mark.parametrize("low", ["control", "pn"])
def test_scores_of_a_system_that_did_not_learn_to_translate_are_not_tested(low):
    """As docs/decoding.md says of the bootstrap; the loss is tested."""
    frame = rows({"control": (20, 21, 20.5), "pn": (21, 23, 22), "bn": (19, 19.5, 21)})
    frame["chrf"] = frame["tokenized"] * 1.5
    frame[LOSS] = frame["system"].map({"control": 5.0, "pn": 5.1, "bn": 5.2})
    frame[LOSS] += (frame["seed"] ** 2 + frame["tokenized"]) / 99
    assert set(families(frame, "chrf")[0][0].intervals) == {"pn", "bn"}
    frame.loc[frame["system"] == low, "tokenized"] = (0.1, 0.4, 0.9)
    for measure in ("tokenized", "chrf"):
        tested, untested = families(frame, measure)
        if low == "pn":
            assert set(tested[0].intervals) == {"bn"}
            assert untested == {"pn": "its BLEU is below 1"}
        else:
            why = "the BLEU of control is below 1"
            assert (tested, untested) == ([], {"pn": why, "bn": why})
    assert set(families(frame, LOSS)[0][0].intervals) == {"pn", "bn"}
