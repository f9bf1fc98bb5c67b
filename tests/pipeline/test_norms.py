"""``pn norms``."""

import pytest

from pn_fairseq.norms import NORMS
from pn_fairseq.pipeline.norms import main


def test_every_norm_has_a_line_and_every_own_option_a_default_and_a_description(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(NORMS)]] == list(NORMS)
    for name, entry in NORMS.items():
        assert main([name]) == 0
        rows = [
            line.split("  ")
            for line in capsys.readouterr().out.splitlines()
            if line.startswith("  ")
        ]
        described = {row[1].partition("=")[0]: row[-1].strip() for row in rows if "=" in row[1]}
        assert set(described) == set(entry.own_options) and all(
            len(text) > 5 for text in described.values()
        )


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("unified", ["  window=4 ", "  outlier_filtration=False ", "  --norm-alpha-fwd 0.9 "]),
        ("group", ["  groups=attention heads "]),
        ("batch-renorm", ["  renorm_updates=0.3 of --max-update, else 40000 "]),
        (
            "power",
            [
                "--norm-options: none",
                "  --layer-scale-groups attention heads ",
                "  --norm-sync off ",
            ],
        ),
        (
            "batch",
            [
                "--norm-variant release: MaskedBatchNormRelease, defaults alpha_fwd=0.95, "
                "layer_scale_groups=1"
            ],
        ),
    ],
)
def test_defaults_are_those_of_a_transformer(name, rows, capsys):
    main([name])
    printed = capsys.readouterr().out
    assert all(row in printed for row in rows), printed
