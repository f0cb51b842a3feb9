"""The share of a model on the ranks of one pipeline stage: numbers for the formulas, from the layout alone.

A rank holds a share of the model, cut by layers over pipeline stages and within weights over tensor-parallel ranks. Its
Psi is the size of that share. All ranks of a pipeline stage hold equally much. Without a pipeline all ranks form one
stage.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zerosim.analysis import formulas
from zerosim.config import RunConfig
from zerosim.config.parts.mtp import further_blocks
from zerosim.config.parts.parallel import is_sliced
from zerosim.config.parts.tuning import are_whole, row_of, trained_dtype
from zerosim.dtypes import dtype
from zerosim.placement.layout import Layout
from zerosim.placement.mesh import CUTS, STATES, Mesh
from zerosim.placement.spec import FlatSpec, is_block
from zerosim.placement.stages import cut_units
from zerosim.train.build import declare
from zerosim.train.result import RunResult


class LaidOut(NamedTuple):
    """A configuration with its layout, which has not run."""

    config: RunConfig
    layout: Layout
    num_parameters: int
    tied_numel: int


Placed = RunResult | LaidOut
"""A configuration with its layout."""


def laid_out(config: RunConfig) -> LaidOut:
    """Lay out a configuration's model without allocating memory. Raises: InputError."""
    model, layout = declare(config)
    return LaidOut(config, layout, model.num_parameters, model.tied_numel)


def recut(laid: LaidOut, config: RunConfig) -> LaidOut:
    """Return the same buffers on the mesh of another configuration, which has as many ranks of tp."""
    layout = laid.layout
    other = Layout(config.mesh.axes, list(layout.flats.values()), lambda flat: layout.rows(flat.name), layout.stages)
    return laid._replace(config=config, layout=other)


@dataclass(frozen=True, slots=True)
class Share:
    """One pipeline stage's share of the model, as each of its `ranks` holds it.

    numels     elements of the weights in its flat buffers, in their order
    whole      elements of each of these buffers with padding, as its ranks cut it
    units      the names of their units, in order
    tied       the buffers that two units of this stage share: the table's and, by module, those of its head
    ends       the buffers that the first and the last pipeline stage both hold
    chunks     the names of the units that run one after the other
    """

    stage: int
    ranks: range
    numels: Mapping[str, int]
    whole: Mapping[str, int]
    units: tuple[str, ...]
    tied: tuple[str, ...]
    ends: tuple[str, ...]
    chunks: tuple[tuple[str, ...], ...]

    @property
    def num_parameters(self) -> int:
        """The formulas' Psi on each of these ranks, copies and a vocabulary's padding included."""
        return sum(self.numels.values())

    def only(self, names: Collection[str]) -> Share:
        """Return the share with no elements in other buffers than these."""
        numels, whole = ({n: of[n] if n in names else 0 for n in of} for of in (self.numels, self.whole))
        return replace(self, numels=numels, whole=whole)

    @property
    def layers(self) -> int:
        return sum(map(is_block, self.units))


def shares_of(placed: Placed) -> list[Share]:
    """Return the share of every pipeline stage."""
    return [share_of(placed, stage) for stage in range(placed.layout.mesh.pp)]


def units_of(placed: Placed) -> list[str]:
    """Return the units that have buffers, in the order of their first use; the head last, whatever uses it before."""
    units = list(dict.fromkeys(flat.unit for flat in placed.layout.flats.values()))
    if further_blocks(placed.config.mtp) and not placed.tied_numel:
        units.append(units.pop(max(at for at, unit in enumerate(units) if not is_block(unit))))
    return units


def share_of(placed: Placed, stage: int) -> Share:
    layout, config = placed.layout, placed.config
    pp, each = layout.mesh.pp, layout.mesh.world_size // layout.mesh.pp  # stages are the slowest axis
    units = units_of(placed)
    table = tuple(name for name in layout.flats if layout.flats[name].unit == units[0])
    tied = table if placed.tied_numel else ()
    both = table if tied or further_blocks(config.mtp) else ()
    if tied:
        units.append(units[0])
    runs, lie = [range(len(units))], config.chunks
    if pp > 1:
        runs = cut_units(units, config.layers_by_chunk(sum(map(is_block, units))), is_block)
    chunks = [runs[number] for number in lie.of_stage(stage)]
    is_alone = lie.last_stage == 0  # the table and the head are on one stage
    names = layout.stages[stage]
    return Share(
        stage=stage,
        ranks=range(stage * each, (stage + 1) * each),
        numels={name: layout.flats[name].num_parameters for name in names},
        whole={name: _padded(config, layout, name) for name in names},
        units=tuple(dict.fromkeys(layout.flats[name].unit for name in names)),
        tied=tied if is_alone and set(tied) <= set(names) else (),
        ends=() if is_alone or not set(both) <= set(names) else both,
        chunks=tuple(tuple(units[i] for i in chunk) for chunk in chunks),
    )


def _padded(config: RunConfig, layout: Layout, name: str) -> int:
    """Return the elements of a buffer, padding included. A frozen buffer is cut as parameters are."""
    flat = layout.flats[name]
    tensors, block = [weight.numel for weight in flat.weights], max(row_of(config.tuning, flat), 0) or flat.block
    is_cut = (
        is_sliced(config.parallel)
        and not (are_whole(config.tuning) and layout.is_trained(name))
        and (layout.is_trained(name) or config.parallel.zero_stage == 3)
    )
    if block > 1 and (flat.block > 1 or is_cut):
        return formulas.blocked_numel(tensors, ranks_of(layout, name), block)
    return formulas.padded_numel([sum(tensors)], ranks_of(layout, name) if is_cut else 1)


def ranks_of(layout: Layout, name: str) -> int:
    """Return the number of ranks that the states of a flat buffer are cut over."""
    return layout.mesh.size(*layout.flats[name].axes)


def is_apart(layout: Layout, name: str) -> bool:
    """Return whether a flat buffer has experts, whose states are cut over ranks of their own."""
    return layout.flats[name].axes != STATES


def alike_stages(keys: Sequence[object]) -> list[range]:
    """Yield runs of neighbouring pipeline stages with equal keys."""
    runs: list[range] = []
    for stage, key in enumerate(keys):
        if runs and keys[runs[-1].start] == key:
            runs[-1] = range(runs[-1].start, stage + 1)
        else:
            runs.append(range(stage, stage + 1))
    return runs


# -- facts for the formulas ---------------------------------------------------------------------
def itemsizes(config: RunConfig) -> tuple[int, int]:
    """Return the bytes of a parameter, and of a gradient."""
    return dtype(config.precision.stored).itemsize, dtype(config.precision.grad_dtype).itemsize


def trained_itemsize(config: RunConfig) -> int:
    """Return the bytes of a trained parameter: fp32 adapters are wider than their base."""
    return dtype(trained_dtype(config.tuning, config.precision.stored)).itemsize


def has_rows(placed: Placed) -> bool:
    """Return whether a buffer is cut between rows, so that ranks may lack optimizer states."""
    return any(row_of(placed.config.tuning, flat) > 0 for flat in placed.layout.flats.values())


def is_mesh(config: RunConfig) -> bool:
    """Return whether ranks' shares of the model differ in more than ZeRO's slices."""
    return config.mesh.tp > 1 or config.mesh.pp > 1


# -- elements on several ranks ----------------------------------------------------------------------
class Extra(NamedTuple):
    """Elements of a rank's share that other ranks hold too, or that are no parameters.

    replicated   whole on every tensor-parallel rank: norms, positions, row-parallel biases
    copied       key-value heads that neighbouring ranks hold too
    padding      rows added to a token table (or the end of a flat unit) so that it can be cut, over all ranks
    """

    replicated: int
    copied: int
    padding: int


def extra_of(placed: Placed, stage: int) -> Extra:
    """Return the elements of a pipeline stage's share that other tensor-parallel ranks hold too."""
    mesh = placed.layout.mesh
    if mesh.size(*CUTS) == 1:
        return Extra(0, 0, 0)
    replicated, copied, padding = 0, 0, 0
    for name in share_of(placed, stage).numels:
        for weight in placed.layout.flats[name].weights:
            numel = math.prod(weight.shape)
            if not weight.splits:
                replicated += numel
            elif math.prod([weight.copies(mesh, axis) for axis in CUTS]) > 1:
                copied += numel
            elif any(split.padding for split in weight.splits):
                padding += numel * mesh.size(*CUTS) - math.prod(weight.whole_shape)
    return Extra(replicated, copied, padding)


def shared_grads(flats: Iterable[FlatSpec], mesh: Mesh) -> dict[int, int]:
    """Return a rank's elements by the number of ranks that hold shares of their gradient."""
    found: dict[int, int] = {}
    for flat in flats:
        for weight in flat.weights:
            sharers = 1
            for _, count in weight.shared_over(mesh):
                sharers *= count
            if sharers > 1:
                found[sharers] = found.get(sharers, 0) + weight.numel
    return found
