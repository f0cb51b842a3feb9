"""COUNTS: what is read off the ledgers of a run, and of its schedule, for a printed figure to be compared with.

No formula is in them. Bytes are those of the rank with the most, padding included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType

from zerosim.analysis.expect.asked import WHOLE, Asked, Quantity, ring_share
from zerosim.analysis.expect.sweeps import PIPELINE_STAGE
from zerosim.analysis.expect.times import TIMES
from zerosim.analysis.shares import shares_of
from zerosim.analysis.slots import counted_bubble, slots_of
from zerosim.device.events import Launch
from zerosim.dtypes import dtype
from zerosim.errors import InputError
from zerosim.parallel.pipeline import SCHEDULES
from zerosim.placement.spec import is_block
from zerosim.train.plan import plan


def _counted_states(asked: Asked) -> int:
    at = asked.moment()
    return max(sum(memory.model_states(at).values()) for memory in asked.memory_of_ranks)


def _counted_live(asked: Asked) -> int:
    at = asked.moment()
    return max(memory.marks[at].total_bytes for memory in asked.memory_of_ranks)


def _counted_spared(asked: Asked) -> int:
    """By the peaks."""
    whole = replace(asked, config=asked.config.at_stage(0))
    return _counted_peak(whole) - _counted_peak(asked)


def _counted_peak(asked: Asked) -> int:
    return max(memory.peak.total_bytes for memory in asked.memory_of_ranks)


def _counted_allocated(asked: Asked) -> int:
    held = [memory.allocator.allocated_bytes for memory in asked.memory_of_ranks if memory.allocator is not None]
    if not held:
        raise InputError("allocated_bytes: an exact allocator has no blocks; give allocator, such as 'caching'")
    return max(held)


def _counted_sent(asked: Asked) -> int:
    result = asked.result
    return max(result.sent_bytes(rank, len(result.steps) - 1) for rank in range(result.config.mesh.ranks))


def _counted_volume(asked: Asked) -> Fraction:
    result, share, last = asked.result, ring_share(asked.config), len(asked.result.steps) - 1
    rows = [row for rows in result.traffic for row in rows if row.step == last and row.purpose == "states"]
    elements = sum((Fraction(row.wire_bytes, dtype(row.dtype).itemsize) for row in rows), Fraction(0))
    return elements / asked.config.mesh.ranks / share / result.num_parameters


def _counted_blocks(asked: Asked) -> list[int]:
    """What each block's forward saved, as its ops recorded it."""
    kept = [sum(row.nbytes for row in rows) for unit, rows in asked.result.saved.items() if is_block(unit)]
    if not kept or asked.config.model.family == "flat":
        raise InputError(f"model {asked.config.model.name} has no blocks whose activations could be counted")
    return kept


def _counted_share(asked: Asked) -> Fraction:
    """Of all blocks, beside the same run with nothing recomputed and no sequence parallelism."""
    whole = replace(asked, config=asked.config.replace(**WHOLE))
    return Fraction(sum(_counted_blocks(asked)), sum(_counted_blocks(whole)))


def _counted_partition(asked: Asked) -> Fraction:
    """By every message of a block that tp's first rank sent, in a step whose record is kept."""
    sent = {"all_gather": 0, "all_reduce": 0}
    for event in plan(asked.config, keep_events=True).events[0]:
        if isinstance(event, Launch) and event.axis == "tp" and is_block(event.scope.block):
            sent[event.op] += event.wire_bytes
    if not sent["all_gather"] or not sent["all_reduce"]:
        raise InputError("partition_share: no block's input was gathered; give partition_activations, tp and recompute")
    return Fraction(sent["all_gather"], sent["all_reduce"])


def _counted_largest(asked: Asked) -> int:
    """Of flat models by their states, times mp: a model of mp times as many parameters leaves each rank what one of
    this size does. Of others by all that a step takes, with more and more layers."""
    c = asked.config
    if c.model.family == "flat":
        return asked.runs.largest_states(c, asked.memory) * asked.mp
    if asked.mp > 1:
        raise InputError(f"mp {asked.mp}: multiplies flat models; model {c.model.name} runs on tp ranks, give tp")
    layers = asked.runs.largest(c, asked.memory, "layers")
    return asked.runs.model(c.replace(layers=layers)).num_parameters if layers else 0


def _counted_reserved(asked: Asked) -> int:
    if asked.config.memory.allocator == "exact":
        raise InputError("reserved_bytes: an exact allocator takes what is live; give allocator, such as 'caching'")
    return max(memory.reserved_bytes for memory in asked.memory_of_ranks)


def _counted_of_a_rank(asked: Asked) -> int:
    """By the layout that the run was placed with."""
    held = [share.num_parameters for share in shares_of(asked.result)]
    return max(held) if asked.pipeline_stage is None else held[asked.pipeline_stage]


def _counted_matrices(asked: Asked) -> int:
    flats = asked.runs.model(asked.config).flats
    shapes = [spec.whole_shape for flat in flats if is_block(flat.name) for spec in flat.spec.weights]
    return sum(math.prod(shape) for shape in shapes if len(shape) == 2)


def _counted_bubble(asked: Asked) -> Fraction:
    """Of the lists of actions that the engine runs; nothing has to run for that."""
    c = asked.config
    if c.mesh.pp == 1:
        raise InputError("pp 1: one stage waits for nobody; give two at least")
    order, batches = SCHEDULES[c.parallel.pipeline_schedule], c.data.accumulate
    lists = [order(c.mesh.pp, stage, batches, c.parallel.num_chunks) for stage in range(c.mesh.pp)]
    return counted_bubble(slots_of(lists, c.chunks))


COUNTS: Mapping[str, Quantity] = MappingProxyType(
    {
        "model_states_bytes": Quantity(
            _counted_states,
            "bytes",
            "param + grad + optim on the rank with the most, padding included",
            takes=("at", PIPELINE_STAGE),
        ),
        "live_bytes": Quantity(
            _counted_live,
            "bytes",
            "all that is live at a moment, on the rank with the most",
            takes=("at", PIPELINE_STAGE),
        ),
        "grad_bytes": Quantity(
            lambda asked: max(memory.model_states()["grad"] for memory in asked.memory_of_ranks),
            "bytes",
            "gradients that are live when backward ends, on the rank with the most",
            takes=(PIPELINE_STAGE,),
        ),
        "peak_bytes": Quantity(
            _counted_peak,
            "bytes",
            "the most live bytes at once, on the rank with the most",
            takes=(PIPELINE_STAGE,),
        ),
        "allocated_bytes": Quantity(
            _counted_allocated,
            "bytes",
            "the most at once of the blocks that the allocator gave, rounding and unsplit rests included",
            takes=(PIPELINE_STAGE,),
        ),
        "reserved_bytes": Quantity(
            _counted_reserved,
            "bytes",
            "the most that the allocator had taken from the device, in use or cached",
            takes=(PIPELINE_STAGE,),
        ),
        "spared_bytes": Quantity(_counted_spared, "bytes", "the peak of the same run at stage 0, less this one's"),
        "sent_bytes": Quantity(_counted_sent, "bytes", "model states sent in the last step, by the rank with the most"),
        "sent_over_psi": Quantity(
            _counted_volume, "volume", "elements of model states sent in the last step, x N/(N-1), over Ψ"
        ),
        "block_activation_bytes": Quantity(
            lambda asked: max(_counted_blocks(asked)), "bytes", "what forward keeps of one block"
        ),
        "activation_bytes": Quantity(
            lambda asked: sum(_counted_blocks(asked)), "bytes", "what forward keeps of all blocks"
        ),
        "activation_share": Quantity(
            _counted_share,
            "share",
            "what forward keeps of all blocks, over what it keeps with nothing recomputed and no sequence parallelism",
        ),
        "partition_share": Quantity(
            _counted_partition, "share", "what blocks all-gather over tp for Pa, over what else they send there"
        ),
        "parameters_of_a_rank": Quantity(
            _counted_of_a_rank,
            "count",
            "parameters that the rank with the most holds, copies and padding included",
            takes=(PIPELINE_STAGE,),
        ),
        "bubble": Quantity(_counted_bubble, "share", "slots in which a stage waits, over those that its actions take"),
        "parameters": Quantity(
            lambda asked: asked.runs.model(asked.config).num_parameters,
            "count",
            "parameters that the model declares, a tied table once",
        ),
        "block_matrices": Quantity(
            _counted_matrices, "count", "elements of the matrices that the model's blocks declare"
        ),
        "largest_model": Quantity(
            _counted_largest,
            "count",
            "most parameters of a model that fits: flat by its states, x mp; others by a whole step, layer by layer",
            ("memory",),
            ("mp",),
        ),
        "largest_batch": Quantity(
            lambda asked: asked.runs.largest(asked.config, asked.memory, "micro_batch"),
            "count",
            "most rows of a micro-batch with which a step fits",
            ("memory",),
        ),
        **TIMES,
        "fits": Quantity(
            lambda asked: int(asked.runs.fits(asked.config, asked.memory)),
            "verdict",
            "whether a step needs no more than the memory",
            ("memory",),
        ),
    }
)
