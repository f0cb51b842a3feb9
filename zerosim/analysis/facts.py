"""How a configuration's ZeRO divides and sends: facts that several closed forms ask for."""

from __future__ import annotations

from zerosim.analysis import formulas
from zerosim.analysis.formulas import Form
from zerosim.analysis.formulas.states import N
from zerosim.config import RunConfig
from zerosim.config.parts.parallel import owns_units
from zerosim.config.parts.tuning import are_whole, casts_frozen, has_whole_scales, stores_codes
from zerosim.dtypes import compute_dtype, dtype


def operations(config: RunConfig) -> tuple[str, str]:
    """Return the operation that reduces gradients and the one that brings parameters."""
    if config.parallel.zero_stage == 0:
        return "all_reduce", ""
    if is_owned(config):
        return "reduce", "broadcast"
    return config.reduction.grad_reduction if config.parallel.zero_stage < 3 else "reduce_scatter", "all_gather"


def frozen_of(config: RunConfig) -> formulas.Frozen | None:
    """Return the bytes per frozen parameter; None if all are trained."""
    is_coded = stores_codes(config.tuning)
    if is_coded is None:
        return None
    tuning, stored = config.tuning, dtype(config.precision.stored)
    each = (compute_dtype(stored) if casts_frozen(tuning) else stored).itemsize
    return formulas.Frozen(each, is_coded, has_whole_scales(tuning), are_whole(tuning))


def reductions(config: RunConfig, passes: int = 1) -> int:
    """Return how often a step reduces gradients: once, or in stages 2 and 3 in every microbatch."""
    return passes * (config.data.accumulate if config.parallel.zero_stage > 1 and config.grads.sync else 1)


def is_owned(config: RunConfig) -> bool:
    """Return whether ranks own whole units. ZeRO stage 0 divides nothing."""
    return config.parallel.zero_stage > 0 and owns_units(config.parallel)


def is_divided(config: RunConfig) -> bool:
    """Return whether several ranks divide model states."""
    return config.parallel.zero_stage > 0 and config.mesh.shards > 1


def is_among_all(config: RunConfig) -> bool:
    """Return whether all ranks divide model states: there are no replicas, and no tensor parallelism or pipeline."""
    return config.mesh.shards == config.mesh.ranks


def experts_in(config: RunConfig) -> str:
    """Return where experts lie between f and g of tensor parallelism: 'inside'; 'apart', where each rank sends its own
    rows to them; 'beside' shared ones that f and g have; '' for none."""
    if not config.model.has_experts:
        return ""
    beside = "beside" if config.model.width("shared") else "apart"
    return beside if config.mesh.axes.is_folded else "inside"


def reduce_times(config: RunConfig) -> int | Form:
    """Return `all_reduce_times` of the ranks that divide model states; N where those of experts are others."""
    if is_by_pairs(config) and experts_in(config) in ("apart", "beside"):
        return N
    return all_reduce_times(config, config.mesh.shards)


def is_by_pairs(config: RunConfig) -> bool:
    """Return whether an all_reduce sends whole buffers to all other ranks."""
    return config.world.algorithm == "pairs"


def all_reduce_times(config: RunConfig, ranks: int) -> int:
    """Return the multiple of its payload that an all_reduce of that many ranks moves, before the factor (N-1)/N."""
    return formulas.all_reduce_volume(ranks, pairs=is_by_pairs(config))
