"""Runs that save their state, runs that go on from it, and saved states put together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.comm.runtime import Context, launch
from zerosim.config import RunConfig
from zerosim.device.nvme import in_run_folder
from zerosim.ledger.memory import MARKS
from zerosim.state.checkpoint import Checkpoint
from zerosim.state.folder import StateFolder, step_folder
from zerosim.state.saver import Checkpoints, Saving
from zerosim.train.offload import folder_of
from zerosim.train.rank import train_rank
from zerosim.train.result import RunResult
from zerosim.train.run import Experiment, run
from zerosim.train.world import world_of

WAYS = ("sharded", "gathered", "async")
OF_ELEMENTS = ("elements", "blocks", "rows", "columns", "bytes")
"""What a state's numbers may follow that are not each rank's own."""


def saved(config: RunConfig, folder: Path, at: int, how: str = "sharded") -> RunResult:
    """Train without a break, and save after `at` steps."""
    return run(config.replace(save_state=str(folder), save_every=at, save_as=how))


def resumed(config: RunConfig, folder: Path, at: int, **changes: Any) -> RunResult:
    """Train the steps after `at`, from what was saved then."""
    return run(config.replace(**changes, resume=str(step_folder(folder, at))))


def assert_goes_on(later: RunResult, whole: RunResult, at: int, *, of_host: bool = True) -> None:
    """The resumed run is the end of the run without a break: weights and losses bit for bit, each step's decisions, and
    every byte that is live at each moment of the last step."""
    assert repr(later.losses) == repr(whole.losses[at:])  # a loss may be nan
    assert repr(later.steps) == repr(whole.steps[at:])
    assert list(later.weights) == list(whole.weights)
    for name, values in whole.weights.items():
        assert later.weights[name].tobytes() == values.tobytes(), name
    assert list(later.lost_updates) == list(whole.lost_updates[at:])
    assert list(later.stuck_moments) == list(whole.stuck_moments[at:])
    assert later.live_bytes_after == whole.live_bytes_after
    for here, there in zip(later.memory, whole.memory, strict=True):
        assert here.states == there.states
        memories = [(here.marks, there.marks)]
        memories += [(one.marks, there.others[name].marks) for name, one in here.others.items() if of_host]
        for marks, expected in memories:
            for mark in MARKS[1:]:
                if mark in expected:
                    assert marks[mark].by_unit == expected[mark].by_unit, mark
                    assert marks[mark].padding == expected[mark].padding, mark


def saved_again(config: RunConfig, folder: Path, how: str = "sharded") -> Checkpoint:
    """Resume on the mesh of `config`, save at once, and open what was saved. No step is trained."""
    experiment = Experiment(config)
    start, out = experiment._inputs.checkpoints.start, StateFolder(str(folder))
    assert start is not None

    class AtOnce(Checkpoints):
        def begin(self, *built: Any) -> Any:
            saver = super().begin(*built)
            saver.after(start.step)
            return saver

    checkpoints = AtOnce(start, Saving(how, lambda done: True, dict(config.given), out))
    inputs = dataclasses.replace(experiment._inputs, steps=start.step, checkpoints=checkpoints)

    def program(ctx: Context) -> None:
        train_rank(ctx, config, inputs, whole=experiment.whole)

    def launched(drives: Path | None) -> None:
        launch(program, world_of(config, folder=drives), lambda rank: ())

    where, writes = folder_of(config)
    with out.held():
        in_run_folder(where, launched, writes=writes)
    return opened(folder, start.step)


def opened(folder: Path, step: int) -> Checkpoint:
    return Checkpoint(step_folder(folder, step))


def states_of(checkpoint: Checkpoint) -> dict[tuple[str, str], Any]:
    """Every state of every weight, whole. States that no other mesh can cut, piece by piece."""
    found = {}
    for key, runs in checkpoint._runs.items():
        first = runs[0][0]
        if first.follows == "elements":
            found[key] = checkpoint.whole(*key)
        elif first.follows in OF_ELEMENTS:
            by_piece: dict[Any, list[Any]] = {}
            for run_, stored in sorted(runs, key=lambda one: one[0].start):
                by_piece.setdefault(run_.cuts, []).append(stored.read().reshape(-1))
            found[key] = [np.concatenate(parts) for _, parts in sorted(by_piece.items(), key=repr)]
    return found


def assert_same_states(there: Mapping[Any, Any], here: Mapping[Any, Any]) -> None:
    assert here.keys() == there.keys()
    for key, values in there.items():
        parts = values if isinstance(values, list) else [values]
        others = here[key] if isinstance(values, list) else [here[key]]
        assert len(parts) == len(others), key
        for part, other in zip(parts, others, strict=True):
            assert part.dtype == other.dtype, key
            assert part.tobytes() == other.tobytes(), key
