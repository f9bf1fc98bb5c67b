"""The benchmarks run and write what they print. No test looks at the times that they measure."""

import csv
import itertools
import logging
import re
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from unittest import mock

import pandas
import pytest
import torch
from torch import nn

from benchmarks import (
    ALLOCATOR,
    calls,
    compile,
    decoding,
    norms,
    placements,
    probe,
    slow_link,
    training,
)
from benchmarks.profiling import Counts
from benchmarks.results import quartiles, ratios
from benchmarks.table import TARGETS, targets
from pn_fairseq import kernels

from ..scripts_helpers import ROOT, run


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    """No restart for the allocator; logging and threads are restored."""
    for name, value in ALLOCATOR.items():
        monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    disabled = logging.root.manager.disable
    yield
    torch.set_num_threads(threads)
    logging.disable(disabled)


def measured(program, flags, path):
    """What ``program`` writes into the CSV file ``path``."""
    program.main([*flags.split(), "--output", str(path)])
    return read(path)


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_ratios_are_of_the_same_round():
    assert ratios([2.0, 40.0, 6.0], [1.0, 20.0, 3.0]) == (2.0, 2.0, 2.0)


def test_quartiles():
    assert quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


@pytest.mark.ci
def test_decoding(tmp_path, capsys):
    flags = (
        "--size tiny --rounds 2 --sentences 3 --source-length 5 --target-length 4 --beam 2 "
        "--vocabulary 50"
    )
    rows = measured(decoding, f"{flags} --threads 1", tmp_path / "decoding.csv")
    expected = ["ln", "bn", "bn folded", "pnv", "pnv folded", "pn", "pn folded", "ln again"]
    assert [row["norm"] for row in rows] == expected
    printed = capsys.readouterr()
    for row in rows:
        assert float(row["sentences_per_s"]) > 0
        assert float(row["times_low"]) <= float(row["times_high"])
        check_machine(row)
        assert f"\n{row['norm']} " in printed.out
    assert printed.err.count("maximum logit difference") == 3
    assert rows[0]["times_ln"] == "1"


def check_machine(row):
    assert row["torch"] == torch.__version__
    assert row["cores"]
    assert row["date"]


@pytest.mark.ci
def test_training(tmp_path, capsys):
    flags = (
        "--size tiny --rounds 2 --tokens 24 --length 6 --vocabulary 50 --threads 1 --no-memory "
        "--norms fairseq pn --dtype float32 bfloat16"
    )
    rows = measured(training, flags, tmp_path / "training.csv")
    names = ["ln", "fairseq", "pn"]
    expected = [(name, "float32") for name in names]
    expected += [(f"{name} bfloat16", "bfloat16") for name in names]
    assert [(row["norm"], row["dtype"]) for row in rows] == expected
    printed = capsys.readouterr().out
    for row in rows:
        assert float(row["tokens_per_s"]) > 0
        assert row["memory_mb"] == ""
        assert f"\n{row['norm']} " in printed
    assert rows[0]["times_ln"] == "1"


def test_fairseqs_own_model_makes_the_update_of_the_layer_norm_model():
    args = training.parse("--size tiny --tokens 24 --length 6 --vocabulary 50 --threads 1".split())
    own = training.make_trainer("fairseq", "float32", args)
    ours = training.make_trainer("ln", "float32", args)
    assert type(own.model).__name__ == "TransformerModel" != type(ours.model).__name__
    batch = training.make_batches(args)[0]
    for trainer in (own, ours):
        training.update(trainer, batch)
    expected = own.model.state_dict()
    found = ours.model.state_dict()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-8, msg=name)


def test_probe(tmp_path, capsys, monkeypatch):
    """Of 50 updates 10 take 1.1 times as long, and 1 takes twice as long: 4% more on average."""
    probe.main("--size tiny --rounds 1 --tokens 24 --length 6 --vocabulary 50".split())
    assert re.search(r"averaged [\d.]+ times, recorded [\d.]+ times", capsys.readouterr().out)
    seconds = {"plain": [2.0], "averaged": [2.2], "recorded": [4.0]}
    monkeypatch.setattr(probe, "measure", lambda args: seconds)
    assert measured(probe, "", tmp_path / "probe.csv")[0]["percent_of_an_update"] == "4"
    assert "--norm-probe-interval 50: +4.00% of an update" in capsys.readouterr().out


def test_memory_of_training_is_that_of_the_model_at_least():
    args = training.parse(
        "--size tiny --tokens 24 --length 6 --vocabulary 20000 --threads 1".split()
    )
    # Embeddings, their gradient and Adam's two averages, 20,000 x 128 float32 each; the rest of the
    # model is smaller.
    embeddings = 4 * 20000 * 128 * 4
    memory = training.memory_of("ln", "float32", args, training.make_batches(args)[:1])
    assert embeddings < memory < 3 * embeddings


@pytest.mark.ci
def test_norms(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(norms, "FULL_SIZE", 140)
    flags = "--shapes 70x10 --rounds 1 --padding 0.2 0 --dtypes bfloat16 --only".split()
    flags.append(r"^(bn|pn|none)( .LS)? (reference|cpp)$|again|Batch|^RMSNorm$|copy")
    for option, name in (("csv", "norms.csv"), ("picture", "norms.png"), ("sizes", "sizes.png")):
        flags += [f"--{option}", str(tmp_path / name)]
    norms.main(flags)
    rows = read(tmp_path / "norms.csv")
    # 10 channels have no 4 groups, but 2.
    assert {row["layer_scale"] for row in rows} == {"0", "2"}
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    assert names[:2] == ["LayerNorm", "LayerNorm again"]
    ours = [name for name in kernels.available() if name != "triton"]
    # layer-scale or not, but for a norm of each token
    assert len(names) == 5 + (2 * 2 + 1) * len(ours)
    assert len(rows) == len(names) * 3 * 2
    assert {row["rounds"] for row in rows} == {"2"}  # half as many rows, twice as many rounds
    for name in ("norms.png", "sizes.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.partial"))
    for row in rows:
        check_row(row)
    both = {}
    for row in rows:
        if row["phase"] == "both":
            both[row["contestant"], row["padding"]] = row
    first = both["LayerNorm", "0.0"]
    assert both["pn reference", "0.2"]["times_reference"] == "1.0"
    assert first["ratio"] == first["extra_ratio"] == "1.0"
    # What fills up the mask is work only where there is one.
    without = both["pn reference", "0.0"]
    masked = both["pn reference", "0.2"]
    assert int(without["kernels"]) < int(masked["kernels"])
    printed = capsys.readouterr().out
    for name in names:
        assert printed.count(f"\n{name}  ") == 2  # a table for each padding
    assert "70x10 bfloat16, cpu, 1 thread, no mask, ratio to LayerNorm" in printed


def check_row(row):
    assert float(row["milliseconds"]) > 0
    assert float(row["ratio_low"]) <= float(row["ratio_high"])
    assert row["padding"] in ("0.2", "0.0")
    check_machine(row)
    if row["norm"] != "none":
        for key in ("kernels", "bytes_read", "extra_bytes"):
            assert int(row[key]) > 0


def test_targets_are_measured(capsys):
    norms.main("--targets --shapes 40x8 --rounds 1 --dtypes float32 --threads 1".split())
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if "40x8:" in line]
    # times, memory and against the reference, with and without layer-scale
    assert len(lines) == 2 + 2 + 2
    # 2 threads, twice bfloat16; C = 512
    assert sum("not measured" in line for line in printed.splitlines()) == 5
    assert all(line.endswith(("| yes |", "| no |")) for line in lines)


def test_targets_by_hand():
    common = {"device": "cpu", "threads": 1, "dtype": "bfloat16", "padding": 0.1, "phase": "both"}
    common |= {"norm": "power", "layer_scale": 4, "ratio_low": 0.4, "ratio_high": 0.6}
    common |= {"ratio_single_low": 0.5, "ratio_single_high": 0.7, "implementation": "cpp"}
    first = {"shape": "4096x512", "ratio": 0.5, "ratio_single": 0.551}
    first |= {"extra_ratio": 1.02, "times_reference": 3.999}
    second = {"shape": "4096x1024", "ratio": 0.49, "ratio_single": 0.9}
    second |= {"extra_ratio": 1.0, "times_reference": 9.0}
    other = {**second, "implementation": "reference", "ratio": 7.0}
    rows = [common | first, common | second, common | other]
    found = {}
    for line in targets(rows, "cpp").splitlines()[2:]:
        title, *_, measured, reached = line.strip("| ").split(" | ")
        found[title] = measured, reached
    assert found.keys() == {target.title for target in TARGETS}
    single = "4096x512: 0.551 (0.50, 0.70)"
    assert found["bfloat16, C = 512, turns of one step"] == (single, "no")
    several = "4096x512: 0.500 (0.40, 0.60), 4096x1024: 0.490 (0.40, 0.60)"
    assert found["bfloat16 with layer-scale and mask"] == (several, "yes")
    memory = "4096x512: 1.020, 4096x1024: 1.000"
    assert found["peak memory, ratio to LayerNorm"] == (memory, "yes")
    assert found["times faster than the reference"][1] == "no"
    reached = [reached for _, reached in found.values()]
    assert reached.count("not measured") == len(found) - 4


@pytest.mark.slow
def test_compile(tmp_path, monkeypatch):
    monkeypatch.setattr(compile, "SHAPE", (4, 2, 8))
    rows = measured(
        compile, "--rounds 1 --threads 1 --backend eager --only ^power$", tmp_path / "compile.csv"
    )
    expected = itertools.product(("norm", "encoder"), ("training", "evaluation"))
    assert [(row["module"], row["mode"]) for row in rows] == [*expected]


def test_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "CALLS", 1)
    rows = measured(calls, "--rounds 1 --only ^(layer|power)$", tmp_path / "calls.csv")
    expected = itertools.product(("training", "evaluation"), (calls.BASE, "layer", "power"))
    assert [(row["mode"], row["norm"]) for row in rows] == [*expected]
    assert all(float(row["least_microseconds"]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--threads 0", "'0' is not a positive whole number"),
        ("--rounds 0", "'0' is not a positive whole number"),
        ("--shapes 4096", "'4096' is not ROWSxCHANNELS"),
        ("--shapes 0x8", "'0x8' is not ROWSxCHANNELS"),
        ("--padding 0.6", "'0.6' is not a share between 0 and 0.5"),
        ("--padding nan", "'nan' is not a share between 0 and 0.5"),
        ("--only (", "'(' is not a regular expression"),
        ("--picture norms.gif", "'norms.gif' does not end in .png, .pdf or .svg"),
        ("--csv missing/norms.csv", "missing/norms.csv: cannot be written, there is no directory"),
        ("--csv .", ".: cannot be written, it exists and is not a regular file"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    flags, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(norms, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as stopped:
        norms.main(flags.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_what_cannot_run_is_left_out_with_a_line(capsys, monkeypatch):
    without_a_compiler = mock.Mock(side_effect=RuntimeError("no C++ compiler\nwas found"))
    monkeypatch.setattr(norms, "_compiled", lambda threads: without_a_compiler)
    norms.main("--shapes 1x8 --rounds 1 --dtypes float32 --only compiled|Batch|copy".split())
    printed = capsys.readouterr()
    reasons = [line for line in printed.err.splitlines() if "left out" in line]
    # BatchNorm1d refuses a single token.
    names = ["BatchNorm1d gathered", "pn compiled", "pn +LS compiled"]
    assert [line.partition(":")[0] for line in reasons] == names
    assert reasons[1].endswith("left out: no C++ compiler")
    assert "compiled" not in printed.out
    assert "copy and add" in printed.out


@pytest.mark.parametrize(
    ("rows", "factors"),
    [(4096, (32, 128)), (4095, (35, 117)), (1, (1, 1)), (31, (31, 1)), (67, (67, 1))],
)
def test_rows_are_time_and_batch(rows, factors):
    assert norms.time_and_batch(rows) == factors


def test_turns_are_taken_in_changing_order():
    events = []

    def module(name, x, mask):
        assert x.grad is None
        events.append(name)
        return x * 2.0

    found = [norms.Contestant(name, partial(module, name), name) for name in "abcd"]
    batch = norms.make_batch((4, 3, 2), 0.0, torch.float32)
    norms.take_turns(found, batch, 12)
    for each in found:
        for phase in norms.PHASES:
            assert len(each.seconds[phase]) == 12
    # Each turn is some steps that are not timed and some that are.
    steps = norms.UNTIMED + norms.REPEATS
    turns = events[::steps]
    for number in range(steps):
        assert turns == events[number::steps]
    assert len(turns) == 4 * (12 + norms.WARM)
    for at in range(0, len(turns), 4):
        assert sorted(turns[at : at + 4]) == list("abcd")
    assert {*itertools.pairwise(turns)} >= {*itertools.permutations("abcd", 2)}
    assert batch[0].grad is None


def test_figures_of_a_round_by_hand():
    contestant = norms.Contestant
    found = [contestant("LayerNorm", nn.Identity(), "LayerNorm")]
    found.append(contestant(norms.COPY, nn.Identity(), "copy"))
    for implementation in ("reference", "cpp"):
        name = f"pn {implementation}"
        found.append(contestant(name, nn.Identity(), "power", 4, implementation))
    for each, first in zip(found, (4.0, 2.0, 40.0, 4.0), strict=True):
        second = 2 * first
        each.seconds["forward"] = [first, second]
        each.seconds["backward"] = [6.0, 12.0]
        each.seconds["both"] = [first + 6.0, second + 12.0]
        each.single = [0.75, 1.5]
        each.extra_bytes = 100
        each.counts = {"forward": Counts(1, 20, 10), "backward": Counts(3, 30, 10)}
    found[2].counts["backward"] = Counts(3, 30, None)
    found[2].single = [6.0, 9.0]
    rows = {}
    for row in norms.rows_of(found, {}):
        rows[row["contestant"], row["phase"]] = row
    ours = {phase: rows["pn cpp", phase] for phase in norms.PHASES}
    # Copying takes 1 s for each time the size of x; the norm reads or writes 2, 3 and 5 times as
    # much.
    assert [row["copy_bandwidth"] for row in ours.values()] == [2 / 4, 3 / 6, 5 / 10]
    assert ours["forward"]["times_reference"] == 10.0
    assert ours["both"]["times_reference"] == 4.6
    assert ours["both"]["kernels"] == 4
    assert ours["forward"]["kernels"] == 1
    assert ours["both"]["bytes_read"] == 50
    assert ours["both"]["bytes_written"] == 20
    assert rows["LayerNorm", "both"]["times_reference"] == ""
    plain = rows["pn reference", "both"]
    assert plain["ratio"] == 4.6
    assert plain["ratio_single"] == 7.5
    assert plain["bytes_written"] is None
    assert rows["pn reference", "forward"]["ratio_single"] == ""


@pytest.mark.ci
def test_placements(tmp_path, capsys):
    flags = "--norms batch --layers 2 --updates 2"
    placements.main(["--output", str(tmp_path), *flags.split()])
    table = pandas.read_csv(tmp_path / "gradients.csv")
    assert {*table["placement"]} == {*placements.PLACEMENTS}
    assert {*table["update"]} == {0, 2}
    gradients = table["gradients"].str.split(expand=True).astype(float)
    assert gradients.shape[1] == 2
    assert (gradients > 0).all(axis=None)
    assert (tmp_path / "gradients-batch.png").stat().st_size > 10_000


def test_gradients_of_layers_by_hand():
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    for number, layer in enumerate(layers, 1):
        layer.weight.grad = torch.tensor([[2.0, 4.0]]) * number
        layer.bias.grad = torch.tensor([4.0]) * number
    assert placements.gradients(layers) == [6.0, 12.0]  # (4 + 16 + 16) ** 0.5


def test_a_relayed_packet_waits_for_those_before_it_and_for_the_delay():
    sender, left = socket.socketpair(type=socket.SOCK_DGRAM)
    right, receiver = socket.socketpair(type=socket.SOCK_DGRAM)
    arrivals = []

    def running():
        with suppress(BlockingIOError):
            arrivals.append((receiver.recv(2000, socket.MSG_DONTWAIT), time.monotonic() - begin))
        return len(arrivals) < 3

    begin = time.monotonic()
    for number in range(3):
        sender.send(bytes([number]) * 1250)  # 10 ms at 1 Mbit/s
    slow_link.relay((left.fileno(), right.fileno()), 1, 5.0, running)
    assert [packet[0] for packet, _ in arrivals] == [0, 1, 2]
    for number, (_, seconds) in enumerate(arrivals, 1):
        assert seconds >= 0.005 + 0.01 * number


@pytest.mark.slow
def test_updates_over_a_slow_link(tmp_path):
    """C = 16 values and the count: BN sums them, then C in the forward and 2C in the backward; PN
    sums all at once.
    """
    flags = "--device cpu --dtype float32 --rows 64 --channels 16 --rounds 1"
    module = ["benchmarks.ranks", *flags.split(), "--output", str(tmp_path / "ranks.csv")]
    command = [sys.executable, "-m", "benchmarks.slow_link", "--", *module]
    done = run(*command, cwd=ROOT, check=False)
    if "this needs Linux, root" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    columns = ("norm", "norms", "waited_for", "asynchronous", "bytes")
    found = []
    for row in read(tmp_path / "ranks.csv"):
        found.append([row[name] for name in columns])
    assert found == [
        ["layer", "0", "0.0", "0.0", "0.0"],
        ["batch", "13", "3.0", "0.0", "260.0"],
        ["power-v", "13", "2.0", "0.0", "196.0"],
        ["power", "13", "0.0", "1.0", "196.0"],
    ]
