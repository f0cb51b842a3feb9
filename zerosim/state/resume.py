"""Go on from a saved step, on any mesh: each rank fills what it holds from the files.

The same mesh gets the same bits back. On another one weights and states are assembled and cut again. Numbers that are
each rank's own (residuals of compressed gradients) become their mean there, because a mean of gradients is all that
they add to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from zerosim.device.copies import write
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import fp64
from zerosim.errors import InputError
from zerosim.models.model import Model, Shapes, check_names, check_shapes
from zerosim.nn import Group
from zerosim.optim.control import StepControl, StepReport
from zerosim.parallel.base import Strategy
from zerosim.parallel.delayed import Delayed
from zerosim.parallel.stage import Stage
from zerosim.placement.memories import HOST
from zerosim.placement.mesh import CUTS, DATA, SHARES, Mesh
from zerosim.placement.split import Splits
from zerosim.state.checkpoint import Checkpoint
from zerosim.state.runs import (
    BIAS,
    CODES,
    GRAD,
    PARAM,
    SCALES,
    Run,
    Source,
    arrays_of,
    cuts_of,
    own_numbers,
    places,
    run_of,
)
from zerosim.tensor.flat import Flat
from zerosim.tensor.stored import beside

_SCALER = ("scale", "left", "attempts", "last_overflow")
_EXCHANGED = ("residual", "momentum", "worker_error", "server_error", "q")


def numbers_of(strategy: Strategy) -> dict[str, Any]:
    """Return what a rank goes on with that is no tensor; the same on every rank."""
    control = strategy.updater.control
    found: dict[str, Any] = {
        "control": {"steps": len(control.reports), "updates": control.updates, "lr": control.lr},
        "scaler": None if (one := control.scaler) is None else {name: getattr(one, name) for name in _SCALER},
    }
    if isinstance(late := strategy.shards.step, Delayed):
        found["delayed"] = dict(zip(("steps", "scale"), late.held, strict=True))
    return found


def biases(model: Model, mesh: Mesh, device: Device) -> Iterator[Source]:
    """Yield the biases of this rank's routers, on the first rank that has them."""
    balance = model.group.balance
    if balance is None or any(mesh.index(device.rank, axis) for axis in (*DATA, *SHARES, *CUTS)):
        return
    for name, bias in balance.biases.items():
        held = device.alloc((len(bias),), fp64, Kind.TEMP, memory=HOST)
        write(bias, held)
        yield Source(Run(name, name, BIAS, (len(bias),), (), "elements", 0, len(bias)), held)


def writer(checkpoint: Checkpoint) -> Callable[[Flat, Group], None]:
    """Return a function that writes a flat buffer's saved weights into a rank's part of it."""

    def fill(flat: Flat, group: Group) -> None:
        mesh = group.device_mesh
        for index, weight in enumerate(flat.spec.weights):
            where = weight.name, weight.whole_shape, cuts_of(weight, mesh, flat.device.rank)

            def numbers(state: str, count: int, where: Any = where) -> Any:
                name, shape, cuts = where
                return checkpoint.piece(name, state, shape, cuts, 0, count)

            if weight.format is None:
                flat.write(index, numbers(PARAM, weight.numel), exact_master=True)
                continue
            at = beside(flat.spec, index)
            values = numbers(CODES, weight.numel)
            if flat.scales is not None:
                values = np.concatenate([numbers(SCALES, at.stop - at.start), values])
            flat.write(index, values, exact_master=True, coded=True)

    return fill


def restore(checkpoint: Checkpoint, strategy: Strategy, model: Model) -> None:
    """Fill a rank's optimizer states, and all else that it goes on with. Its weights are written already.

    Raises: InputError for states that are not those of this run.
    """
    mesh, rank, updater = strategy.layout.mesh, strategy.device.rank, strategy.updater
    numbers = checkpoint.manifest.numbers
    _decide_on(updater.control, numbers)
    if updater.control.updates:  # else lazy ones were not made yet, and others are zero
        updater.make_states([flat for flat in strategy.flats if flat.spec.is_trained])
    for flat in strategy.flats if updater.control.updates else ():
        arrays = [array for array in arrays_of(strategy, flat) if array.name in flat.states]
        for place in places(flat.spec, arrays, flat.own):
            if place.state in flat.states:
                write(_piece(checkpoint, run_of(place, mesh, rank)), flat.states[place.state][place.at])
    if isinstance(strategy, Stage):
        for run, kept, _ in own_numbers(strategy, rank):
            write(_own(checkpoint, run, _holders(strategy, run)), kept)
    _resume_late(checkpoint, strategy, numbers.get("delayed"))
    if (balance := model.group.balance) is not None:
        for name, bias in balance.biases.items():
            balance.biases[name] = [float(one) for one in checkpoint.piece(name, BIAS, (len(bias),), (), 0, len(bias))]


def _decide_on(control: StepControl, numbers: Mapping[str, Any]) -> None:
    """Let the decisions of later steps follow those that were made."""
    done, scaler = numbers["control"], control.scaler
    control.updates = done["updates"]
    control.reports += [StepReport(None, control.loss_scale, False, done["lr"])] * done["steps"]
    if scaler is not None and numbers["scaler"] is not None:
        for name in _SCALER if scaler.dynamic else _SCALER[1:]:
            setattr(scaler, name, numbers["scaler"][name])


def _piece(checkpoint: Checkpoint, run: Run) -> Any:
    return checkpoint.piece(run.weight, run.state, run.shape, run.cuts, run.start, run.stop, run.rank)


def _own(checkpoint: Checkpoint, run: Run, holders: set[int]) -> Any:
    """Return numbers that are a rank's own: those of this rank if the same ranks had some, else the mean."""
    ranks = checkpoint.ranks_of(run)
    if run.rank is None or ranks == holders:
        return _piece(checkpoint, run)
    if run.follows == "packed":  # the same on all of them
        return _piece(checkpoint, run._replace(rank=min(ranks, default=None)))
    return checkpoint.means(run.weight, run.state, run.cuts, run.start, run.stop)


def _holders(strategy: Strategy, run: Run) -> set[int]:
    """Return the ranks that have numbers of their own for a run's weight: all with its flat buffer."""
    layout, mesh = strategy.layout, strategy.layout.mesh
    names = {name for name, flat in layout.flats.items() if run.weight in (name, *(one.name for one in flat.weights))}
    stages = {stage for stage, held in enumerate(layout.stages) if not names.isdisjoint(held)}
    return {rank for rank in range(mesh.world_size) if mesh.index(rank, "pp") in stages}


def _resume_late(checkpoint: Checkpoint, strategy: Strategy, late: Mapping[str, Any] | None) -> None:
    """Hold back the gradients of an update that waits. Raises: InputError if this run delays no update."""
    step = strategy.shards.step
    if not isinstance(step, Delayed):
        if late is not None and late["scale"] is not None:
            since = checkpoint.manifest.config.get("delayed_update", "STEP")
            raise InputError(
                f"{checkpoint.folder}: an update waits for the next step's backward; resume with --delayed-update "
                f"{since}"
            )
        return
    if late is None:
        return
    if late["scale"] is None:
        step.resume(late["steps"], None, (), ())
        return
    flats = [flat for flat in strategy.flats if flat.spec.is_trained]
    grads = [_waiting(checkpoint, strategy, flat) for flat in flats]
    step.resume(late["steps"], late["scale"], flats, grads)


def _waiting(checkpoint: Checkpoint, strategy: Strategy, flat: Flat) -> Buffer | None:
    if not flat.own.size:
        return None
    with strategy.device.scope(unit=flat.spec.module), strategy.device.at(strategy.shards.gradients.place):
        grad = strategy.device.alloc((flat.own.size,), flat.grad_dtype, Kind.GRAD, padding=flat.own_padding)
    for place in places(flat.spec, [], flat.own):
        run = run_of(place._replace(state=GRAD), strategy.layout.mesh, strategy.device.rank)
        write(_piece(checkpoint, run), grad[place.at])
    return grad


def check(
    checkpoint: Checkpoint, shapes: Shapes, states: Mapping[str, Collection[str]], splits: Mapping[str, Splits]
) -> None:
    """Check before any rank starts that a checkpoint is of the model with those `shapes` and of its optimizer, and that
    what belongs to a weight's pieces finds the same pieces. `states`: by trained weight, the names of its states;
    `splits`: how this run cuts each weight.

    Raises: InputError that names a tensor.
    """
    whose, there = f"the weights of {checkpoint.folder}", checkpoint.shapes
    check_names(there, shapes, whose)
    check_shapes(there, shapes, whose)
    for run, _ in checkpoint.runs():
        before, now = tuple(split for split, _ in run.cuts), splits.get(run.tensor)
        if run.follows in ("blocks", "rows", "columns", "bytes") and before != now:
            axes = " and ".join(f"--{one.axis or 'tiles'} {one.pieces}" for one in before) or "no --tp and no --ep"
            raise InputError(
                f"{checkpoint.folder}: numbers of {run.state} of {run.weight} belong to whole pieces of the mesh "
                f"that wrote them, and cannot be cut otherwise; resume with {axes}, on any --ranks"
            )
    for name, wanted in states.items():
        found = [state for state in checkpoint.states(name) if state not in (PARAM, GRAD)]
        kept = {state for state in found if state not in _EXCHANGED}
        if kept != set(wanted) and (kept or checkpoint.manifest.numbers["control"]["updates"]):
            has, needs = (", ".join(sorted(names)) or "no states" for names in (kept, wanted))
            raise InputError(
                f"{checkpoint.folder}: {name} has {has}, and this run's optimizer needs {needs}; resume with the "
                "optimizer, precision and frozen weights that it was saved with"
            )
