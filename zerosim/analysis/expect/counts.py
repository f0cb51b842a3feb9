"""COUNTS: values read from a run's ledgers and its schedule, to compare with a printed figure.

They contain no formula. Bytes are those of the fullest rank, padding included.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

from zerosim.analysis.expect.asked import (
    WHOLE,
    Asked,
    cluster_named,
    model_of,
    outside_bytes,
    quantity,
    ring_share,
    table,
)
from zerosim.analysis.expect.largest import largest_states, largest_that_fits
from zerosim.analysis.expect.sweeps import BANDWIDTH, GPU, PIPELINE_STAGE
from zerosim.analysis.shares import shares_of, trained_itemsize
from zerosim.analysis.slots import counted_bubble, slots_of
from zerosim.config import RunConfig
from zerosim.config.parts.allocators import is_exact
from zerosim.config.presets.hardware import find_hardware
from zerosim.device.device import Phase
from zerosim.device.events import Launch
from zerosim.dtypes import dtype
from zerosim.errors import InputError
from zerosim.parallel.pipeline import schedule_of
from zerosim.placement.mesh import CUTS
from zerosim.placement.spec import is_block
from zerosim.train.check_trained import num_active, num_trained
from zerosim.train.plan import plan, plan_first_step, timeline_of

_BY_CLOCK: dict[str, Any] = {"needs": ("gpu",), "takes": (BANDWIDTH, GPU)}
"""Keys of a time: its GPU, and the bandwidth of its node's NICs."""


@quantity("bytes", "param + grad + optim on the rank with the most, padding included", takes=("at", PIPELINE_STAGE))
def model_states_bytes(asked: Asked) -> int:
    at = asked.moment()
    return max(sum(memory.model_states(at).values()) for memory in asked.memory_of_ranks)


@quantity("bytes", "all that is live at a moment, on the rank with the most", takes=("at", PIPELINE_STAGE))
def live_bytes(asked: Asked) -> int:
    at = asked.moment()
    return max(memory.marks[at].total_bytes for memory in asked.memory_of_ranks)


@quantity("bytes", "gradients that are live when backward ends, on the rank with the most", takes=(PIPELINE_STAGE,))
def grad_bytes(asked: Asked) -> int:
    return max(memory.model_states()["grad"] for memory in asked.memory_of_ranks)


@quantity("bytes", "the most live bytes at once, on the rank with the most", takes=(PIPELINE_STAGE,))
def peak_bytes(asked: Asked) -> int:
    return max(memory.peak.total_bytes for memory in asked.memory_of_ranks)


@quantity(
    "bytes",
    "the most bytes at once in the allocator's blocks, rounding and unsplit remainders included",
    takes=(PIPELINE_STAGE,),
)
def allocated_bytes(asked: Asked) -> int:
    held = [memory.allocator.allocated_bytes for memory in asked.memory_of_ranks if memory.allocator is not None]
    if not held:
        raise InputError("allocated_bytes: an exact allocator has no blocks; set allocator, such as 'caching'")
    return max(held)


@quantity("bytes", "the most that the allocator had taken from the device, in use or cached", takes=(PIPELINE_STAGE,))
def reserved_bytes(asked: Asked) -> int:
    if is_exact(asked.config.memory):
        raise InputError(
            "reserved_bytes: an exact allocator reserves only live bytes; set allocator, such as 'caching'"
        )
    return max(memory.reserved_bytes for memory in asked.memory_of_ranks)


@quantity(
    "bytes",
    "the most live bytes at once, and what the GPU holds beside the program: nvidia-smi's number, less what an "
    "allocator leaves unused",
    needs=("gpu",),
    takes=(GPU, PIPELINE_STAGE),
)
def device_bytes(asked: Asked) -> int:
    return int(peak_bytes(asked)) + outside_bytes(find_hardware(asked.gpu), asked.config)


@quantity("bytes", "model states sent in the last step, by the rank with the most")
def sent_bytes(asked: Asked) -> int:
    result = asked.result
    return max(result.sent_bytes(rank, result.last_step) for rank in range(result.config.mesh.ranks))


@quantity("volume", "elements of model states sent in the last step, x N/(N-1), over Ψ")
def sent_over_psi(asked: Asked) -> Fraction:
    result, share, last = asked.result, ring_share(asked.config), asked.result.last_step
    rows = [row for rows in result.traffic for row in rows if row.step == last and row.purpose == "states"]
    elements = sum((Fraction(row.wire_bytes, dtype(row.dtype).itemsize) for row in rows), Fraction(0))
    return elements / asked.config.mesh.ranks / share / result.num_parameters


@quantity("bytes", "what forward keeps of one block")
def block_activation_bytes(asked: Asked) -> int:
    return max(_counted_blocks(asked))


@quantity("bytes", "what forward keeps of all blocks")
def activation_bytes(asked: Asked) -> int:
    return sum(_counted_blocks(asked))


def _counted_blocks(asked: Asked) -> list[int]:
    """Return the bytes that each block's forward saved, as its ops recorded them."""
    kept = [sum(row.nbytes for row in rows) for unit, rows in asked.result.saved.items() if is_block(unit)]
    if not kept or asked.config.model.family == "flat":
        raise InputError(f"model {asked.config.model.name} has no blocks whose activations could be counted")
    return kept


@quantity(
    "share", "what forward keeps of all blocks, over what it keeps with nothing recomputed and no sequence parallelism"
)
def activation_share(asked: Asked) -> Fraction:
    """Return all blocks' activations over those of the same run without recompute and sequence parallelism."""
    whole = replace(asked, config=asked.config.replace(**WHOLE))
    return Fraction(sum(_counted_blocks(asked)), sum(_counted_blocks(whole)))


@quantity("share", "what blocks all-gather over tp for Pa, over what else they send there")
def partition_share(asked: Asked) -> Fraction:
    """Compute the share from every message of a block that tp's first rank sent, in a recorded step."""
    sent = {"all_gather": 0, "all_reduce": 0}
    for event in plan(asked.config, keep_events=True).events[0]:
        if isinstance(event, Launch) and event.axis in CUTS and is_block(event.scope.block):
            sent[event.op] += event.wire_bytes
    if not sent["all_gather"] or not sent["all_reduce"]:
        raise InputError("partition_share: no block's input was gathered; set partition_activations, tp and recompute")
    return Fraction(sent["all_gather"], sent["all_reduce"])


@quantity("count", "parameters that the rank with the most holds, copies and padding included", takes=(PIPELINE_STAGE,))
def parameters_of_a_rank(asked: Asked) -> int:
    """Read the parameters off the run's layout."""
    held = [share.num_parameters for share in shares_of(asked.result)]
    return max(held) if asked.pipeline_stage is None else held[asked.pipeline_stage]


@quantity("share", "slots in which a stage waits, over those that its actions take")
def bubble(asked: Asked) -> Fraction:
    """Count the bubble in the engine's lists of actions; nothing has to run for that."""
    c = asked.config
    if c.mesh.pp == 1:
        raise InputError("pp 1: a single pipeline stage never waits; choose pp 2 or more")
    order, batches = schedule_of(c.parallel), c.data.accumulate
    lists = [order(c.mesh.pp, stage, batches, c.chunks.each) for stage in range(c.mesh.pp)]
    return counted_bubble(slots_of(lists, c.chunks))


@quantity("count", "parameters that the model declares, a tied table once")
def parameters(asked: Asked) -> int:
    return asked.runs.once(model_of, asked.config).num_parameters


@quantity("count", "parameters that work for one token, of the experts those that it chooses")
def active_parameters(asked: Asked) -> int:
    return num_active(asked.config.model, asked.result.layout.flats.values())


@quantity("count", "parameters that are trained, a tied table once")
def trained_parameters(asked: Asked) -> int:
    return num_trained(asked.result.layout)


@quantity("bytes", "trained parameters as they are stored, on all ranks together")
def trained_bytes(asked: Asked) -> int:
    return num_trained(asked.result.layout) * trained_itemsize(asked.config)


@quantity("count", "elements of the matrices that the model's blocks declare")
def block_matrices(asked: Asked) -> int:
    flats = asked.runs.once(model_of, asked.config).flats
    shapes = [spec.whole_shape for flat in flats if is_block(flat.name) for spec in flat.spec.weights]
    return sum(math.prod(shape) for shape in shapes if len(shape) == 2)


@quantity(
    "count",
    "most parameters of a model that fits: flat by its states, x mp; others by a whole step, layer by layer",
    needs=("memory",),
    takes=("mp",),
)
def largest_model(asked: Asked) -> int:
    """Find the largest model. For flat models compare the states and multiply by mp, because mp ranks share the
    parameters. For other models compare a step's peak, with more and more layers."""
    c = asked.config
    if c.model.family == "flat":
        return asked.runs.once(largest_states, c, asked.memory) * asked.mp
    if asked.mp > 1:
        raise InputError(f"mp {asked.mp}: mp works only with flat models; for model {c.model.name} set tp")
    layers = asked.runs.once(largest_that_fits, c, "layers", asked.memory)
    return asked.runs.once(model_of, c.replace(layers=layers)).num_parameters if layers else 0


@quantity("count", "most rows of a microbatch with which a step fits", needs=("memory",))
def largest_batch(asked: Asked) -> int:
    return asked.runs.once(largest_that_fits, asked.config, "micro_batch", asked.memory)


# -- by the clock (docs/time.md): modelled, and no count ----------------------------------------
@quantity("seconds", "a step by the clock, on the GPU that is named (docs/time.md)", **_BY_CLOCK)
def step_seconds(asked: Asked) -> Fraction:
    return Fraction(asked.time.seconds)


@quantity(
    "flops per second",
    "FLOP/s of a GPU by the clock: all products of the step, those that are computed again included",
    **_BY_CLOCK,
)
def hardware_flops_per_s(asked: Asked) -> Fraction:
    return Fraction(asked.time.hardware_flops / asked.config.mesh.ranks / asked.time.seconds)


@quantity(
    "flops per second",
    "FLOP/s of a GPU by the clock: each product of forward and of gradients, none computed again",
    **_BY_CLOCK,
)
def model_flops_per_s(asked: Asked) -> Fraction:
    return Fraction(asked.time.model_flops / asked.config.mesh.ranks / asked.time.seconds)


@quantity("tokens per second", "tokens per second of a GPU, by the clock", **_BY_CLOCK)
def tokens_per_s(asked: Asked) -> Fraction:
    c = asked.config
    return Fraction(c.tokens / c.mesh.ranks / asked.time.seconds)


@quantity("share", "of a step by the clock, how much the kernels take", **_BY_CLOCK)
def compute_share(asked: Asked) -> Fraction:
    return Fraction(asked.time.compute / asked.time.seconds)


@quantity("seconds", "a step's backward by the clock, from its first kernel to its last kernel or copy", **_BY_CLOCK)
def backward_seconds(asked: Asked) -> Fraction:
    """Return the seconds of the rank that ends last."""
    return asked.runs.once(_backward, asked.config, asked.gpu, asked.bandwidth)


def _backward(config: RunConfig, gpu: str, nic: int | None) -> Fraction:
    spans = timeline_of(plan_first_step(config), cluster_named(gpu, nic)).last.spans
    own = [span for span in spans if span.scope.phase == Phase.BACKWARD]
    return Fraction(max(span.stop for span in own)) - Fraction(min(span.start for span in own))


@quantity("verdict", "whether a step needs no more than the memory", needs=("memory",))
def fits(asked: Asked) -> int:
    return int(asked.runs.fits(asked.config, asked.memory))


COUNTS = table(
    model_states_bytes, live_bytes, grad_bytes, peak_bytes, allocated_bytes, reserved_bytes, device_bytes,
    sent_bytes, sent_over_psi, block_activation_bytes, activation_bytes, activation_share, partition_share,
    parameters_of_a_rank, bubble, parameters, active_parameters, trained_parameters, trained_bytes, block_matrices,
    largest_model, largest_batch, step_seconds, hardware_flops_per_s, model_flops_per_s, tokens_per_s, compute_share,
    backward_seconds, fits,
)  # fmt: skip
TIMES = tuple(name for name, count in COUNTS.items() if "gpu" in count.needs and count.dimension != "bytes")
"""The quantities of the clock."""
