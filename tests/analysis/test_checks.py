"""Every count that has a closed form is compared with it: twice the bytes, and formulas and counts do not agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.analysis.compare import MARK, last_whole_step
from zerosim.config import RunConfig
from zerosim.device.copies import OFFLOAD
from zerosim.ledger.memory import Snapshot
from zerosim.train.memory import RankMemory
from zerosim.train.plan import plan
from zerosim.train.result import RunResult

SMALL: dict[str, Any] = dict(
    model="gpt", layers=2, hidden=16, heads=2, seq=8, vocab=64, micro_batch=1, steps=1, ranks=4
)
WAYS: dict[str, dict[str, Any]] = {
    "zero++": dict(
        stage=3, ranks=8, hidden=64, heads=8, secondary_shard=4, quantized_weights=True, quantized_gradients=True
    ),
    "compression": dict(stage=1, compress="top-k", precision="fp32"),
    "offload": dict(stage=3, offload="optimizer=host,params=host", precision="bf16"),
    "a delayed update": dict(stage=2, offload="optimizer=host", delayed_update=1, steps=2, precision="bf16"),
    "lora": dict(stage=3, lora_rank=2),
    "a mesh": dict(stage=1, ranks=16, tp=2, pp=2, dp_replicate=2, accumulate=4),
    "recompute": dict(stage=2, ranks=4, tp=2, recompute="full", partition_activations=True, cpu_checkpointing=True),
    "owners": dict(stage=2, partition="owner"),
    "sums": dict(stage=1, optimizer="adafactor"),
    "buckets": dict(stage=0, recipe="ddp"),
}


def doubled(result: RunResult) -> Iterator[tuple[str, RunResult]]:
    """Yield the result with twice the bytes of one kind of message, copy or state, on rank 0 and those like it."""
    step, rows = last_whole_step(result), result.traffic[0]
    for key in dict.fromkeys(
        (row.op, row.axis, row.purpose)
        for row in rows
        if row.step == step and row.purpose in ("states", "activations", OFFLOAD) and row.wire_bytes + row.payload_bytes
    ):
        if key[0] != "recv":
            more = [
                row._replace(sent_bytes=2 * row.sent_bytes, payload_bytes=2 * row.payload_bytes)
                if (row.op, row.axis, row.purpose) == key
                else row
                for row in rows
            ]
            yield " ".join(key), replace(result, traffic=[more, *result.traffic[1:]])
    memory = result.memory[0]
    for name, shots in (("", memory.marks), *((name, other.marks) for name, other in memory.others.items())):
        for mark, kinds in ((MARK, ("param", "grad", "optim")), ("after_init", ("comm",))):
            for kind in kinds:
                if mark in shots and shots[mark].by_kind.get(kind):
                    shot = replace(shots[mark], by_kind={**shots[mark].by_kind, kind: 2 * shots[mark].by_kind[kind]})
                    other = _with(memory, name, {**shots, mark: shot})
                    yield f"{kind} {name}", replace(result, memory=[other, *result.memory[1:]])


def _with(memory: RankMemory, name: str, marks: dict[str, Snapshot]) -> RankMemory:
    if not name:
        return replace(memory, marks=marks)
    return replace(memory, others={**memory.others, name: memory.others[name]._replace(marks=marks)})


@pytest.mark.parametrize("way", WAYS)
def test_twice_the_bytes_of_anything_are_refused(way: str) -> None:
    result = plan(RunConfig(**{**SMALL, **WAYS[way]}))
    assert formulas_agree(checks(result))
    found = dict(doubled(result))
    assert len(found) >= 4
    assert [what for what, other in found.items() if formulas_agree(checks(other))] == []
