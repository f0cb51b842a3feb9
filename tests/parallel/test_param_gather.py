"""New parameters gathered in the next step's forward: the same bits and bytes, and less waiting."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from test_prefetch import in_flight
from test_shapes import assert_same_record, small

from zerosim.analysis.checks import checks
from zerosim.cli.main import main
from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import Cluster, cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.device.events import Event, Launch, Wait
from zerosim.train.plan import plan, timeline_of
from zerosim.train.result import RunResult
from zerosim.train.run import run

CASES: dict[str, dict[str, Any]] = {
    "stage 1": dict(stage=1, accumulate=2, dropout=0.1),
    "stage 2": dict(stage=2, ranks=3, bucket_bytes=3000),
    "owners": dict(stage=1, partition="owner"),
    "rings": dict(stage=2, collective="ring"),
    "replicas": dict(stage=2, dp_replicate=2),
    "megatron": dict(stage=1, recipe="megatron", precision="bf16", accumulate=2, clip_norm=0.1),
    "deepspeed": dict(stage=2, recipe="deepspeed", precision="bf16"),
    "a unit's tensors": dict(stage=1, optimizer="muon"),
    "cut weights": dict(stage=1, tp=2),
    "1f1b": dict(stage=1, pp=2, accumulate=2, layers=4),
    "interleaved": dict(stage=1, ranks=8, pp=2, tp=2, accumulate=2, layers=4, pipeline="interleaved"),
    "zero bubble": dict(stage=2, pp=2, accumulate=4, layers=4, pipeline="zb-v"),
}


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize("case", CASES)
def test_no_bit_and_no_byte_changes_and_shapes_leave_the_same_record(case: str) -> None:
    """Not in any step: weights, losses, norms, bytes of each verb, peaks."""
    settings = dict(ranks=4) | CASES[case]
    after, ours = (run(small(**settings, overlap_param_gather=asked), keep_events=True) for asked in (False, True))
    assert ours.losses == after.losses
    assert [step.grad_norm for step in ours.steps] == [step.grad_norm for step in after.steps]
    assert all((ours.weights[key] == after.weights[key]).all() for key in ours.weights)
    assert sent(ours) == sent(after)
    assert [one.peak.total_bytes for one in ours.memory] == [one.peak.total_bytes for one in after.memory]
    assert set(ours.live_bytes_after) == {0}
    assert phases(ours) == {"forward"} != phases(after) == {"optimizer"}
    assert_same_record(ours.config, ours)


def sent(result: RunResult) -> Counter[tuple[object, ...]]:
    """Bytes by rank, step, verb and axis."""
    found: Counter[tuple[object, ...]] = Counter()
    for rank, rows in enumerate(result.traffic):
        for row in rows:
            found[rank, row.step, row.op, row.axis, row.purpose] += row.wire_bytes
    return found


def gathers(events: list[Event]) -> list[Launch]:
    """Those of new parameters: in these stages no other call has this verb and axis."""
    verbs = ("all_gather", "broadcast")
    return [one for one in events if isinstance(one, Launch) and one.op in verbs and one.axis == "dp_shard"]


def phases(result: RunResult) -> set[str]:
    return {one.scope.phase for events in result.events for one in gathers(events)}


def test_a_unit_waits_for_its_own_parameters_while_those_behind_it_are_in_flight() -> None:
    config = small(steps=1, stage=1, layers=3, tie_embeddings=False, bucket_bytes=None, overlap="gather")
    events = run(config, keep_events=True).events[0]
    units = ["wte", "wpe", "h.0", "h.1", "h.2", "ln_f", "lm_head"]
    found = in_flight(events, "all_gather")
    assert found == [("forward", unit, set(units[:at])) for at, unit in enumerate(units) if at]
    last = max(at for at, event in enumerate(events) if isinstance(event, Launch) and event in gathers(events))
    assert not any(isinstance(event, Wait) for event in events[:last])


@pytest.mark.parametrize("pipeline", ["1f1b", "interleaved"])
def test_a_pipeline_launches_them_before_its_first_input(pipeline: str) -> None:
    config = small(steps=1, stage=1, ranks=4, pp=2, layers=4, accumulate=2, pipeline=pipeline, overlap="all")
    for events in run(config, keep_events=True).events:
        launched = [event.op for event in events if isinstance(event, Launch)]
        first = next(at for at, op in enumerate(launched) if op in ("send", "recv"))
        assert launched[:first].count("all_gather") == launched.count("all_gather") > 0


def test_text_after_the_last_step_is_that_of_the_new_parameters() -> None:
    settings: dict[str, Any] = dict(stage=1, ranks=2, sample="To be", sample_tokens=3, lr=0.1)
    after, ours = (run(small(**settings, overlap_param_gather=asked), keep_events=True) for asked in (False, True))
    assert ours.sample == after.sample != run(small(**{**settings, "steps": 1})).sample
    evaluated = [one.scope.unit for one in gathers(ours.events[0]) if one.scope.phase == "evaluate"]
    assert len(evaluated) == len(set(evaluated)) > 3  # once, for the first token


def test_a_step_after_a_skipped_one_gathers_too() -> None:
    """As Megatron does. Without overlap a skipped step publishes nothing."""
    settings: dict[str, Any] = dict(stage=2, ranks=2, precision="fp16", initial_scale_power=40, steps=3)
    ours = run(small(**settings, overlap_param_gather=True), keep_events=True)
    assert ours.steps[0].skipped
    by_step = Counter(one.scope.step for one in gathers(ours.events[0]))
    assert len(by_step) == 3
    assert len(set(by_step.values())) == 1
    assert_same_record(ours.config, ours)


def test_an_estimate_of_curvature_gathers_once_more_and_the_closed_form_knows() -> None:
    result = plan(plan_config(model="gpt2", ranks=4, stage=1, optimizer="sophia", overlap_param_gather=True))
    found = {check.name: check for check in checks(result, 0)[0].sent}
    assert found["all_gather"].text == "2Ψ"
    assert all(check.agrees for check in found.values())


# -- seconds -----------------------------------------------------------------------------------------
A100 = cluster_of(find_hardware("a100-80"), node_gpus=1)
FREE = replace(A100, link=1e30, nic=1e30, latency=0.0, contention=0.0, host=0.0, collectives=None)
GPT = dict(model="gpt", layers=8, hidden=1024, heads=16, seq=1024, vocab=1024, micro_batch=8, steps=2)
MESHES: dict[str, dict[str, Any]] = {
    "data": dict(ranks=4),
    "pipeline": dict(ranks=8, pp=2, accumulate=8),
    "interleaved": dict(ranks=4, pp=2, accumulate=8, pipeline="interleaved"),
    "tp": dict(ranks=8, tp=2, accumulate=2),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("mesh", MESHES)
def test_slow_links_are_hidden_and_free_ones_cost_the_same(mesh: str, stage: int) -> None:
    config = plan_config(**GPT, **MESHES[mesh], stage=stage, recipe="megatron")
    after, ours = (seconds(config.replace(overlap_param_gather=asked), A100) for asked in (False, True))
    assert ours[0] == pytest.approx(ours[1], rel=1e-9)  # one step is as long as the next
    assert ours[0] < after[0]
    after, ours = (seconds(config.replace(overlap_param_gather=asked), FREE) for asked in (False, True))
    assert ours == pytest.approx(after, rel=1e-9)


def test_compute_waits_for_the_first_units_alone() -> None:
    """A table, its positions, and what their kernels are too short to hide. Reductions are waited for as before."""
    config = plan_config(**GPT, ranks=4, stage=1)
    waits = [waited(config.replace(overlap=wish)) for wish in ("none", "gather", "all")]
    assert waits[1] < 0.6 * waits[0]
    assert waits[2] < 0.1 * waits[0]


def waited(config: RunConfig) -> float:
    """Seconds that the first step's compute waits for the ranks that share its states."""
    return timeline_of(plan(config, keep_events=True), A100).last.exposed["dp_shard"]


def seconds(config: RunConfig, cluster: Cluster) -> list[float]:
    """Of each step."""
    result = plan(config, keep_events=True)
    return [timeline_of(result, cluster, step).seconds for step in range(2)]


def test_what_excludes_it(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--stage", "3"], "stage 3 does not use it; leave it out, or choose stage 1 or 2"),
        (["--stage", "1", "--allgather-bucket", "100"], "a bucket gathers new parameters in the optimizer step"),
    ):
        assert main(["run", *words, "--overlap-param-gather"]) == 2
        assert said in capsys.readouterr().err
