"""Every option that names a file or folder accepts a relative path, from any current folder."""

import argparse
import re
import shlex
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf

from pn_fairseq.__main__ import VERBS, call
from pn_fairseq.pipeline.data.tokens import SCRIPTS
from pn_fairseq.pipeline.training_settings import PATHS, compose

from .fixtures.reports import make_run as reported_run
from .fixtures.runs import make_run, untrained_checkpoint
from .scripts_helpers import ROOT, cut_corpus, in_process
from .tables import rows

#: A row is the words after ``pn``, in a folder beside all these files, and a file that exists then,
#: or a part of the error line by which the command shows that it has read what was named.
TABLE = r"""
prepare text --corpus ../text --source es --target en --dest ../new --codes ../data/bpe/codes \
  --protect ../tags                                               | ../new/counts.txt
prepare text --corpus ../text --like ../data --dest ../alike      | ../alike/bin/dict.en.txt
prepare text --corpus ../text --source es --target en --dest ../split --moses ../moses | moses/{tokenizer} failed: mine
prepare iwslt14 --dest ../iwslt14 --archive ../archives           | archives/de-en.tgz is not an archive
prepare iwslt14 --dest ../iwslt14 --mirror ../archives            | download/de-en.tgz is not an archive
prepare ../recipe.py --dest ../data --check                       | data was made with other settings
train ../own.yaml --data ../data --run ../run --check             | run' was started with different settings
train ../own.yaml --data ../data --run ../run/../made model.norm_module=../none.py --check | there is no file '../none.py'
average --run ../run --inputs ../none.pt                          | not allowed with argument
average --inputs ../averaged.pt --recalibrate ../data/bin --batches 1 --output ../mean.pt | ../mean.pt
average --inputs ../averaged.pt --norm-module ../norm.py --output ../copy.pt | ../copy.pt
generate --run ../run --checkpoint ../averaged.pt --norm-module ../norm.py --output ../decoded | ../decoded/hyp.tok
translate --run ../run --checkpoint ../averaged.pt --norm-module ../norm.py --input ../line --output ../out | ../out
translate --run ../moses-run --moses ../moses --input ../line     | moses/{tokenizer} failed: mine
score --run ../run --output ../decoded                            | ../decoded/scores.json
score --hyp ../line --ref ../line                                 | BLEU
score --compare ../scored ../scored                               | a run is named twice
evaluate-lm --run ../run --checkpoint ../averaged.pt --norm-module ../norm.py | is not the run of a language model
report ../scored --output ../line --paper ../table.yaml           | --output '../line' is a file
figures ../scored --output ../line/of                             | '../line' is a file
fold ../averaged.pt ../copy.pt --norm-module ../norm.py            | cannot be folded in float32: maximum logit
export ../none.pt --pt2 ../pt2 --onnx ../onnx --norm-module ../norm.py | none.pt: cannot be read
import-release ../averaged.pt ../imported.pt                      | is not a checkpoint of the authors' release
norms --norm-module ../norm.py                                    | of-a-file
test-norms --norm-module ../empty.py                              | empty.py
reproduce ../own.yaml --data ../data --runs ../all --norms ln --seeds 1 --dry-run | {place}/all/report
reproduce iwslt14 --archive ../archives --mirror ../archives --moses ../none --dry-run | none is not a checkout
reproduce demo --run ../demo model.dropout=2                      | model.dropout=2
reproduce --study ../study.yaml --runs ../study --dry-run         | is not a study
"""

#: Metavars of what is a path.
PATH = re.compile(r"(DIR|FILE|PATH|DATA|RUN|CHECKPOINT|OUTPUT|CONFIG|TABLE|NAME-OR-FILE)\b")
NORM = """
from pn_fairseq.norms import register_norm
from pn_fairseq.norms.power_v import PowerNormV

@register_norm("of-a-file", "oaf", "PN-V by another name")
class OfAFile(PowerNormV):
    pass
"""


class Parsed(BaseException):
    """Ends a command where it would parse its words."""


def parsers() -> list[argparse.ArgumentParser]:
    """Those of all verbs, and of each corpus of pn prepare."""
    found = []

    def note(parser, *_, **__):
        found.append(parser)
        raise Parsed

    kinds = [["reproduce", name] for name in ("iwslt14", "verses_es_en", "demo")]
    kinds.append(["reproduce", "--study", "compare_masks"])
    names = ("parse_args", "parse_intermixed_args")
    for words in [*([verb] for verb in VERBS if verb != "reproduce"), *kinds]:
        with (
            mock.patch.multiple(argparse.ArgumentParser, **dict.fromkeys(names, note)),
            pytest.raises(Parsed),
        ):
            call(words)
    for parser in list(found):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += action.choices.values()
    return found


def test_every_path_option_is_in_the_table():
    tested = set()
    for words, _ in rows(TABLE.replace("\\\n", "")):
        verb, *others = words.split()
        tested |= {(verb, word) for word in others if word.startswith("--")}
    paths = set()
    for parser in parsers():
        for action in parser._actions:
            if action.option_strings and PATH.match(str(action.metavar)):
                paths.add((parser.prog.split()[1], action.option_strings[0]))
    assert len(paths) > 30
    assert paths <= tested | {("reproduce", "--table")}  # a name


@pytest.fixture(scope="module")
def place(data, tmp_path_factory) -> Path:
    """The files of the table, and a folder ``here`` beside them."""
    place = tmp_path_factory.mktemp("relative")
    for name in ("here", "archives", "moses/scripts/tokenizer"):
        (place / name).mkdir(parents=True)
    cut_corpus(place / "text", 60, 5, 5)
    (place / "data").symlink_to(data)
    untrained_checkpoint(data, place / "run/checkpoints/averaged.pt", "--max-tokens", "400")
    make_run(place / "run", data, "generation: {beam: 1, max_len_b: 5}\ntask: {target_lang: en}\n")
    (place / "averaged.pt").symlink_to("run/checkpoints/averaged.pt")
    shutil.copytree(data, place / "moses-data")
    settings = (data / "settings.txt").read_text("utf-8")
    with_moses = re.sub("(?m)^tokenizer=.*", "tokenizer=moses", settings)
    (place / "moses-data/settings.txt").write_text(with_moses)
    make_run(place / "moses-run", place / "moses-data")
    shutil.copy(place / "averaged.pt", place / "moses-run/checkpoints")
    for script in SCRIPTS.values():
        (place / "moses" / script).write_text('die "mine\\n";')
    reported_run(place / "scored")
    contents = {
        "tags": "<2en>\n",
        "line": "Dios dijo\n",
        "norm.py": NORM,
        "empty.py": '"""Nothing."""\n',
        "archives/de-en.tgz": "nothing",
        "table.yaml": "rows: [{label: LN, norm: layer}]",
        "study.yaml": "nothing: 1",
        "recipe.py": (ROOT / "pn_fairseq/pipeline/data/recipes/verses.py").read_text("utf-8"),
        "own.yaml": (ROOT / "configs/verses_es_en.yaml").read_text("utf-8"),
    }
    for name, content in contents.items():
        (place / name).write_text(content, "utf-8")
    return place


@pytest.mark.parametrize(("words", "shown"), rows(TABLE.replace("\\\n", "")))
def test_relative(words, shown, place, monkeypatch):
    if "--moses ../moses" in words and not shutil.which("perl"):
        pytest.skip("Moses' scripts need perl")
    here = place / "here"
    monkeypatch.chdir(here)
    if shown.startswith("../"):
        in_process(*shlex.split(words), CUDA_VISIBLE_DEVICES="")
        assert (here / shown).exists()
    else:
        result = in_process(*shlex.split(words), CUDA_VISIBLE_DEVICES="", check=False)
        said = result.stdout + result.stderr
        assert shown.format(**SCRIPTS, place=place.resolve()) in said, said
        assert "Traceback" not in said, said
        assert "/../" not in said, said
    assert not list(here.iterdir())


def test_settings_that_name_files_become_absolute(tmp_path, monkeypatch):
    """A run may be resumed from another folder."""
    monkeypatch.chdir(tmp_path)
    torch.save({}, "a,b.pt")
    Path("norm.py").write_text(NORM)
    given = dict.fromkeys(PATHS, "some/../file")
    given["checkpoint.finetune_from_model"] = "a,b.pt"
    given["model.norm_module"] = "norm.py,./norm.py"
    settings = [f"{name}='{path}'" for name, path in given.items()]
    cfg, _ = compose(ROOT / "configs/verses_es_en.yaml", settings, 1, True)
    folder = tmp_path.resolve()
    assert cfg.checkpoint.finetune_from_model == f"{folder}/a,b.pt"
    assert cfg.model.norm_module == f"{folder}/norm.py,{folder}/norm.py"
    for name in PATHS:
        if given[name] == "some/../file":
            assert OmegaConf.select(cfg, name) == f"{folder}/file", name
