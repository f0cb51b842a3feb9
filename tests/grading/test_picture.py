"""An answer's run is drawn beside the reference's: what is drawn was counted in both."""

from __future__ import annotations

from pathlib import Path

import pytest
from grading_here import Own3, grade

from zerosim.cli.main import main
from zerosim.device.events import Launch
from zerosim.errors import InputError
from zerosim.grading import Grade, Unit, find_exercise
from zerosim.grading.report import drawable
from zerosim.report.plots.draw import draw
from zerosim.report.plots.panel import Areas, Boxes, Peak, Rule
from zerosim.train.run import run

SOLUTIONS = Path(__file__).parents[2] / "notebooks" / "solutions"


class KeepsGathered(Own3):
    def post_forward(self, unit: Unit) -> None: ...


@pytest.fixture(scope="module")
def failed() -> Grade:
    return grade(KeepsGathered, "zero3")


@pytest.mark.slow
def test_both_runs_are_drawn_with_their_collectives_and_where_the_grade_points(failed: Grade) -> None:
    figure = failed.plot()
    yours, calls, reference, others = figure.panels
    assert (yours.y.label, reference.y.label) == ("yours", "reference")
    where = failed.failures[0].where
    assert where is not None
    assert [rule.words for rule in yours.of(Rule)] == [f"event {where.number}"]
    assert not reference.of(Rule)
    case, recorded = find_exercise("zero3").cases[0], failed.verdict.recorded
    assert recorded is not None
    step = recorded.events[where.number].scope.step
    records = recorded.events, run(case.config, keep_events=True).events[where.rank]
    for panel, record in zip((calls, others), records, strict=True):
        shown = [event for event in record if event.scope.step == step]
        launches = [at for at, one in enumerate(shown) if isinstance(one, Launch) and one.payload_bytes]
        assert sorted(corner[0] for boxes in panel.of(Boxes) for corner in boxes.corners) == launches
    assert yours.of(Peak)[0].where[1] > reference.of(Peak)[0].where[1]
    assert draw(figure).alt == figure.alt


def test_a_notebook_shows_the_first_failure_and_folds_the_rest(failed: Grade) -> None:
    assert [check.name for check in failed.failures] == ["peak", "gathered"]
    before, _, after = failed._repr_html_().partition("<details>")
    assert failed["peak"].counted in before
    assert failed["gathered"].counted in after


def test_the_first_failed_run_is_chosen_and_what_did_not_run_is_not_drawn(failed: Grade) -> None:
    asked = grade(lambda m, q: None, "powersgd")
    solved = Grade(failed.exercise, failed.verdict._replace(checks=(failed["runs"],)))
    assert drawable([solved, asked, failed]) is failed
    assert drawable([asked, solved]) is solved
    assert drawable([asked]) is None
    with pytest.raises(InputError, match="no run to draw"):
        asked.plot()


@pytest.mark.slow
def test_a_run_that_ended_early_is_drawn_as_far_as_it_came() -> None:
    class Raises(Own3):
        def pre_backward(self, unit: Unit) -> None:
            raise KeyError(unit.name)

    yours, _, reference, _ = grade(Raises, "zero3").plot().panels
    ends = [panel.of(Areas)[0].at[-1] for panel in (yours, reference)]
    assert ends[0] < ends[1]


@pytest.mark.slow
def test_a_picture_is_written_beside_the_grade(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.svg"
    assert main(["grade", str(SOLUTIONS / "zero2.py"), "--plot", str(out)]) == 0
    assert f"drew zero2 into {out}" in capsys.readouterr().out
    assert "your run beside the reference" in out.read_text("utf-8")


@pytest.mark.parametrize(
    ("file", "out", "said"),
    [
        ("zero2.py", "run.gif", "expected a name that ends in .png or .svg"),
        ("nf4.py", "run.svg", "nf4 runs no training"),
        ("zero2.py", "nowhere/run.svg", "does not exist"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_at_once(
    file: str, out: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grade", str(SOLUTIONS / file), "--plot", str(tmp_path / out)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
