"""A plan for many micro-batches out of two short ones.

In a pipeline of p stages, from p + 1 micro-batches on (interleaved: 3p), one more adds its loss to 1F1B's memory, all
that it keeps to GPipe's, and the same traffic to both: every figure grows by a constant. So p + 1 and p + 2 of them are
run (interleaved: 3p and 4p) and the rest is extended. Without a pipeline the third is like every later one: the first
fills gradient buffers, and in the second what the first left under way is still there; 3 and 4 are run. Source: derived
from the schedules (`parallel/pipeline.py`); tests hold it against plans that run all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from zerosim.config import RunConfig
from zerosim.ledger.clock import StepTime
from zerosim.ledger.memory import Snapshot
from zerosim.ledger.traffic import TrafficRow
from zerosim.train.result import RankMemory, RunResult

Key = TypeVar("Key")


def shorter_runs(config: RunConfig) -> tuple[int, int] | None:
    """How many micro-batches are run in place of `accumulate`; None where all of them are."""
    pp, wanted = config.mesh.pp, config.data.accumulate
    interleaved = config.parallel.pipeline_schedule == "interleaved"
    few, more = (3 * pp, 4 * pp) if interleaved else (max(pp, 2) + 1, max(pp, 2) + 2)
    grows = config.parallel.pipeline_schedule == "gpipe" and config.memory.capacity is not None
    counts_live = config.memory.allocator == "exact"  # what another one reserves need not grow by a constant
    return (few, more) if wanted > more and counts_live and not grows else None


def extended(config: RunConfig, few: RunResult, more: RunResult) -> RunResult:
    """The result for `config`'s micro-batches, from two runs that differ in nothing but how many they have."""
    had, has = few.config.data.accumulate, more.config.data.accumulate
    steps, rest = has - had, config.data.accumulate - has

    def grown(first: int, second: int) -> int:
        growth, left = divmod((second - first) * rest, steps)
        assert left == 0, "micro-batches add unequal amounts"
        return second + growth

    def counts(first: Mapping[Key, int], second: Mapping[Key, int]) -> dict[Key, int]:
        return {key: grown(first.get(key, 0), nbytes) for key, nbytes in second.items()}

    def snapshot(first: Snapshot, second: Snapshot) -> Snapshot:
        return Snapshot(
            second.scope,
            counts(first.by_kind, second.by_kind),
            counts(first.by_unit, second.by_unit),
            counts(first.padding, second.padding),
        )

    def memory(first: RankMemory, second: RankMemory) -> RankMemory:
        marks = {name: snapshot(first.marks[name], mark) for name, mark in second.marks.items()}
        host = grown(first.host_peak_bytes, second.host_peak_bytes)
        return RankMemory(
            marks, snapshot(first.peak, second.peak), second.pool, host_peak_bytes=host, states=second.states
        )

    def traffic(first: list[TrafficRow], second: list[TrafficRow]) -> list[TrafficRow]:
        return [
            new._replace(
                calls=grown(old.calls, new.calls),
                payload_bytes=grown(old.payload_bytes, new.payload_bytes),
                sent_bytes=_either(grown, old.sent_bytes, new.sent_bytes),
                received_bytes=_either(grown, old.received_bytes, new.received_bytes),
                modelled_bytes=_either(grown, old.modelled_bytes, new.modelled_bytes),
            )
            for old, new in zip(first, second, strict=True)
        ]

    memories = {rank: memory(few.memory[rank], more.memory[rank]) for rank in more.ran}
    rows = {rank: traffic(few.traffic[rank], more.traffic[rank]) for rank in more.ran}
    return replace(
        more,
        config=config,
        memory=[memories[rank] for rank in more.stands_for],
        traffic=[rows[rank] for rank in more.stands_for],
        extended_from=(had, has),
        time=extrapolated(few.time, more.time, rest / steps) if few.time and more.time else None,
    )


def extrapolated(few: StepTime, more: StepTime, times: float) -> StepTime:
    """`more`, and so many times what it has more than `few`; a negative number goes back. In a long pipeline each
    micro-batch takes as long as the one before it."""

    def grown(first: float, second: float) -> float:
        return second + (second - first) * times

    axes = more.exposed.keys() | few.exposed.keys()
    return StepTime(
        more.rank,
        grown(few.seconds, more.seconds),
        grown(few.compute, more.compute),
        {axis: grown(few.exposed.get(axis, 0.0), more.exposed.get(axis, 0.0)) for axis in sorted(axes)},
        grown(few.bubble, more.bubble),
        grown(few.copies, more.copies),
        round(grown(few.kernels, more.kernels)),
        round(grown(few.hardware_flops, more.hardware_flops)),
        round(grown(few.model_flops, more.model_flops)),
    )


def _either(grown: Callable[[int, int], int], first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else grown(first, second)
