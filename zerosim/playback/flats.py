"""The flat buffers of a run as a page has them: their states' parts, who shares these, which allocations they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zerosim.analysis.shares import itemsizes
from zerosim.backends.kernels import Backend
from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig
from zerosim.device.device import Device, Kind
from zerosim.device.events import Alloc
from zerosim.placement.layout import Layout
from zerosim.placement.mesh import AXES, EXPERTS, FOLDS, Mesh
from zerosim.train.build_model import build_model
from zerosim.train.result import RunResult

_KINDS = {
    "param": (Kind.PARAM, Kind.UNSHARDED_PARAM, Kind.PREFETCHED_PARAM),
    "grad": (Kind.GRAD, Kind.UNSHARDED_GRAD),
    "optim": (Kind.OPTIM,),
}
"""By state, the kinds of its buffers."""


def _numels(layout: Layout, name: str, state: str) -> list[int]:
    """Return the elements that a buffer of a flat's state may have: of the whole, with padding, and of a part."""
    if state not in layout.rows(name):
        return []
    stage = next(stage for stage, names in enumerate(layout.stages) if name in names)
    parts = [part.stop - part.start for part in layout.parts(stage, name, state)]
    return [layout.flats[name].numel, sum(parts), *parts]


def flat_of(event: Alloc, units: Mapping[str, Sequence[str]], result: RunResult) -> str | None:
    """Return which of its unit's flat buffers an allocation is of, of several by its size; None for another kind."""
    names = units.get(event.scope.unit, ())
    state = next((state for state, kinds in _KINDS.items() if event.kind in kinds), None)
    if state is None or len(names) < 2:
        return names[0] if state is not None and names else None
    param, grad = itemsizes(result.config)
    for itemsize in ({"param": param, "grad": grad, "optim": 4}[state], 4, 2, 1):
        for name in names:
            if event.nbytes in {itemsize * numel for numel in _numels(result.layout, name, state)}:
                return name
    return None


def axes_of(mesh: Mesh) -> list[str]:
    """Return the axes with several ranks; those of experts in place of the ones that they fold."""
    axes = [*(axis for axis in AXES if axis not in FOLDS), *EXPERTS] if mesh.is_folded else AXES
    return [axis for axis in axes if mesh.size(axis) > 1]


def groups_of(layout: Layout, ranks: Sequence[int]) -> Mapping[str, list[tuple[int, ...]]]:
    """Return the groups of ranks over which states are cut, by their axes."""
    cuts = {row.axes for name in layout.flats for row in layout.rows(name).values()}
    return {"+".join(axes): sorted({layout.mesh.group(rank, *axes) for rank in ranks}) for axes in cuts}


def flat_data(layout: Layout, name: str) -> dict[str, Any]:
    """Return a flat buffer and, for each of its states, the parts that a group's ranks hold."""
    flat = layout.flats[name]
    stage = next(stage for stage, names in enumerate(layout.stages) if name in names)
    states = {
        state: {
            "axes": list(row.axes),
            "whole": row.is_whole,
            "parts": [[part.start, part.stop] for part in layout.parts(stage, name, state)],
        }
        for state, row in layout.rows(name).items()
    }
    return {"name": name, "numel": flat.numel, "states": states}


def units_of(config: RunConfig) -> Mapping[str, list[str]]:
    """Return each unit's flat buffers, in the model's order."""
    backend: Backend = make_backend("meta")
    units = build_model(config, Device(0, backend)).units
    parts = [part for unit in units for part in (unit, *unit.leaves)]
    return {part.name: [flat.name for flat in part.all_flats] for part in parts}
