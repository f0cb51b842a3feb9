"""Small programs that test a claim: tensor and pipeline parallelism in a few lines, and readings of a record.

Owns what notebook 10 runs beside ZeRO itself. Both schedules are the textbook's (Megatron-LM, arXiv
1909.08053, section 3; GPipe, arXiv 1811.06965), as small as they can be while they are still run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from zerosim.comm.runtime import Context, World, launch
from zerosim.device.device import Kind
from zerosim.device.events import Event, Message
from zerosim.dtypes import fp64
from zerosim.ledger.traffic import CommLedger
from zerosim.tensor.rng import generator
from zerosim.train.result import RunResult


@dataclass(frozen=True, slots=True)
class SplitMLP:
    """What a tensor-parallel MLP did: how far from the whole one it is, and what each rank called, sent and held."""

    largest_difference: float
    operations: tuple[str, ...]
    sent_bytes: int
    weight_elements: int


def split_mlp(ranks: int, rows: int, width: int) -> SplitMLP:
    """relu(x A) B in fp64, A (width, 4 width) cut by columns, B by rows; `rows` tokens, the same on each rank.

    A layer is cut inside: no rank can compute its output alone. The partial sums are put together by one all-reduce.
    """
    x, a, b = (
        generator("split", name).standard_normal(shape)
        for name, shape in (("x", (rows, width)), ("a", (width, 4 * width)), ("b", (4 * width, width)))
    )
    ledgers = [CommLedger() for _ in range(ranks)]

    def program(ctx: Context) -> Any:
        own = slice(ctx.rank * 4 * width // ranks, (ctx.rank + 1) * 4 * width // ranks)
        columns, lines = a[:, own], b[own]
        out = ctx.device.alloc((rows, width), fp64, Kind.TEMP)
        out.array[...] = np.maximum(x @ columns, 0) @ lines  # partial: a sum over this rank's columns only
        ctx.comm.all_reduce(out, op="sum")
        ctx.device.recorder.drain()
        return out.array.copy(), columns.size + lines.size

    outcomes = launch(program, World(ranks=ranks), lambda rank: (ledgers[rank],))
    whole = np.maximum(x @ a, 0) @ b
    traffic = ledgers[0].rows()
    return SplitMLP(
        max(float(np.abs(out - whole).max()) for out, _ in outcomes),
        tuple(row.op for row in traffic for _ in range(row.calls)),
        sum(row.wire_bytes for row in traffic),
        outcomes[0][1],
    )


def pipeline_idle(stages: int, micro_batches: int) -> Fraction:
    """The share of time that a stage idles in GPipe's schedule, found by running it tick by tick.

    Forward and backward of a micro-batch take one tick on each stage; all forwards go before all backwards.
    """
    forward = [0] * stages  # micro-batches done by each stage
    backward = [0] * stages
    ticks = 0
    while min(backward) < micro_batches:
        ahead, behind = list(forward), list(backward)  # what was done before this tick
        for stage in range(stages):
            if ahead[stage] < (micro_batches if stage == 0 else ahead[stage - 1]):
                forward[stage] += 1
            elif ahead[stage] == micro_batches and behind[stage] < (
                micro_batches if stage == stages - 1 else behind[stage + 1]
            ):
                backward[stage] += 1
        ticks += 1
    return 1 - Fraction(2 * micro_batches, ticks)


def peers(events: Sequence[Event]) -> set[int]:
    """Whom one rank sent a message to; -1 stands for all others at once."""
    return {event.peer for event in events if isinstance(event, Message)}


def sent_by_phase(result: RunResult, step: int = 0) -> dict[str, int]:
    """What rank 0 sent of gradients and parameters in one step, by phase and operation, in bytes."""
    rows = [row for row in result.traffic[0] if row.step == step and row.purpose == "states"]
    return {f"{row.phase}: {row.op}": row.wire_bytes for row in rows}


def volume(result: RunResult) -> Fraction:
    """Elements that rank 0 sent in the first step, times N/(N-1), over the parameters; 2-byte elements."""
    ranks = result.config.mesh.ranks
    return Fraction(result.sent_bytes(0, 0) * ranks, 2 * (ranks - 1) * result.num_parameters)


def rounded_to_bf16(values: Any) -> Any:
    """fp32 values to the nearest bf16, ties to even, still as fp32: the upper 16 bits."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
