"""When and by which pieces parameters are gathered, and which stay: the choices of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zerosim.config import RunConfig
from zerosim.config.parts.gathering import Gathering
from zerosim.config.parts.memory import is_loss_in_model
from zerosim.config.parts.tuning import are_units
from zerosim.parallel.exchange import Slices
from zerosim.parallel.gathered import Gathered, Prefetch, Residency
from zerosim.parallel.gathers import AllGather
from zerosim.parallel.pieces import Pieces, Place
from zerosim.parallel.prefetch import Elements, Units
from zerosim.parallel.published import InForward, Published


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add the gathers, what stays gathered and what is prefetched, and the pieces of a block that are gathered."""
    choices = config.gathering
    published: Callable[[Slices], Published] = InForward if config.reduction.in_forward else Published
    if config.parallel.zero_stage == 3:
        inside = is_loss_in_model(config.memory)
        units = {"by_adapters": are_units(config.tuning), "at_loss": inside and not config.memory.use_reentrant}
        published = gathered(Gathered, choices, keep_output=choices.keep_last_output and inside, **units)
    return made._replace(
        gathers=AllGather(config.reduction.allgather_bucket),
        published=published,
        rows=partial(made.rows, casts=choices.cast_shards and config.precision.has_masters),
        by_module=choices.by_module,
        tiles=choices.tiles,
    )


def residency_of(choices: Gathering, *, keep_output: bool = False) -> Residency:
    """Return what stays gathered."""
    keeps = not choices.reshard_after_forward
    return Residency(keeps, choices.keep_last_unit, choices.keep_root_units, choices.stays, keep_output)


def keeping(choices: Gathering, numel: int) -> int:
    """Return the least `persistent_numel` with which a flat of so many elements stays."""
    return numel + (not choices.by_module)


def gathered(
    kind: type[Gathered], choices: Gathering, *, keep_output: bool = False, **units: bool
) -> Callable[[Slices], Published]:
    """Return what makes stage 3's gathered parameters over an exchange."""

    def make(exchange: Slices) -> Gathered:
        prefetch: Prefetch | None = None
        if choices.prefetch:
            prefetch = Units(choices.prefetch, choices.forward_prefetch, **units)
        if choices.prefetch_elements:
            prefetch = Elements(choices.prefetch_elements, choices.max_live)
        return kind(exchange, residency_of(choices, keep_output=keep_output), prefetch)

    return make
