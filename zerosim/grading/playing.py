"""An answer's own run in the player, beside the reference's: it opens at the event that the first failure names.

The run is that of the first failure, else the first one; a failed run is played up to its end. The player's source
lines are the answer's own.
"""

from __future__ import annotations

from zerosim.errors import InputError
from zerosim.grading.exercise import Exercise
from zerosim.grading.picture import begun, points_at, reference
from zerosim.grading.verdict import Recorded, Verdict
from zerosim.ledger.ranks import RankLedgers
from zerosim.playback.encode import encode
from zerosim.playback.notebook import Player
from zerosim.playback.record import Line
from zerosim.playback.record import Recorded as Played
from zerosim.train.result import RunResult, collect
from zerosim.train.run import Experiment

YOURS, REFERENCE = "yours", "reference"


def played(exercise: Exercise, verdict: Verdict) -> Player:
    """Play the answer's run and the reference's; the answer's alone if both are more than a page holds.

    Raises: InputError if the answer did not run, or its run is too large.
    """
    case, recorded = begun(exercise, verdict)
    mine = Played(_result(exercise, recorded), _lines(recorded), YOURS)
    event = points_at(verdict, recorded)
    opens = None if event is None else (recorded.rank, event)
    theirs = Played(reference(exercise, case), name=REFERENCE)
    try:
        return Player(encode(mine, theirs, opens=opens), mine.result)
    except InputError:
        return Player(encode(mine, opens=opens), mine.result)


def _result(exercise: Exercise, recorded: Recorded) -> RunResult:
    """Return a run's counts, whether it came to its end or not."""
    experiment = Experiment(next(case.config for case in exercise.cases if case.label == recorded.case))
    config = experiment.config
    ledgers = {rank: RankLedgers(rank) for rank in range(config.mesh.ranks)}
    for rank, one in ledgers.items():
        one.events = recorded.records[rank]
        for reader in one.readers:
            reader.read(recorded.records[rank])
    ranks = range(config.mesh.ranks)
    return collect(config, experiment.model, experiment.layout, ledgers, ranks, [], keep_events=True)


def _lines(recorded: Recorded) -> list[list[Line | None]]:
    return [
        [None if at < 0 else Line(*sources[at]) for at in lines]
        for lines, sources in zip(recorded.lines, recorded.sources, strict=True)
    ]
