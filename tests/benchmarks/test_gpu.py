"""``python -m benchmarks.gpu``: its parts are run, cut off, repeated and put on a page as they
should.
"""

import json
import os
import signal
import sys
import time

import pytest
import torch

from benchmarks import gpu


@pytest.fixture(autouse=True)
def _signals():
    """The command handles them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def use(monkeypatch, *parts):
    """Commands in the place of the measurements: name, minutes, what Python executes."""
    made = [
        gpu.Part(name, minutes, ("timeit", "-n1", "-r1", "-s", code, "pass"))
        for name, minutes, code in parts
    ]
    monkeypatch.setattr(gpu, "parts", lambda tiny: made)
    monkeypatch.setattr(gpu, "ROOT", os.getcwd())


def states(out):
    return {
        file.stem: json.loads(file.read_text())["code"]
        for file in out.glob("*.json")
        if file.stem != "machine"
    }


def run(out, minutes=1):
    return gpu.main(["--out", str(out), "--minutes", str(minutes), "--tiny"])


def test_finished_parts_are_not_repeated_and_failed_ones_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    note = "open('{}', 'a').write('x')"
    fail = f"{note.format('second')}; import sys; sys.exit('the reason')"
    use(
        monkeypatch,
        ("first", 0, note.format("first")),
        ("second", 0, fail),
        ("third", 0, "print('| a |')"),
    )
    assert run(tmp_path / "out") == run(tmp_path / "out") == 1
    assert (tmp_path / "first").read_text() == "x" and (tmp_path / "second").read_text() == "xx"
    assert states(tmp_path / "out") == {"first": 0, "second": 1, "third": 0}
    page = (tmp_path / "out/gpu.md").read_text()
    assert (
        "| first | finished |" in page
        and "| second | FAILED |" in page
        and "the reason" in page
        and "| a |" in page
    )
    assert torch.__version__ in page and (tmp_path / "out/gpu.png").read_bytes().startswith(
        b"\x89PNG"
    )
    assert str(tmp_path) not in page and sys.executable not in page
    assert "3 parts, 0 not run yet, 1 failed; run the same command again" in capsys.readouterr().err


def test_parts_fit_into_the_minutes(tmp_path, monkeypatch, capsys):
    """A part that would not fit leaves its time to a later one,

    and one that does not end is cut off.
    """
    monkeypatch.chdir(tmp_path)
    use(
        monkeypatch,
        ("long", 9, "pass"),
        ("longer", 10, "pass"),
        ("short", 0, "import time; time.sleep(600)"),
    )
    monkeypatch.setattr(gpu.command, "whole", lambda text: float(text))
    begin = time.monotonic()
    assert run(tmp_path / "out", 0.1) == 0  # 6 seconds
    assert time.monotonic() - begin < 60
    assert states(tmp_path / "out") == {"long": 0}  # the first is tried in any case
    assert "short: cut off; it needs more minutes" in capsys.readouterr().err
    assert "| longer | not run yet |" in (tmp_path / "out/gpu.md").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--out . --minutes 0 --tiny", "--minutes: must be a whole number of at least 1, not '0'"),
        ("--minutes 5 --tiny", "the following arguments are required: --out"),
        ("--out file --minutes 5 --tiny", "file: File exists"),
        (
            "--out . --minutes 5",
            "torch sees no GPU; --tiny runs all parts on the CPU, with tiny sizes",
        ),
        (
            "--out other --minutes 5 --tiny",
            "has figures of another machine or version (torch 1.0, now ",
        ),
    ],
)
def test_mistakes(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu.Part, "run", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/machine.json").write_text(json.dumps({**gpu.describe(), "torch": "1.0"}))
    assert gpu.command.run("benchmarks.gpu", lambda: gpu.main(flags.split())) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("benchmarks.gpu: error: ") and message in line


def test_parts_of_a_gpu(monkeypatch):
    """The names of the options and their values exist; every part has a name of its own."""
    from benchmarks import decoding, norms, ranks, training

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(norms.kernels, "describe", lambda: {"CUDA": ("triton", "")})
    found = gpu.parts(tiny=False)
    assert len({part.name for part in found}) == len(found) and all(part.minutes for part in found)
    shapes = []
    for part in found:
        words = list(part.words)
        if words[0] == "benchmarks.norms":
            args = norms.parse(words[1:])
            shapes += args.shapes
            names = [
                "LayerNorm",
                "RMSNorm",
                "BatchNorm1d gathered",
                norms.COPY,
                "Liger RMSNorm",
                "dyt triton",
            ]
            names += [
                f"pn{scaled} {by}"
                for scaled in ("", " +LS")
                for by in ("triton", "reference", "compiled")
            ]
            assert all(args.only.search(name) for name in names)
            assert not any(
                args.only.search(name) for name in ("dyt reference", "pnv +LS reference")
            )
        elif words[0] in ("benchmarks.training", "benchmarks.decoding"):
            module = {"benchmarks.training": training, "benchmarks.decoding": decoding}[words[0]]
            assert module.parse(words[1:]).device == "cuda"
        elif "benchmarks.ranks" in words:
            assert words[words.index("--nproc-per-node") + 1] == "8"
            assert ranks.parse(words[words.index("benchmarks.ranks") + 1 :]).device == "cuda"
    assert set(shapes) == {(4096, 512), (4096, 1024), (32768, 1024), (131072, 1024)}


@pytest.mark.slow
def test_everything_on_a_cpu(tmp_path, monkeypatch):
    assert run(tmp_path, minutes=30) == 0
    assert len(states(tmp_path)) == 7 and set(states(tmp_path).values()) == {0}
    page = (tmp_path / "gpu.md").read_text()
    assert "| dyt cpp | " in page and "| pn reference | " in page and "BatchNorm1d gathered" in page
    ranks = gpu.pandas.read_csv(tmp_path / "ranks-2.csv").dropna(subset=["difference"])
    assert len(ranks) == 3 and (ranks["difference"] < 2e-6).all()
    assert {file.stem for file in tmp_path.glob("*.csv")} >= {
        "training-tiny-bfloat16",
        "decoding-tiny-float32",
    }
    monkeypatch.setattr(gpu.Part, "run", lambda *_: pytest.fail("repeated"))
    assert run(tmp_path) == 0
