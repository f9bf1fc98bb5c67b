"""The Spanish-English corpus in data/: its files, the statements of its README, and the script that makes it."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import unicodedata
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "data" / "verses.es-en"
SCRIPT = ROOT / "scripts" / "data" / "make_verses.py"


def load_script():
    """Import the script from its path: scripts/ is not a package."""
    spec = importlib.util.spec_from_file_location("make_verses", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


mv = load_script()
COUNTS = {"train": 28170, "valid": 1000, "test": 1000}
FILES = sorted(f"{name}.{suffix}.gz" for name in COUNTS for suffix in ("es", "en", "refs"))


def read_sums(name: str) -> dict[str, str]:
    lines = (CORPUS / name).read_text(encoding="ascii").splitlines()
    return {file: digest for digest, file in (line.split("  ") for line in lines)}


@pytest.fixture(scope="module")
def corpus() -> dict[str, dict[str, list[str]]]:
    out: dict[str, dict[str, list[str]]] = {}
    for name in COUNTS:
        out[name] = {}
        for suffix in ("es", "en", "refs"):
            text = gzip.decompress((CORPUS / f"{name}.{suffix}.gz").read_bytes()).decode("utf-8")
            assert text.endswith("\n")
            out[name][suffix] = text[:-1].split("\n")
    return out


def test_checksums_hold():
    packed, inside = read_sums("SHA256SUMS"), read_sums("SHA256SUMS.text")
    assert sorted(packed) == FILES
    assert sorted(inside) == [file.removesuffix(".gz") for file in FILES]
    for file in FILES:
        data = (CORPUS / file).read_bytes()
        assert hashlib.sha256(data).hexdigest() == packed[file]
        assert hashlib.sha256(gzip.decompress(data)).hexdigest() == inside[file.removesuffix(".gz")]


def test_gzip_holds_no_time_and_no_name():
    for file in FILES:
        header = (CORPUS / file).read_bytes()[:10]
        assert header[3] == 0 and header[4:8] == b"\0\0\0\0", file


def test_line_counts(corpus):
    for name, count in COUNTS.items():
        assert {suffix: len(lines) for suffix, lines in corpus[name].items()} == dict.fromkeys(
            ("es", "en", "refs"), count
        )


def test_lines_are_clean_text(corpus):
    for columns in corpus.values():
        for language in ("es", "en"):
            text = "\n".join(columns[language])
            assert unicodedata.is_normalized("NFC", text)
            for char in set(text) - {"\n"}:  # no control, private or unassigned character, and no other space
                assert unicodedata.category(char)[0] not in "CZ" or char == " ", repr(char)
            assert all(line and line == line.strip() and "  " not in line for line in columns[language])
            for pattern in (
                r"[<>&{}\\|]|strong:|lemma=",  # markup
                r" [,.;:!?)”]",
                r"[^\W\d_][,.;:!?][^\W\d_]|[a-zá-ú][A-ZÁ-Ú]",  # words glued where a note or a line end was
            ):
                match = re.search(pattern, text)
                assert match is None, text[match.start() - 40 : match.end() + 40]


def test_lengths(corpus):
    for columns in corpus.values():
        for es, en in zip(columns["es"], columns["en"], strict=True):
            m, n = len(es.split()), len(en.split())
            assert 1 <= min(m, n) and max(m, n) <= 60 and max(m, n) <= 2 * min(m, n), (es, en)


def test_nothing_is_repeated(corpus):
    for suffix in ("es", "en"):
        keys = [mv.duplicate_key(line) for columns in corpus.values() for line in columns[suffix]]
        assert all(keys) and len(keys) == len(set(keys))
    refs = [ref for columns in corpus.values() for ref in columns["refs"]]
    assert len(refs) == len(set(refs))


def test_dropped_places_are_absent(corpus):
    table = mv.misaligned()
    for columns in corpus.values():
        for line in columns["refs"]:
            match = re.fullmatch(r"(.+) (\d+):(\d+)", line)
            here = int(match[2]), int(match[3])
            assert not any(match[1] == book and first <= here <= last for book, first, last in table), line


def test_readme_states_the_counts():
    text = (CORPUS / "README.md").read_text(encoding="utf-8")
    for count in (*COUNTS.values(), sum(COUNTS.values())):
        assert f"{count:,}" in text or str(count) in text


def modules_are_installed() -> bool:
    if shutil.which("mod2imp") is None:
        return False
    for module in (mv.ES_MODULE, mv.EN_MODULE):
        with subprocess.Popen(["mod2imp", module], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            head = process.stdout.read(3)
            process.stdout.close()
            process.kill()
        if head != b"$$$":
            return False
    return True


@pytest.mark.slow
def test_the_script_makes_the_shipped_bytes(tmp_path, capsys):
    if not modules_are_installed():
        pytest.skip("needs mod2imp and both texts: " + ", ".join(mv.PACKAGES))
    assert mv.main(["--out", str(tmp_path)]) == 0
    numbers = [int(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    joined, drops, (kept, *splits) = numbers[0], numbers[1:-4], numbers[-4:]
    assert joined + sum(drops) == kept == sum(splits)
    assert splits == list(COUNTS.values())
    assert (tmp_path / "SHA256SUMS.text").read_bytes() == (CORPUS / "SHA256SUMS.text").read_bytes()
    if "ng" not in zlib.ZLIB_RUNTIME_VERSION:  # zlib-ng packs the same text into other bytes
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*FILES, "SHA256SUMS", "SHA256SUMS.text"])
        for path in tmp_path.iterdir():
            assert path.read_bytes() == (CORPUS / path.name).read_bytes(), path.name


NOTE = '<note placement="foot"><reference type="annotateRef">1:1 </reference>or, <w lemma="strong:H1">seed</w></note>'


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        (f'<w lemma="strong:H2">God</w>{NOTE}<w lemma="strong:H3">created</w>', "God created"),
        (f"the land of{NOTE}Tubias", "the land of Tubias"),
        (f"gerahs{NOTE}); and", "gerahs); and"),
        (f"my hand{NOTE}. Then", "my hand. Then"),
        (f"my hand {NOTE}, then", "my hand, then"),
        (f"incomprehensible{NOTE}?”", "incomprehensible?”"),
        (f"said,{NOTE}“A forest", "said, “A forest"),
        (f"the {NOTE} streets", "the streets"),
        (f"“{NOTE}Go", "“Go"),
        (
            f'<q marker="" who="Jesus">get behind me,</q>{NOTE}<q marker="" who="Jesus">Satan</q>',
            "get behind me, Satan",
        ),
        ('He said,<l eID="a" level="1"/><l level="2" sID="b"/>Go <lb type="x-p"/>up.', "He said, Go up."),
        ('<title level="2" type="main">BOOK 2</title>As the deer', "As the deer"),
        ('<title canonical="true" type="psalm">A Psalm by <w>David</w></title>Yahweh', "A Psalm by David. Yahweh"),
        ("<speaker>Lover</speaker>I have come", "I have come"),
        ('<item type="x-indent-1">of the sons', "of the sons"),  # the item ends in another verse
        ("fish &amp; bread", "fish & bread"),
        ("que <transChange type='added'>están</transChange> debajo", "que están debajo"),
        ("<w>hay allí</w><transChange type='added'>también</transChange><w>bdelio</w>", "hay allí también bdelio"),
        ("sáca<transChange type='added'>lo</transChange> de", "sácalo de"),
        ("e\u0301l", "\u00e9l"),
        (f"{NOTE} <chapter eID='Rom.16'/>", ""),
    ],
)
def test_strip_markup(markup, text):
    assert mv.strip_markup(markup) == (text, False)


def test_strip_markup_doubts_a_pronoun_with_no_space_around_it():
    assert mv.strip_markup("gentes<transChange type='added'>lo</transChange><w>oyeron</w>")[1]


def test_initial_capitals():
    forms = mv.usual_forms(["y dijo Jehová", "y fué Jehová", "que el día", "El día", "y yo"])
    assert mv.lower_initials("Y FUÉ el día", forms) == "Y fué el día"
    assert mv.lower_initials("Y JEHOVÁ dijo", forms) == "Y Jehová dijo"
    assert mv.lower_initials("Salmo. EL día", forms) == "Salmo. El día"
    assert mv.lower_initials("JÚZGAME, oh Dios", forms) == "Júzgame, oh Dios"
    assert mv.lower_initials("ALEPH. Y YO", forms) == "ALEPH. Y yo"


def test_choose_counts_every_pair_once():
    def pair(verse, es, en, book="Genesis", chapter=1):
        return mv.Pair(mv.Ref(book, chapter, verse), es, en)

    pairs = [
        pair(1, "uno dos", "one two"),
        pair(2, "¡Uno, dos!", "other words"),  # the Spanish was seen
        pair(3, "otras palabras", "One two."),  # the English was seen
        pair(4, "uno", "one two three"),
        pair(5, "a " * 61, "a " * 61),
        pair(6, "lo oyeron", "heard it"),
        pair(1, "y volvió", "he returned", "Numbers", 13),
        pair(7, "tres cuatro", "three four"),
    ]
    kept, dropped = mv.choose(pairs, {mv.Ref("Genesis", 1, 6)})
    assert [p.ref.verse for p in kept] == [1, 7]
    assert sorted(dropped.values()) == [1, 1, 1, 1, 2]


def run_script(*arguments: str, **keywords) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, **keywords)


def one_line_error(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("make_verses.py: error: ")
    return done.stderr


def test_missing_mod2imp_is_one_line(tmp_path):
    error = one_line_error(run_script("--out", str(tmp_path / "out"), env={"PATH": str(tmp_path)}))
    assert all(package in error for package in mv.PACKAGES)
    assert not (tmp_path / "out").exists()


def test_missing_module_is_one_line(tmp_path):
    fake = tmp_path / "mod2imp"
    fake.write_text("#!/bin/sh\necho 'mod2imp: could not find module' >&2\nexit 1\n")
    fake.chmod(0o755)
    error = one_line_error(run_script("--out", str(tmp_path / "out"), env={"PATH": f"{tmp_path}:/usr/bin:/bin"}))
    assert "sword-text-sparv" in error


def test_bad_dumps_are_one_line(tmp_path):
    dump = tmp_path / "dump"
    out = ["--out", str(tmp_path / "out"), "--web-imp", str(dump), "--rv-imp", str(dump)]
    one_line_error(run_script(*out))
    for data in (b"nothing", b"$$$Genesis 1:1\n\xff", b"$$$Genesis 1:1\n<w>a\n", b"$$$Genesis 1:1\nword\n"):
        dump.write_bytes(data)
        one_line_error(run_script(*out))
    assert not (tmp_path / "out").exists()
