"""What a report says about a single run."""

import pytest

from pn_fairseq.report.runs import read_run

MADE = "averaged.pt is the average of 3, not of average_last=10 checkpoints"


@pytest.mark.parametrize(
    ("made", "wanted", "told"),
    [("update 3", 10, True), ("update 10", 10, False), ("update 3", None, False), (None, 10, False), ("", 10, False)],
)
def test_an_average_of_fewer_checkpoints_than_asked_for_is_a_problem(made, wanted, told, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "generate/test").mkdir(parents=True)
    (tmp_path / "generate/test/hyp.tok").write_text("a\n")
    (tmp_path / "config.yaml").write_text("{}" if wanted is None else f"average_last: {wanted}\n")
    if made is not None:
        (tmp_path / "checkpoints/averaged.pt.made").write_text(f"{made}\n")
    assert (MADE in read_run(tmp_path, "test", "run").problems) == told
