"""What the ranks of one pipeline stage hold of a run's model: the formulas' numbers there, of the layout alone.

A rank holds a part of the model, cut by layers over pipeline stages and within weights over tensor-parallel ranks: its
Psi is that part's. All ranks of a stage hold as much. Without a pipeline there is one stage, of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from zerosim.analysis import formulas
from zerosim.analysis.formulas import BytesPerParameter, Volume
from zerosim.config import RunConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.dtypes import compute_dtype, dtype
from zerosim.parallel.pipeline import SCHEDULES, Pipeline
from zerosim.placement.spec import FlatSpec, WeightSpec, is_block, unit_of
from zerosim.placement.stages import cut_units
from zerosim.train.result import RunResult


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


def shares_of(result: RunResult) -> list[Share]:
    """Every pipeline stage's."""
    return [share_of(result, stage) for stage in range(result.layout.mesh.pp)]


def share_of(result: RunResult, stage: int) -> Share:
    layout, config = result.layout, result.config
    pp, each = layout.mesh.pp, layout.mesh.world_size // layout.mesh.pp  # stages are the slowest axis
    units = list(dict.fromkeys(flat.unit for flat in layout.flats.values()))
    tied = next(iter(layout.flats)) if result.tied_numel else ""
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
def cost_of(result: RunResult, stage: int | None = None) -> BytesPerParameter:
    """Bytes per parameter of each model state in this run: of the whole model, or of a pipeline stage's part of it."""
    config, layout = result.config, result.layout
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


def _kept_sizes(config: RunConfig) -> tuple[int, int]:
    """Bytes of a parameter's master, and of a number that an optimizer keeps."""
    master = formulas.MASTER_BYTES if config.precision.has_masters else 0
    return master, compute_dtype(dtype(config.precision.stored)).itemsize


def itemsizes(config: RunConfig) -> tuple[int, int]:
    """Bytes of a parameter, and of a gradient."""
    return dtype(config.precision.stored).itemsize, dtype(config.precision.grad_dtype).itemsize


def is_owned(config: RunConfig) -> bool:
    """Whole units belong to ranks. Stage 0 divides nothing."""
    return config.parallel.partition == "owner" and config.parallel.zero_stage > 0


def is_sliced(config: RunConfig) -> bool:
    return config.parallel.partition == "slices" and config.parallel.zero_stage > 0


def is_mesh(config: RunConfig) -> bool:
    """Whether ranks hold parts of the model that differ in more than ZeRO's slices."""
    return config.mesh.tp > 1 or config.mesh.pp > 1


def is_by_pairs(config: RunConfig) -> bool:
    """Whether an all_reduce sends whole buffers to all others."""
    return config.world.algorithm == "pairs"


def all_reduce_times(config: RunConfig, ranks: int) -> int:
    """What an all_reduce of so many ranks moves of its payload, before the factor (N-1)/N."""
    return formulas.all_reduce_volume(ranks, pairs=is_by_pairs(config))


# -- ZeRO's volume -------------------------------------------------------------------------------
PART_OF_LEAF: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("ln_1", "ln_2", "input_layernorm", "post_attention_layernorm"), "layernorm"),
        **dict.fromkeys(("attn.c_proj", "self_attn.o_proj"), "attn_proj"),
        **dict.fromkeys(("mlp.c_fc", "mlp.gate_up_proj"), "fc1"),
    }
)
"""Which part of a block that may run again (`config/recompute.py`) a leaf module is."""


def passes_of(result: RunResult, step: int) -> int:
    """How often forward and backward ran in a step: twice where an estimate of curvature followed it."""
    return 2 if result.steps[step].estimated else 1


def volume_of(result: RunResult, stage: int = 0, *, passes: int = 1) -> Volume:
    """The elements that ranks of a pipeline stage move per step for ZeRO."""
    config, gathering, share = result.config, result.config.gathering, share_of(result, stage)
    held, is_alone = letters_of(result, stage), config.mesh.pp == 1
    keeps_last = gathering.keep_last_unit and held["U"] > 0
    volume = formulas.volume(
        config.parallel.zero_stage,
        micro_batches=config.data.accumulate,
        tied=held["VD"] > 0,
        reshard_after_forward=gathering.reshard_after_forward,
        keep_last_unit=keeps_last and is_alone,
        grad_reduction="reduce_scatter" if is_owned(config) else config.reduction.grad_reduction,
        all_reduce=all_reduce_times(config, config.mesh.shards),
        keep_root_units=gathering.keep_root_units,
        persistent=held["P"] > 0,
        again=held["M"] > 0,
        last_is_root=not is_block(share.chunks[-1][-1]) or result.tied_numel > 0,
        passes=passes,
    )
    saves = keeps_last and not is_alone and config.parallel.zero_stage == 3 and gathering.reshard_after_forward
    return volume.keeping(passes) if saves else volume


def letters_of(result: RunResult, stage: int = 0, *, padded: bool = False) -> dict[str, int]:
    """Values for the letters of a pipeline stage's volume, in elements with their padding or without, and in bytes.

    U is the last unit or, in a pipeline, all that is saved in a step by units that stay gathered for the next use.
    """
    share, gathering, flats = share_of(result, stage), result.config.gathering, result.layout.flats
    freed = {name for name, numel in share.numels.items() if not gathering.stays(numel)}
    numels = share.whole if padded else share.numels

    def total(names: Iterable[str]) -> int:
        return sum(numels[name] for name in names if name in freed)

    def of_unit(unit: str) -> list[str]:
        """The buffers of a unit's last turn: by module, those of its last leaf."""
        names = [name for name in share.numels if flats[name].unit == unit]
        return [name for name in names if flats[name].module == flats[names[-1]].module]

    last = [share.chunks[-1][-1]]
    if result.config.mesh.pp > 1:
        last = [name for name in _used_twice(result, share) if is_block(name) or not gathering.keep_root_units]
    param_bytes, grad_bytes = itemsizes(result.config)
    return {
        "Ψ": sum(numels.values()),
        "N": result.config.mesh.shards,
        "VD": total([share.tied]),
        "U": total(name for unit in last for name in of_unit(unit)),
        "R": total(name for name in freed if not is_block(flats[name].unit)),
        "P": sum(numels[name] for name in share.numels if name not in freed),
        "M": total(name for name in share.numels if runs_again(result.config, flats[name].module)),
        "w": param_bytes,
        "g": grad_bytes,
    }


def runs_again(config: RunConfig, module: str) -> bool:
    """Whether backward runs a leaf module's forward a second time, beside its own turn."""
    if config.gathering.gather == "unit":
        return False
    unit = unit_of(module)
    part = PART_OF_LEAF.get(module.removeprefix(f"{unit}."))
    return _is_wrapped(config, unit) or part in config.memory.again.parts


def _is_wrapped(config: RunConfig, unit: str) -> bool:
    """Whether backward runs this unit again whole."""
    return config.model.has_blocks and is_block(unit) and config.memory.again.wraps(int(unit.rpartition(".")[2]))


def _used_twice(result: RunResult, share: Share) -> list[str]:
    """The unit of each forward whose last unit is used next once more, as the stage's schedule has it."""
    config = result.config
    order = SCHEDULES[config.parallel.pipeline_schedule]
    actions = Pipeline(config.chunks, share.stage, order=order).actions(config.data.accumulate)
    by_module, flats, found = config.gathering.by_module, result.layout.flats, []
    for action, following in pairwise(actions):
        units = share.chunks[action.chunk]
        modules = {flats[name].module for name in share.numels if flats[name].unit in units}
        turns = following.sends < 0 or len(modules) == 1  # or forward begins again where it ended
        if by_module and _is_wrapped(config, units[-1]):
            continue  # its second forward comes first
        if action.sends > 0 and following.gathers and following.chunk == action.chunk and turns:
            found.append(units[-1])
    return found


def exchanged(result: RunResult, stage: int = 0) -> list[int]:
    """Numbers in each all-reduce of an optimizer's sums, over the flat buffers of a pipeline stage that are sliced."""
    config, flats = result.config, result.layout.flats
    if not is_sliced(config):
        return []
    shapes = [[weight.shape for weight in flats[name].weights] for name in result.layout.stages[stage]]
    return [numel for of_flat in shapes for numel in formulas.exchanged(config.optim.optimizer, of_flat)]


def exchanged_sent(result: RunResult, stage: int = 0) -> Fraction:
    """Bytes that a rank of that stage sends for them, in the type that the optimizer computes in."""
    each = compute_dtype(dtype(result.config.precision.stored)).itemsize
    config, numel = result.config, sum(exchanged(result, stage))
    return formulas.all_reduce_sent(numel, config.mesh.shards, pairs=is_by_pairs(config)) * each


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


def extra_of(result: RunResult, stage: int) -> Extra:
    """What of a stage's share other tensor-parallel ranks hold too."""
    size = result.layout.mesh.tp
    if size == 1:
        return Extra(0, 0, 0)
    replicated, copied, padding = 0, 0, 0
    for name in share_of(result, stage).numels:
        for weight in result.layout.flats[name].weights:
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
