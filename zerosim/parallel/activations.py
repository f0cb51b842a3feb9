"""What a rank keeps of a block for backward: the choices of a run about saved buffers, recompute and the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zerosim.config import RunConfig
from zerosim.config.parts.tuning import is_adapter
from zerosim.config.recompute import AUTO
from zerosim.errors import wrong
from zerosim.functional.policy import ActivationPolicy
from zerosim.nn import OffloadsSaves, Recompute, Retained, SavesOnHost, StoredInputs, Unit
from zerosim.parallel.pieces import Pieces, Place
from zerosim.placement.mesh import CUTS


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add the policy of ops, and what is around blocks. Copies in flight pass from block to block, so no block's record
    can be repeated."""
    memory = config.memory
    if memory.recompute == AUTO:
        raise wrong("recompute", " 'auto': not chosen yet; call zerosim.analysis.auto_recompute.auto, or name a value")
    names = "saves", "attention", "recompute", "fp32_softmax", "repeat_kv", "mlp_tile", "loss_tile"
    returned = memory.use_cache and memory.again.is_whole
    policy = ActivationPolicy(**{name: getattr(memory, name) for name in names}, return_kv=returned)
    copies = memory.offload_activations or memory.stash_window
    return made._replace(policy=policy, wrap=_around(made, config, place, policy), repeats=made.repeats and not copies)


def retaining(made: Pieces, config: RunConfig) -> Pieces:
    """Return a rank's pieces with what FSDP1 holds around each recomputed block that trains nothing but adapters. It is
    outside of the block's record, which may be another block's."""
    if not config.memory.use_reentrant:
        return made
    inner = made.wrap

    def wrap(number: int, unit: Unit) -> Unit:
        weights = [weight.name for flat in unit.all_flats if flat.spec.is_trained for weight in flat.spec.weights]
        keeps = config.memory.again.wraps(number) and all(map(is_adapter, weights))
        return Retained(inner(number, unit)) if keeps else inner(number, unit)

    return made._replace(wrap=wrap)


def _around(made: Pieces, config: RunConfig, place: Place, policy: ActivationPolicy) -> Callable[[int, Unit], Unit]:
    """Return what is put around a block: its saved buffers go to the host, or only its input is kept, whole, in shards
    over tp, or on the host."""
    memory = config.memory
    if memory.offload_activations:
        saves = SavesOnHost(memory.stash_window)
        return lambda number, unit: OffloadsSaves(unit, saves)
    comm = place.groups(*CUTS) if place.groups is not None and config.partitions_inputs else None
    inputs = StoredInputs(comm, on_host=memory.cpu_checkpointing, window=memory.stash_window)
    graph = made.casts.inputs if made.casts else None
    recompute = partial(Recompute, keeps_ends=policy.keeps_ends, graph=graph, routes=made.group.routes)
    return lambda number, unit: recompute(unit, inputs) if policy.again.wraps(number) else unit
