"""ZeRO-R's Pa and Pa+cpu: blocks' inputs in parts over tp, and on the host. Same bits; bytes and traffic by closed
forms written out here, `==` (1910.02054, sections 6.1 and 8).

s tokens, b rows, h width, L layers, t tensor-parallel ranks, A microbatches. Half types: 2 bytes an element.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from same import assert_same_bits
from test_shapes import assert_same_record

from zerosim.analysis.checks import checks
from zerosim.analysis.formulas import partition_share
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.device.device import Kind
from zerosim.device.events import Copy, Launch
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

s, b, h, L, A = 8, 2, 16, 2, 2
SIZES: dict[str, Any] = dict(layers=L, hidden=h, heads=4, seq=s, vocab=256, micro_batch=b, accumulate=A, steps=1)
PA: dict[str, Any] = dict(partition_activations=True)
CPU: dict[str, Any] = dict(cpu_checkpointing=True)


def config(**fields: Any) -> RunConfig:
    return RunConfig(**{**SIZES, "ranks": 2, "tp": 2, "stage": 0, "recompute": "full", **fields})


def moved(result: RunResult, op: str, purpose: str = "offload", rank: int = 0) -> tuple[int, int, int]:
    """Calls, payload and bytes on the wire of a rank in the last step."""
    last = len(result.steps) - 1
    rows = [row for row in result.traffic[rank] if (row.step, row.op, row.purpose) == (last, op, purpose)]
    return sum(r.calls for r in rows), sum(r.payload_bytes for r in rows), sum(r.wire_bytes for r in rows)


SAMPLE: list[dict[str, Any]] = [
    dict(ranks=2, tp=2, stage=0, dropout=0.2, **CPU),
    dict(ranks=4, tp=2, stage=3, clip_norm=0.1, model="llama", kv_heads=1, **PA),
    dict(ranks=4, tp=2, stage=0, pp=2, precision="fp32", collective="ring", bucket_bytes=1024, **PA, **CPU),
]


def assert_kept_inputs_change_no_bit(fields: dict[str, Any], how: dict[str, Any]) -> None:
    result, wanted = run(config(**fields, **how)), run(config(**fields))
    assert_same_bits(result, wanted)
    assert result.sample == wanted.sample
    assert result.live_bytes_after == [0] * result.config.mesh.ranks
    assert_same_record(config(**{**fields, "sample": None}, **how))


@pytest.mark.quick(1)
@pytest.mark.parametrize("fields", SAMPLE, ids=str)
def test_bits_are_those_of_inputs_kept_whole_and_shapes_leave_the_record(fields: dict[str, Any]) -> None:
    how = {name: fields[name] for name in (PA | CPU) if name in fields}
    assert_kept_inputs_change_no_bit({name: value for name, value in fields.items() if name not in how}, how)


@pytest.mark.parametrize("t", [2, 4])
def test_parts_are_kept_and_gathered_once(t: int) -> None:
    """2sbh/t bytes of a block; bsh (t-1)/t elements more for a block and microbatch, 1/12 of what blocks send."""
    whole, parts = (plan(config(ranks=t, tp=t, **how), keep_events=True) for how in ({}, PA))
    assert [row.nbytes for row in whole.saved["h.0"]] == [2 * s * b * h]
    assert [row.nbytes * t for row in parts.saved["h.0"]] == [2 * s * b * h]
    kept = [result.memory[0].marks["end_of_forward"].by_kind[Kind.KEPT] for result in (whole, parts)]
    assert kept == [L * 2 * s * b * h, L * 2 * s * b * h // t]
    calls, payload, sent = moved(parts, "all_gather", "activations")
    assert (calls, payload) == (A * L, A * L * 2 * s * b * h)
    assert sent * t == A * L * 2 * s * b * h * (t - 1)
    of_blocks = {
        op: sum(
            event.wire_bytes
            for event in parts.events[0]
            if isinstance(event, Launch) and event.op == op and event.scope.unit.startswith("h.")
        )
        for op in ("all_gather", "all_reduce")
    }
    assert Fraction(of_blocks["all_gather"], of_blocks["all_reduce"]) == Fraction(1, 12) == partition_share().at(t=t)
    rest = [row for row in parts.traffic[0] if row.op != "all_gather"]
    assert rest == whole.traffic[0]
    assert parts.memory[0].peak.total_bytes < whole.memory[0].peak.total_bytes


@pytest.mark.parametrize("t", [1, 2])
def test_what_waits_on_the_host_takes_no_byte_of_the_device(t: int) -> None:
    """Out and back 2sbh/t bytes of a block and microbatch; all blocks' on the host between."""
    how = CPU if t == 1 else {**PA, **CPU}
    result = plan(config(ranks=t, tp=t, **how), keep_events=True)
    memory, each = result.memory[0], 2 * s * b * h // t
    assert Kind.KEPT not in memory.marks["end_of_forward"].by_kind
    assert Kind.KEPT not in memory.peak.by_kind
    assert memory.host_peak_bytes == memory.to_dict()["host_peak_bytes"] == L * each
    for way in ("device to host", "host to device"):
        assert moved(result, way) == (A * L, A * L * each, 0)
    assert {event.purpose for event in result.events[0] if isinstance(event, Copy)} == {"offload"}
    staged = [row for row in result.traffic[0] if row.purpose == "staging"]
    assert staged == []


CHECKED: list[dict[str, Any]] = [
    dict(ranks=16, tp=4, pp=2, stage=1, layers=5, stage_layers="3,2", accumulate=6, **PA, **CPU),
    dict(ranks=4, tp=2, pp=2, stage=0, layers=4, accumulate=12, pipeline="gpipe", **PA, **CPU),
    dict(ranks=8, tp=2, pp=2, stage=1, layers=8, accumulate=4, pipeline="interleaved", model="llama", **PA, **CPU),
    dict(ranks=4, tp=2, stage=3, sequence_parallel=True, **PA, **CPU),
    dict(ranks=2, tp=1, stage=3, precision="fp32", **CPU),
    dict(ranks=4, tp=2, pp=2, stage=0, layers=5, stage_layers="3,2", accumulate=3, recompute="full:2", **PA, **CPU),
]


@pytest.mark.parametrize("fields", CHECKED, ids=str)
def test_closed_forms_agree_on_every_stage(fields: dict[str, Any]) -> None:
    result = plan(config(**{**fields, "steps": 1}))
    for stage in range(result.layout.mesh.pp):
        copies = checks(result, 0)[stage].copied
        assert [check.agrees for check in copies] == [True] * 3
        assert all(check.formula for check in copies)
        assert all(check.agrees for check in checks(result, 0)[stage].exchanged)


def test_an_extended_plan_counts_what_all_micro_batches_count() -> None:
    asked = config(ranks=4, pp=2, accumulate=9, pipeline="gpipe", **PA, **CPU)
    short, every = plan(asked), plan(asked, keep_events=True)
    assert [memory.to_dict() for memory in short.memory] == [memory.to_dict() for memory in every.memory]
    assert short.traffic == every.traffic


def test_under_sequence_parallelism_parts_change_nothing() -> None:
    rows = dict(sequence_parallel=True)
    with_parts, without = (plan(config(**rows, **how), keep_events=True) for how in (PA, {}))
    assert with_parts.events == without.events


def test_reports_show_copies_and_warn_where_nothing_is_left_to_cut(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--ranks", "2", "--tp", "2", "--stage", "0", "--recompute", "full", "--partition-activations"]
    assert main([*words, "--cpu-checkpointing", "--all"]) == 0
    shown = capsys.readouterr().out
    assert "Copies between device and host" in shown
    assert "ZeRO-R's Pa+cpu" in shown
    assert "≠" not in shown
    assert main([*words, "--sequence-parallel"]) == 0
    shown = capsys.readouterr().out
    assert "Warning: partition_activations changes nothing here" in shown
    assert "Copies" not in shown
    assert main([*words, "--sequence-parallel", "--all"]) == 0
    assert "Copies" not in capsys.readouterr().out
