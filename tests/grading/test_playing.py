"""An answer's run in the player: what is played is what was recorded, and the page opens where the grade points."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs

import pytest
from grading_here import Own3, grade

from zerosim.cli.main import main
from zerosim.device.events import Launch
from zerosim.errors import InputError
from zerosim.grading import Grade, Unit
from zerosim.playback import decode

SOLUTIONS = Path(__file__).parents[2] / "notebooks" / "solutions"


class KeepsGathered(Own3):
    def post_forward(self, unit: Unit) -> None: ...


class Raises(Own3):
    def pre_backward(self, unit: Unit) -> None:
        raise KeyError(unit.name)


def opens_after(one: Grade) -> list[int]:
    """How many events of each rank have happened where the page opens, and the rank that it is about."""
    data = one.player().data
    opens = {name: int(value[0]) for name, value in parse_qs(data["opens"]).items() if name != "by"}
    ranks = [rank for _, rank, *_ in data["runs"][opens["run"]]["events"][: opens["at"]]]
    return [opens["rank"], *(ranks.count(rank) for rank in range(4))]


@pytest.mark.quick(1)
@pytest.mark.parametrize("answer", [KeepsGathered, Raises])
def test_the_page_opens_at_the_event_of_the_first_failure(answer: type[Own3]) -> None:
    failed = grade(answer, "zero3")
    where, recorded = failed.failures[0].where, failed.verdict.recorded
    assert where is not None
    assert recorded is not None
    mine, theirs = decode(failed.player().data)
    rank, *counts = opens_after(failed)
    assert rank == where.rank
    shown = mine[rank][counts[rank] - 1]
    assert type(shown) is type(recorded.events[where.number])
    assert shown.scope == recorded.events[where.number].scope
    names = [run["name"] for run in failed.player().data["runs"]]
    assert names == ["yours", "reference"]
    launches = [[event for event in record if isinstance(event, Launch)] for record in (mine[0], recorded.records[0])]
    assert launches[0] == launches[1]
    assert len(theirs) == len(mine)


@pytest.mark.slow
def test_each_collective_of_the_answers_has_its_own_line() -> None:
    (run, _) = grade(KeepsGathered, "zero3").player().data["runs"]
    said = {
        run["sources"][line][3]
        for (kind, *_), line in zip(run["events"], run["lines"], strict=True)
        if kind == 4 and line >= 0 and run["sources"][line][0] == "grading_here.py"
    }
    assert said == {
        "unit.flat.unshard(self.comm.all_gather(unit.flat.shard()))",
        "unit.flat.add_grad_shard(self.comm.reduce_scatter(unit.flat.take_grad()))",
    }


def test_an_answer_that_did_not_run_plays_nothing() -> None:
    with pytest.raises(InputError, match="no run to draw"):
        grade(lambda m, q: None, "powersgd").player()


@pytest.mark.slow
def test_a_page_is_written_beside_the_grade(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.html"
    assert main(["grade", str(SOLUTIONS / "zero2.py"), "--html", str(out)]) == 0
    assert f"recorded zero2 into {out}" in capsys.readouterr().out
    assert "yours beside reference" in out.read_text("utf-8")


@pytest.mark.parametrize(
    ("file", "out", "said"),
    [
        ("nf4.py", "run.html", "--html"),
        ("zero2.py", "nowhere/run.html", "does not exist"),
    ],
)
def test_a_page_that_cannot_be_is_refused_at_once(
    file: str, out: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grade", str(SOLUTIONS / file), "--html", str(tmp_path / out)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
