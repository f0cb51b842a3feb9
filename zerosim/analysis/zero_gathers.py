"""What stage 3 gathers in a step, what stays gathered, and what it gathers again: from configuration and layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise

from zerosim.analysis import formulas
from zerosim.analysis.recompute import is_wrapped, parts_again
from zerosim.analysis.shares import Placed, Share
from zerosim.config import RunConfig
from zerosim.config.parts.tuning import are_whole
from zerosim.parallel import pipeline
from zerosim.placement.spec import FlatSpec, is_block


def schedule_of(config: RunConfig, passes: int = 1) -> formulas.Schedule:
    """Return how often stage 3 gathers in a step."""
    gathering, is_cut = config.gathering, config.mesh.pp > 1
    return formulas.Schedule(
        micro_batches=passes * config.data.accumulate,
        tied=config.model.has_blocks and config.model.tie_embeddings,
        reshard_after_forward=gathering.reshard_after_forward,
        keep_last_unit=gathering.keep_last_unit and not is_cut,
        keep_root_units=gathering.keep_root_units,
        persistent=gathering.persistent_numel > 0,
        again=gathering.by_module,
        kept=passes if gathering.keep_last_unit and is_cut and gathering.reshard_after_forward else 0,
    )


def freed_of(placed: Placed, share: Share) -> set[str]:
    """Return the flat buffers whose parameters do not stay gathered."""
    config, layout, whole = placed.config, placed.layout, are_whole(placed.config.tuning)
    gone = {name for name, numel in share.numels.items() if not config.gathering.stays(numel)}
    return {name for name in gone if not (whole and layout.is_trained(name))}


def kept_for_next(
    placed: Placed, share: Share, numels: Mapping[str, int], reached: Collection[str] | None = None
) -> int:
    """Return U: the last unit or, in a pipeline, the gathers saved in a step by units that stay gathered for the next
    use. `reached`: the buffers that backward reads, if not all; the others are freed."""
    config, flats, freed = placed.config, placed.layout.flats, freed_of(placed, share)

    def total(names: Iterable[str]) -> int:
        return sum(numels[name] for name in names if name in freed)

    def of_unit(unit: str) -> list[str]:
        """Return the buffers of a unit's last gather: with --gather module, those of its last leaf."""
        names = [name for name in share.numels if flats[name].unit == unit]
        last = [name for name in names if flats[name].module == flats[names[-1]].module]
        return [name for name in last if reached is None or name in reached]

    last = _used_twice(config, share, placed) if config.mesh.pp > 1 else [share.chunks[-1][-1]]
    last = [unit for unit in last if is_block(unit) or not config.gathering.keep_root_units]
    return sum(count * total(of_unit(unit)) for unit, count in Counter(last).items())


def runs_again(config: RunConfig, flat: FlatSpec) -> bool:
    """Return whether backward recomputes the forward of a flat buffer's leaf module."""
    if not config.gathering.by_module:
        return False
    parts = {weight.role.part for weight in flat.weights if weight.role is not None}
    return is_wrapped(config, flat.unit) or not parts.isdisjoint(parts_again(config, flat.unit))


def _used_twice(config: RunConfig, share: Share, placed: Placed) -> list[str]:
    """Return the unit of each forward whose last unit is used again next, by the pipeline stage's schedule."""
    chunks = config.chunks
    actions = pipeline.schedule_of(config.parallel)(chunks.stages, share.stage, config.data.accumulate, chunks.each)
    actions = [action for action in actions if share.chunks[action.chunk]]  # the others use none
    by_module, flats, found = config.gathering.by_module, placed.layout.flats, []
    modules = [{flats[name].module for name in share.numels if flats[name].unit in units} for units in share.chunks]
    for action, following in pairwise(actions):
        units = share.chunks[action.chunk]
        turns = following.sends < 0 or len(modules[action.chunk]) == 1  # or the next forward begins where it ended
        if by_module and is_wrapped(config, units[-1]):
            continue  # its second forward comes first
        if action.sends > 0 and following.gathers and following.chunk == action.chunk and turns:
            found.append(units[-1])
    return found
