"""Stage 3 gathers units ahead and, as FSDP2, waits for reductions late: the same bits and volume, more bytes."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from test_shapes import assert_same_record

from zerosim.analysis.cheapest import changes
from zerosim.config import RunConfig
from zerosim.device.events import Event, Kernel, Launch, Wait
from zerosim.report.plan import plan_report
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(layers=3, hidden=8, heads=2, seq=4, steps=2, micro_batch=1, ranks=3, stage=3)


def small(**changes: Any) -> RunConfig:
    return RunConfig(**{**SMALL, **changes})


CASES: list[dict[str, Any]] = [
    dict(prefetch=1, accumulate=2, clip_norm=0.1, collective="ring", bucket_bytes=512),
    dict(prefetch=50, partition="owner", cast_shards=True, persistent_numel=100),
    dict(prefetch=2, recompute="full", dropout=0.1, keep_root_units=True, cast_shards=True, tie_embeddings=False),
    dict(prefetch=2, reshard_after_forward=False),
    dict(ranks=4, dp_replicate=2, replica_reduction="micro_batch", recipe="fsdp2", accumulate=2),
    dict(recipe="fsdp2", partition="owner"),
    dict(prefetch=50, ranks=8, tp=2, pp=2, layers=4, pipeline="interleaved", accumulate=2, steps=1),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefetch_changes_no_bit_and_no_volume(case: dict[str, Any]) -> None:
    """However many units: each of them is gathered once for each use, as without."""
    plain, ahead = run(small(**{**case, "prefetch": 0})), run(small(**case), keep_events=True)
    assert ahead.losses == plain.losses
    for name, values in plain.weights.items():
        np.testing.assert_array_equal(values, ahead.weights[name], err_msg=name)
    assert [sorted(rows) for rows in ahead.traffic] == [sorted(rows) for rows in plain.traffic]
    assert ahead.live_bytes_after == [0] * ahead.config.mesh.ranks
    assert all(in_flight(events) for events in ahead.events)


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4]], ids=str)
def test_shapes_leave_the_record_of_a_real_run(case: dict[str, Any]) -> None:
    assert_same_record(small(**case, steps=1))


# -- the record -------------------------------------------------------------------------------------
def in_flight(events: list[Event], op: str = "") -> list[tuple[str, str, set[str]]]:
    """Of each call that kernels came between launch and wait of: its phase, its unit, and the units that computed."""
    found, units = [], {}
    for event in events:
        if isinstance(event, Launch) and (not op or event.op == op):
            units[event.work] = event.scope, set[str]()
        elif isinstance(event, Kernel) and event.work is None and event.name != "copy":  # a cast
            for _, computed in units.values():
                computed.add(event.scope.unit)
        elif isinstance(event, Wait) and event.work in units:
            scope, computed = units.pop(event.work)
            if computed:
                found.append((scope.phase, scope.unit, computed))
    return found


def test_a_gather_is_under_way_while_the_units_before_compute() -> None:
    events = run(small(steps=1, prefetch=2), keep_events=True).events[0]
    order = ["wte", "wpe", "h.0", "h.1", "h.2", "ln_f", "lm_head"]
    there = [("forward", unit, set(order[max(0, at - 2) : at])) for at, unit in enumerate(order) if at]
    back = order[::-1]
    again = [("backward", unit, set(back[max(0, at - 2) : at])) for at, unit in enumerate(back) if at]
    there[-1] = ("forward", "lm_head", {"h.2", "ln_f"})
    assert in_flight(events, "all_gather") == there + again


def test_fsdp2_gathers_the_next_block_and_reduces_the_last_one_while_one_computes() -> None:
    """_fsdp_param_group.py: pre_backward prefetches; post_backward waits for the reduction before, then makes its own.

    The root's units stay gathered, and are reduced when all blocks have been.
    """
    events = run(small(steps=1, recipe="fsdp2"), keep_events=True).events[0]
    gathers = [(unit, computed) for phase, unit, computed in in_flight(events, "all_gather") if phase == "backward"]
    assert gathers == [("h.2", {"lm_head", "ln_f"}), ("h.1", {"h.2"}), ("h.0", {"h.1"})]
    reduced = [(unit, computed) for _, unit, computed in in_flight(events, "reduce_scatter")]
    assert reduced[:3] == [("h.2", {"h.1"}), ("h.1", {"h.0"}), ("h.0", {"wpe", "wte"})]
    calls = [event for event in events if isinstance(event, Launch) and event.op == "reduce_scatter"]
    waits = [event.work for event in events if isinstance(event, Wait)]
    assert [call.work for call in calls] == [work for work in waits if work in {call.work for call in calls}]
    for one, following in pairwise(calls):  # one at a time
        launched = events.index(following)
        assert any(isinstance(event, Wait) and event.work == one.work for event in events[:launched])


# -- bytes ------------------------------------------------------------------------------------------
def four_units(**changes: Any) -> RunResult:
    """Four units of u elements on four ranks, and next to no activations."""
    return plan(
        RunConfig(
            model="flat", params=4000, units=4, ranks=4, micro_batch=1, seq=1, vocab=4, bucket_bytes=None, **changes
        )
    )


@pytest.mark.parametrize(
    ("settings", "in_u", "ahead"),
    [
        # 14 Psi/N = 14u. In backward of units.0, the last: 2u gathered, 2u of gradient, and the slices of three others.
        (dict(prefetch=0), 14 + 2 + 2 + 1.5, 0),
        # In backward of units.1: 2u more, gathered ahead, and the slices of two. Then of units.2, and of units.3.
        (dict(prefetch=1), 14 + 2 + 2 + 2 + 1, 2),
        (dict(prefetch=2), 14 + 2 + 4 + 2 + 0.5, 4),
        (dict(prefetch=3), 14 + 2 + 6 + 2, 6),
        (dict(prefetch=4), 14 + 2 + 6 + 2, 6),
        # 12 Psi/N = 12u. In backward of units.1: 2u gathered, 2u ahead, 2u of gradient, the 4u in fp32 that the
        # reduction under way reads, and two slices in fp32.
        (dict(recipe="fsdp2"), 12 + 2 + 2 + 2 + 4 + 2, 2),
    ],
    ids=str,
)
def test_the_peak_by_hand(settings: dict[str, Any], in_u: float, ahead: int) -> None:
    result = four_units(stage=3, **settings)
    peak = result.memory[0].peak
    states = {kind: nbytes for kind, nbytes in peak.by_kind.items() if not kind.startswith(("activation", "temp"))}
    assert sum(states.values()) == in_u * 1000, states
    assert states.get("prefetched_param", 0) == ahead * 1000


def test_a_plan_says_how_much_of_its_peak_is_gathered_ahead() -> None:
    written = io.StringIO()
    Console(width=200, file=written).print(plan_report(four_units(stage=3, prefetch=1), None, all=True))
    assert "Of the peak 2,000 B are parameters gathered ahead, of units.0." in " ".join(written.getvalue().split())


def test_advice_is_to_gather_nothing_ahead() -> None:
    tried = {flags: changed for changed, flags in changes(small(recipe="fsdp2"))}
    assert tried["--prefetch 0"].gathering.prefetch == 0
    assert "--prefetch 0" not in [flags for _, flags in changes(small())]
