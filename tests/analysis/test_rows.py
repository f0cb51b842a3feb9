"""Scenarios that are lists of runs: what columns and cases mean, how a list is judged, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosim.analysis.expect import Judged, Runs, judge, read_expectations
from zerosim.analysis.expect.errors import correlations, errors_of, spearman
from zerosim.cli.main import main
from zerosim.config.files import read_scenario_file

FOLDER = Path(__file__).parents[2] / "scenarios"
RUN = 'model = "flat"\nparams = 6400\nprecision = "bf16"\n\n'
GOOD = """[expect]
source = "s"
quantity = "model_states_bytes"
unit = "B"
within = "50%"
mean_within = "20%"
columns = ["zero", "ranks", "printed"]
rows = [
  ["none", 4, "102400"],
  ["P", 4, "32000"],
]

[expect.cases.zero]
"none" = { stage = 0 }
"P" = { stage = 3 }
"""


def scenario(tmp_path: Path, text: str = GOOD) -> str:
    path = tmp_path / "rows.toml"
    path.write_text(RUN + text, "utf-8")
    return str(path)


def judged(path: str) -> list[Judged]:
    runs = Runs()
    return [judge(table, runs) for table in read_expectations(read_scenario_file(path))]


def test_each_row_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (table,) = judged(scenario(tmp_path))
    assert [cell.config.parallel.zero_stage for cell in table.expectation.cells] == [0, 3]
    assert [cell.counted for cell in table.cells] == [102400, 25600]
    assert [cell.labels for cell in table.cells] == [("none", "4"), ("P", "4")]
    assert table.passed
    assert (table.errors.median, table.errors.least, table.errors.most, table.errors.rows) == (-0.1, -0.2, 0.0, 2)
    assert main(["check", scenario(tmp_path)]) == 0
    assert "median -10.0 %, mean of absolute errors 10.0 %, from -20 to +0 %, of 2 rows" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["check", scenario(tmp_path), "--json", "-"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["scenarios"][0]["tables"]
    assert shown["errors"]["mean_absolute"] == pytest.approx(0.1)


def test_a_row_and_the_mean_can_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (alone,) = judged(scenario(tmp_path, GOOD.replace('"32000"', '"60000"')))
    assert [cell.passed for cell in alone.cells] == [True, False]
    (mean,) = judged(scenario(tmp_path, GOOD.replace('mean_within = "20%"', 'mean_within = "9%"')))
    assert all(cell.passed for cell in mean.cells)
    assert not mean.passed
    assert main(["check", scenario(tmp_path, GOOD.replace('mean_within = "20%"', 'mean_within = "9%"'))]) == 1
    assert "the mean is more than 9 %" in " ".join(capsys.readouterr().out.split())


def test_layouts_that_are_ranked_the_wrong_way_fail(tmp_path: Path) -> None:
    rows = "\n".join(
        f'  ["P", {ranks}, "{size}"],' for ranks, size in ((2, 10000), (4, 20000), (8, 30000), (16, 40000))
    )
    ranked = GOOD.replace('  ["none", 4, "102400"],\n  ["P", 4, "32000"],', rows).replace(
        '"none" = { stage = 0 }\n', ""
    )
    ranked = ranked.replace('"50%"', '"900%"').replace('"20%"', '"900%"')
    backwards = ranked.replace("columns", 'ranking = { same = ["zero"], above = 0.8, groups = 1 }\ncolumns')
    (table,) = judged(scenario(tmp_path, backwards))
    assert table.ranks == [-1.0]
    assert "rank correlations -1.00: expected more than 0.8 in 1 groups at least" in table.failures[0]
    assert judged(scenario(tmp_path, backwards.replace("groups = 1", "groups = 0")))[0].passed


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"ranks", "printed"]', '"ranks"]', '"printed" last'),
        ('"ranks", "printed"]', '"rank", "printed"]', "columns: 'rank' is not a field; did you mean 'ranks'?"),
        ('["P", 4, "32000"]', '["P", "32000"]', "row 2 has 2 values, expected 3: zero, ranks, printed"),
        ('["P", 4, "32000"]', '["p", 4, "32000"]', "zero 'p' is not in [expect.cases.zero]; expected one of none, P"),
        ('["P", 4, "32000"]', '["P", 4, 32000]', "row 2: 32000: expected a string, with the digits that are printed"),
        ('["P", 4, "32000"]', '["P", 0, "32000"]', "at zero=P, ranks=0: ranks 0: expected at least 1"),
        ('["P", 4, "32000"]', '["none", 2, "32000"]', "cases.zero: no row has 'P': leave it out"),
        ("[expect.cases.zero]", "[expect.cases.zeros]", "'zero' is not a field"),
        (
            'within = "50%"\n',
            'printed = ["1"]\nwithin = "50%"\n',
            "rows and printed: each row has its own run and figure",
        ),
        ('within = "50%"\n', 'within = "50%"\nranking = { same = ["tp"], above = 0.8, groups = 1 }\n', "ranking {"),
        ('within = "50%"\n', 'within = "50%"\nwith = { ranks = 2 }\n', "columns: ranks is also set outside the rows"),
        ('"model_states_bytes"\nunit = "B"', '"step_seconds"\nunit = "s"', "gpu is missing at zero=none, ranks=4"),
    ],
)
def test_a_broken_list_is_one_line(
    old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in GOOD
    assert main(["check", scenario(tmp_path, GOOD.replace(old, new))]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.slow
def test_some_measured_steps_are_within_what_their_scenario_says() -> None:
    """A few rows; all of them in test_check.py."""
    for name in ("steps_torchtitan.toml", "steps_ml_engineering.toml"):
        for table in judged(str(FOLDER / name)):
            assert [cell.failures for cell in table.cells if not cell.passed] == []
            assert table.passed


LISTS = st.lists(st.floats(-5, 5), min_size=2, max_size=12)


@given(LISTS)
def test_ranks_correlate_with_themselves(values: list[float]) -> None:
    distinct = len(set(values)) > 1
    assert spearman(values, values) == pytest.approx(1.0 if distinct else 0.0)
    assert spearman(values, [-value for value in values]) == pytest.approx(-1.0 if distinct else 0.0)
    errors = errors_of(values)
    assert errors.least <= errors.median <= errors.most
    assert errors.mean_absolute >= 0


def test_few_rows_rank_nothing() -> None:
    assert correlations([("a", 1.0, 1.0), ("a", 2.0, 2.0), ("a", 3.0, 3.0)]) == {}
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
