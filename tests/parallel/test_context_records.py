"""Ranks that share rows: a plan leaves the record of a run, in bytes, time and traffic, and closed forms agree."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from crosses import CLUSTER, check
from same import assert_same_bits, no_garbage_collector
from test_context import LLAMA, PIPE, STATES_ON_HOST, USP, WAYS, WAYS_ROUND

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.config import RunConfig
from zerosim.parallel.ring_attention import GatheredKeys, Ring
from zerosim.parallel.ulysses import Ulysses
from zerosim.train.plan import plan
from zerosim.train.run import run

RECORDS = {**WAYS, "states on the host": ({}, STATES_ON_HOST)}


@pytest.mark.quick(3)
@pytest.mark.parametrize("way", RECORDS)
def test_shapes_leave_the_record_of_a_run(way: str) -> None:
    """Event by event; volumes are those of the closed forms, and nothing is live at the end."""
    of, on = RECORDS[way]
    config = RunConfig(**{**LLAMA, **of, **on})
    with no_garbage_collector():
        check(config, plan(config, cluster=CLUSTER))


CLOCKS: list[dict[str, Any]] = [
    dict(ranks=3, cp=3),
    dict(ranks=6, cp=3, tp=2),
    PIPE,
    dict(ranks=4, cp=4, **USP),
    dict(model="gpt", ranks=6, cp=2, heads=6, kv_heads=6, hidden=24, vocab=258, tp=3, sequence_parallel=True),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize("on", CLOCKS, ids=str)
def test_few_ranks_have_the_time_of_all(on: dict[str, Any]) -> None:
    """Of alike ranks one has a clock: its messages go to a neighbour which another one may stand for."""
    config = RunConfig(**{**LLAMA, "seq": 24, **on})
    few, every = (plan(config, cluster=CLUSTER, every_rank=each).time for each in (False, True))
    assert few is not None
    assert every is not None
    assert few.seconds == every.seconds


B, S, H, K, D, L = (LLAMA[name] for name in ("micro_batch", "seq", "heads", "kv_heads", "hidden", "layers"))


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bytes_sent_for_attention(cp: int, recompute: str) -> None:
    """Written out, of half types and fp32. Keys and values: c - 1 steps in each forward and backward; their gradients:
    c steps, or c - 1 of one reduce-scatter. Ulysses: (c-1)/c of q, k, v and the result, each way."""
    kv, qo = B * S // cp * 2 * K * D // H, B * S // cp * 2 * D
    times = (3 if recompute == "full" else 2) * L
    wide = max(K, cp) * kv // K  # of copied heads
    expected = {
        "ring": {"send": times * (cp - 1) * 2 * kv + L * cp * 4 * kv},
        "allgather": {"all_gather": times * (cp - 1) * 2 * kv, "reduce_scatter": L * (cp - 1) * 4 * kv},
        "ulysses": {"all_to_all": times * (cp - 1) * 2 * (wide + qo) // cp},
    }
    for context, by_operation in expected.items():
        on = dict(ranks=cp, cp=cp, stage=2, context=context, recompute=recompute, steps=1)
        result = plan(RunConfig(**{**LLAMA, **on}))
        sent = Counter[str]()
        for row in result.traffic[0]:
            sent[row.op] += row.wire_bytes if row.purpose == "activations" else 0
        assert +sent == by_operation
        assert formulas_agree(checks(result))


def send_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    sends, gathers, exchange = Ring._pass, GatheredKeys.arriving, Ulysses.exchange

    def twice(self: Ring, buffer: Any) -> Any:
        sent, coming = sends(self, buffer)
        sent.wait()
        coming.wait()
        return sends(self, buffer)

    def gather_twice(self: GatheredKeys, kv: Any) -> Any:
        list(gathers(self, kv))
        return gathers(self, kv)

    def exchange_twice(self: Ulysses, *args: Any, **how: Any) -> Any:
        exchange(self, *args, **how)
        return exchange(self, *args, **how)

    monkeypatch.setattr(Ring, "_pass", twice)
    monkeypatch.setattr(GatheredKeys, "arriving", gather_twice)
    monkeypatch.setattr(Ulysses, "exchange", exchange_twice)


@pytest.mark.quick(2)
@pytest.mark.parametrize("on", WAYS_ROUND, ids=str)
def test_a_volume_sent_twice_is_a_difference(on: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(**{**LLAMA, **on})
    assert formulas_agree(checks(plan(config)))
    send_twice(monkeypatch)
    assert_same_bits(run(config), run(config))
    assert not formulas_agree(checks(plan(config)))
