"""Checkpoints of a run: the saved step that it goes on from, when it saves, and what the manifest says of it."""

from __future__ import annotations

from dataclasses import replace

from zerosim.config import RunConfig
from zerosim.errors import wrong
from zerosim.optim.optimizer import Optimizer
from zerosim.optim.states import by_weight
from zerosim.placement.partition import Slice
from zerosim.state.checkpoint import Checkpoint
from zerosim.state.folder import StateFolder, newest
from zerosim.state.resume import check, writer
from zerosim.state.saver import Checkpoints, Saving
from zerosim.train.build import Whole
from zerosim.train.build_updater import build_updater
from zerosim.train.rank import Inputs

NOT_SAVED = (
    *("save_state", "save_every", "save_as", "save_keep", "resume", "mtbf"),
    *("weights", "adapters", "sample", "sample_tokens", "backend", "world", "ranks_per_process"),
)
"""Options of one run alone, which a run that goes on does not take from it."""


def with_checkpoints(
    config: RunConfig, whole: Whole, inputs: Inputs, optimizer: Optimizer | None
) -> tuple[StateFolder | None, Inputs]:
    """Return the folder in which a run saves, and its inputs: those of the saved step that it goes on from. With a way
    to save and no folder, saves are recorded and nothing is written.

    Raises: InputError if that is not of this run.
    """
    saving, start = config.saving, None
    if saving.resume is not None:
        start = _opened(saving.resume, config, whole, inputs.steps, optimizer)
        inputs = replace(inputs, write=writer(start), checkpoints=Checkpoints(start))
    if saving.way is None:
        return None, inputs
    folder = None if saving.folder is None else StateFolder(saving.folder, saving.keep)
    return folder, replace(inputs, checkpoints=Checkpoints(start, saving_of(config, inputs.steps, folder)))


def unwritten(inputs: Inputs) -> Inputs:
    """Return the inputs of a run whose saves are recorded, and written nowhere."""
    before = inputs.checkpoints
    return replace(inputs, checkpoints=before._replace(saving=before.saving._replace(folder=None)))


def _opened(path: str, config: RunConfig, declared: Whole, steps: int, optimizer: Optimizer | None) -> Checkpoint:
    """Open the newest whole step. Raises: InputError if it is of another model or optimizer, or has no step left."""
    folder, (model, layout) = newest(path), declared
    checkpoint, updater = Checkpoint(folder), build_updater(config, steps, optimizer=optimizer)
    if checkpoint.step >= steps:
        raise wrong("steps", f" {steps}: {folder} has done {checkpoint.step}; pass more, in all", beside="resume")
    states = {
        mine.weight.name: set(places)
        for flat in model.flats
        if flat.spec.is_trained
        for whole in [Slice(0, flat.numel, flat.numel)]
        for mine, places in by_weight(updater.arrays(flat, whole), flat.spec, whole)
    }
    balance = model.group.balance
    routers = {} if balance is None else {name: (len(bias),) for name, bias in balance.biases.items()}
    weights = [weight for flat in model.flats for weight in flat.spec.weights]
    cuts = {weight.own_name: tuple(cut.split for cut in weight.cuts(layout.mesh, 0)) for weight in weights}
    check(checkpoint, {**model.shapes(), **routers}, states, cuts)
    return checkpoint


def saving_of(config: RunConfig, steps: int, folder: StateFolder | None) -> Saving:
    """Return how a run of so many steps saves: after every K, and after the last."""
    every, given = config.saving.every, config.given.items()
    kept = {name: list(value) if isinstance(value, tuple) else value for name, value in given if name not in NOT_SAVED}
    return Saving(
        config.saving.way or "", lambda done: done == steps or bool(every and done % every == 0), kept, folder
    )
