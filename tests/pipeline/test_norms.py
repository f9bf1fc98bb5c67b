"""``pn norms``."""

import re

import pytest

from pn_fairseq.norms import NORMS
from pn_fairseq.pipeline.norms import main

from ..tables import rows


def test_every_norm_has_a_line_and_every_own_option_a_default_and_a_description(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(NORMS)]] == list(NORMS)
    for name, entry in NORMS.items():
        assert main([name]) == 0
        described = {}
        # two blanks, an option and its default, its description behind two blanks or more
        for row in re.findall("(?m)^  (.*)", capsys.readouterr().out):
            option, _, description = row.partition("  ")
            if "=" in option:
                described[option.partition("=")[0]] = description.strip()
        assert set(described) == set(entry.own_options)
        assert all(len(text) > 5 for text in described.values())


DEFAULTS = """
unified | window=4
unified | outlier_filtration=False
unified | --norm-alpha-fwd 0.9
group | groups=attention heads
batch-renorm | renorm_updates=0.3 of --max-update, else 40000
power | --layer-scale-groups attention heads
power | --norm-sync off
"""


@pytest.mark.parametrize(("name", "default"), rows(DEFAULTS))
def test_defaults_are_those_of_a_transformer(name, default, capsys):
    main([name])
    assert f"  {default} " in capsys.readouterr().out


def test_a_variant_and_a_norm_without_options(capsys):
    main(["power"])
    assert "--norm-options: none" in capsys.readouterr().out
    main(["batch"])
    release = "MaskedBatchNormRelease, defaults alpha_fwd=0.95, layer_scale_groups=1"
    assert f"--norm-variant release: {release}" in capsys.readouterr().out
