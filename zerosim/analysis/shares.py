"""What the ranks of one pipeline stage hold of a run's model: the formulas' numbers there, of the layout alone.

A rank holds a part of the model, cut by layers over pipeline stages and within weights over tensor-parallel ranks: its
Psi is that part's. All ranks of a stage hold as much. Without a pipeline there is one stage, of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from zerosim.analysis import formulas
from zerosim.analysis.forms import is_sliced
from zerosim.analysis.formulas import BytesPerParameter
from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.device.device import Device
from zerosim.dtypes import compute_dtype, dtype
from zerosim.placement.layout import Layout
from zerosim.placement.spec import FlatSpec, WeightSpec, is_block
from zerosim.placement.stages import cut_units
from zerosim.train.build import build_model
from zerosim.train.build_strategy import layout_of
from zerosim.train.result import RunResult


class LaidOut(NamedTuple):
    """A configuration with its layout, of which nothing was run."""

    config: RunConfig
    layout: Layout
    num_parameters: int
    tied_numel: int


Placed = RunResult | LaidOut
"""A configuration with its layout."""


def laid_out(config: RunConfig) -> LaidOut:
    """Lay out a configuration's model, in no memory. Raises: InputError."""
    model = build_model(config, Device(0, make_backend("meta")))
    return LaidOut(config, layout_of(config, model), model.num_parameters, model.tied_numel)


@dataclass(frozen=True, slots=True)
class Share:
    """One pipeline stage's part of the model, as each of its `ranks` holds it.

    numels     elements of the weights in its flat buffers, in their order
    whole      elements of each of these buffers with its padding, as its ranks cut it
    units      the names of the units that they belong to, in their order
    tied       the buffer that two of its own units use, '' for none
    ends       the buffer that the first and the last stage both hold, '' for none
    chunks     the names of the units that run one after the other
    """

    stage: int
    ranks: range
    numels: Mapping[str, int]
    whole: Mapping[str, int]
    units: tuple[str, ...]
    tied: str
    ends: str
    chunks: tuple[tuple[str, ...], ...]

    @property
    def num_parameters(self) -> int:
        """The formulas' Psi on each of these ranks, copies and a vocabulary's padding included."""
        return sum(self.numels.values())

    @property
    def layers(self) -> int:
        return sum(map(is_block, self.units))


def shares_of(placed: Placed) -> list[Share]:
    """Every pipeline stage's."""
    return [share_of(placed, stage) for stage in range(placed.layout.mesh.pp)]


def share_of(placed: Placed, stage: int) -> Share:
    layout, config = placed.layout, placed.config
    pp, each = layout.mesh.pp, layout.mesh.world_size // layout.mesh.pp  # stages are the slowest axis
    units = list(dict.fromkeys(flat.unit for flat in layout.flats.values()))
    tied = next(iter(layout.flats)) if placed.tied_numel else ""
    if tied:
        units.append(layout.flats[tied].unit)
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
        whole={name: _padded(config, [weight.numel for weight in layout.flats[name].weights]) for name in names},
        units=tuple(dict.fromkeys(layout.flats[name].unit for name in names)),
        tied=tied if is_alone and tied in names else "",
        ends="" if is_alone or tied not in names else tied,
        chunks=tuple(tuple(units[i] for i in chunk) for chunk in chunks),
    )


def _padded(config: RunConfig, tensors: Sequence[int]) -> int:
    """Elements of a buffer of these tensors, padding included."""
    block = OPTIMIZERS[config.optim.optimizer].block
    if block > 1:
        return formulas.blocked_numel(tensors, config.mesh.shards, block)
    return formulas.padded_numel([sum(tensors)], config.mesh.shards if is_sliced(config) else 1)


def alike_stages(keys: Sequence[object]) -> list[range]:
    """Runs of neighbouring stages with equal keys."""
    runs: list[range] = []
    for stage, key in enumerate(keys):
        if runs and keys[runs[-1].start] == key:
            runs[-1] = range(runs[-1].start, stage + 1)
        else:
            runs.append(range(stage, stage + 1))
    return runs


# -- what a parameter costs, and how states are cut ------------------------------------------------
def cost_of(placed: Placed, stage: int | None = None) -> BytesPerParameter:
    """Bytes per parameter of each model state in this run: of the whole model, or of a pipeline stage's part of it."""
    config, layout = placed.config, placed.layout
    moments = formulas.num_moments(config.optim.optimizer, config.optim.momentum)
    moments += config.precision.rounding == "kahan"
    cast, masters = config.parallel.zero_stage == 3 and config.gathering.cast_shards, config.precision.has_masters
    cost = formulas.bytes_per_parameter(*itemsizes(config), moments, cast_shards=cast, masters=masters)
    if config.optim.optimizer in formulas.UNIFORM:
        return cost
    names = layout.flats if stage is None else layout.stages[stage]
    weights = [weight for name in names for weight in layout.flats[name].weights]
    kept = sum(kept_bytes(config, weight, weight.numel) for weight in weights)
    return replace(cost, optim=Fraction(kept, sum(weight.numel for weight in weights)))


def kept_bytes(config: RunConfig, weight: WeightSpec, held: int) -> int:
    """What a rank with `held` elements of a weight keeps of them: master and states."""
    name, (master, each), momentum = config.optim.optimizer, _kept_sizes(config), config.optim.momentum
    return master * held + formulas.state_bytes(
        name, weight.shape, held, each, momentum, in_block=weight.in_block, embedding=weight.embedding
    )


def kept_padding(config: RunConfig, padding: int) -> int:
    """The same of padding at the end of a slice."""
    name, (master, each), momentum = config.optim.optimizer, _kept_sizes(config), config.optim.momentum
    return master * padding + formulas.padding_bytes(name, padding, each, momentum)


def master_bytes(config: RunConfig) -> int:
    """What a rank holds of each of its parameters before there are optimizer states."""
    return _kept_sizes(config)[0]


def _kept_sizes(config: RunConfig) -> tuple[int, int]:
    """Bytes of a parameter's master, and of a number that an optimizer keeps."""
    master = formulas.MASTER_BYTES if config.precision.has_masters else 0
    return master, compute_dtype(dtype(config.precision.stored)).itemsize


def itemsizes(config: RunConfig) -> tuple[int, int]:
    """Bytes of a parameter, and of a gradient."""
    return dtype(config.precision.stored).itemsize, dtype(config.precision.grad_dtype).itemsize


def is_mesh(config: RunConfig) -> bool:
    """Whether ranks hold parts of the model that differ in more than ZeRO's slices."""
    return config.mesh.tp > 1 or config.mesh.pp > 1


# -- what several ranks hold ----------------------------------------------------------------------
class Extra(NamedTuple):
    """Elements of a rank's share that are not its own alone, or no parameter at all.

    replicated   whole on every tensor-parallel rank: norms, positions, row-parallel biases
    copied       key-value heads of which neighbours hold copies
    padding      rows that a token table (or the end of a flat unit) got so that it can be cut, over all ranks
    """

    replicated: int
    copied: int
    padding: int


def extra_of(placed: Placed, stage: int) -> Extra:
    """What of a stage's share other tensor-parallel ranks hold too."""
    size = placed.layout.mesh.tp
    if size == 1:
        return Extra(0, 0, 0)
    replicated, copied, padding = 0, 0, 0
    for name in share_of(placed, stage).numels:
        for weight in placed.layout.flats[name].weights:
            if weight.split is None:
                replicated += weight.numel
            elif weight.split.copies(size) > 1:
                copied += weight.numel
            elif weight.split.padding:
                rest = weight.numel // weight.split.local_shape[weight.split.dim]
                padding += weight.split.padding * rest
    return Extra(replicated, copied, padding)


def shared_grads(flats: Iterable[FlatSpec], size: int) -> dict[int, int]:
    """A rank's elements by the number of tensor-parallel ranks (of `size`) that hold shares of their gradient."""
    found: dict[int, int] = {}
    for flat in flats:
        for weight in flat.weights:
            if (sharers := weight.sharers(size)) > 1:
                found[sharers] = found.get(sharers, 0) + weight.numel
    return found
