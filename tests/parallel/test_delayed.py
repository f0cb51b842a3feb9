"""The delayed parameter update: the bits of a reference that is late by one, at every stage; bytes, copies, shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from test_offload import INFINITY, assert_alike, assert_forms

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.presets.nodes import find_node
from zerosim.device.events import Copy, Kernel
from zerosim.errors import InputError
from zerosim.placement.memories import DEVICE, HOST
from zerosim.report.compare import Comparison
from zerosim.train import data
from zerosim.train.plan import plan, plan_first_step, timeline_of
from zerosim.train.result import RunResult
from zerosim.train.run import run

STEPS = 5
TINY: dict[str, Any] = dict(
    ranks=2, layers=2, hidden=10, heads=2, seq=5, steps=STEPS, micro_batch=1, lr=1e-2, offload="optimizer=host"
)
SMALL: dict[str, Any] = dict(ranks=2, steps=3, accumulate=2, micro_batch=1, layers=2, hidden=16, heads=2, seq=8)
OVERFLOWS: dict[str, Any] = dict(precision="fp16", initial_scale_power=17, hysteresis=1, loss_scale_window=1)
"""Steps 1 and 3 of five overflow; from a power of 16 on, steps 3 and 4."""


def batches(config: RunConfig) -> list[Any]:
    text = data.primer()
    tokens, rows = np.frombuffer(text, np.uint8), config.global_batch
    return [data.sample_batch(tokens, config.data.seed, step, rows, config.model.seq) for step in range(STEPS)]


def late_by_one(config: RunConfig, result: RunResult) -> tuple[dict[str, Any], list[list[float]]]:
    """Plain NumPy: see `reference.train`. Loss scales are the run's."""
    scales = [step.loss_scale for step in result.steps]
    with np.errstate(all="ignore"):
        return reference.train(config, batches(config), scales, late=config.grads.late)


@pytest.mark.bits
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("first", "fields"),
    [
        (1, dict(precision="fp32")),
        (2, dict(precision="bf16")),
        (STEPS, dict(precision="bf16")),
        (2, dict(precision="fp32", clip_norm=0.05)),
        (1, dict(precision="fp16", loss_scale=256.0, ranks=3)),
        (1, OVERFLOWS),
        (3, OVERFLOWS | dict(initial_scale_power=16, clip_norm=0.5)),
    ],
    ids=str,
)
def test_every_stage_has_the_bits_of_a_reference_that_is_late_by_one(first: int, fields: dict[str, Any]) -> None:
    results = [run(RunConfig(**TINY | fields, stage=stage, delayed_update=first)) for stage in (1, 2, 3)]
    weights, losses = late_by_one(results[0].config, results[0])
    for result in results:
        assert result.losses == losses
        assert all(np.array_equal(result.weights[name], weights[name]) for name in weights)
        assert result.weights.keys() == weights.keys()
        assert result.live_bytes_after == [0] * result.config.mesh.ranks
    skipped = [at for at, step in enumerate(results[0].steps, start=1) if step.skipped]
    assert skipped == {17: [1, 3], 16: [3, 4]}.get(fields.get("initial_scale_power", 0), [])


def test_the_first_late_loss_is_that_of_the_step_after_the_first() -> None:
    """Steps 1 to N, and N + 1 on the weights of N: a delay from N on changes the losses of N + 2 and later, and N's
    update comes too late for N + 1."""
    plain = run(RunConfig(**TINY, stage=2)).losses
    for first in (1, 2, 3):
        late = run(RunConfig(**TINY, stage=2, delayed_update=first)).losses
        assert late[:first] == plain[:first]
        assert late[first] != plain[first]
    assert run(RunConfig(**TINY, stage=2, delayed_update=STEPS + 1)).losses == plain


CASES: list[tuple[str, dict[str, Any]]] = [
    *(("optimizer=host", dict(stage=stage, precision=one)) for stage in (1, 2, 3) for one in ("bf16", "fp32")),
    ("optimizer=host,params=host", dict(stage=3, prefetch=1)),
    (INFINITY, dict(stage=3, prefetch=1, ranks=3)),
    (INFINITY, dict(stage=3, gather="module")),
    ("optimizer=host,params=nvme", dict(stage=3)),
    ("optimizer=nvme", dict(stage=2, ranks=3)),
    ("optimizer=host", dict(stage=2, recipe="deepspeed")),
    (INFINITY, dict(stage=3, recipe="deepspeed")),
    ("optimizer=host", dict(stage=1, recipe="megatron")),
    ("optimizer=host", dict(stage=2, overlap="all")),
    ("optimizer=host,params=host", dict(stage=3, partition="owner")),
    ("optimizer=host", dict(stage=2, partition="owner", ranks=3)),
    ("optimizer=host", dict(stage=3, ranks=4, dp_replicate=2)),
    ("optimizer=host", dict(stage=3, ranks=4, tp=2)),
    ("optimizer=host", dict(stage=1, ranks=4, pp=2)),
    ("optimizer=host,params=host", dict(stage=3, ranks=4, secondary_shard=2)),
    (INFINITY, dict(stage=3, lora_rank=4)),
    ("optimizer=host", dict(stage=2, grad_sync=False)),
    ("optimizer=host", dict(stage=3, persistent_numel=2000)),
    ("optimizer=host", dict(stage=2, cpu_checkpointing=True, recompute="full")),
    ("optimizer=host", dict(stage=2, optimizer="lion", lazy_states=True)),
]


@pytest.mark.bits
@pytest.mark.quick(1)
@pytest.mark.parametrize(("offload", "fields"), CASES, ids=str)
def test_shapes_leave_the_record_and_forms_agree(offload: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Wherever states lie, the bits are those of optimizer=host; bytes and copies of the steady step are the forms'."""
    config = RunConfig(**SMALL | fields, offload=offload, delayed_update=1, nvme=str(tmp_path))
    result, planned = run(config, keep_events=True), plan(config, keep_events=True, every_rank=True)
    assert result.events == planned.events
    assert result.live_bytes_after == [0] * config.mesh.ranks
    assert not list(tmp_path.iterdir())
    assert_forms(result)
    assert_alike(run(config.replace(offload="optimizer=host")), result)


@pytest.mark.slow
def test_forms_agree_whatever_the_last_step_was() -> None:
    """Before the delay, at the step whose gradients wait, beside one that was skipped."""
    for steps in (1, 2, 3, 4):
        fields = SMALL | dict(steps=steps, stage=2, offload="optimizer=host")
        result = run(RunConfig(**fields, delayed_update=2))
        assert [step.skipped for step in result.steps] == [False] * steps
        assert formulas_agree(checks(result))
    for steps in range(2, 7):
        result = run(RunConfig(**TINY | OVERFLOWS | dict(steps=steps, stage=3), delayed_update=1))
        assert formulas_agree(checks(result))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_18_psi_over_n_on_the_host(stage: int) -> None:
    """14M/N (ZeRO-Offload, section 4), another step's gradients, and new parameters beside the old ones."""
    fields = SMALL | dict(stage=stage, ranks=4, accumulate=1, steps=None, offload="optimizer=host")
    result = plan(plan_config(**fields, delayed_update=100))
    psi = sum(flat.numel for flat in result.layout.flats.values())
    host = result.memory[0].others[HOST]
    assert host.marks["end_of_backward"].by_kind == {
        "optim": 12 * psi // 4,
        "grad": 4 * psi // 4,
        "param": 2 * psi // 4,
    }
    assert host.marks["after_step"].by_kind == {"optim": 12 * psi // 4, "grad": 2 * psi // 4}
    without = plan(plan_config(**fields))
    assert result.memory[0].peak.total_bytes == without.memory[0].peak.total_bytes


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_cpu_steps_before_forward_and_parameters_come_as_backward_goes(accumulate: int) -> None:
    fields = SMALL | dict(stage=2, accumulate=accumulate, steps=None, offload="optimizer=host")
    result = plan(plan_config(**fields, delayed_update=1), keep_events=True)
    step = [event for event in result.events[0] if event.scope.step == 1]
    steps = [at for at, event in enumerate(step) if isinstance(event, Kernel) and event.name == "adam"]
    forward = [at for at, event in enumerate(step) if isinstance(event, Kernel) and event.scope.phase == "forward"]
    assert max(steps) < min(forward)
    copies = [event for event in step if isinstance(event, Copy) and event.purpose == "offload"]
    assert {event.scope[1::2] for event in copies if event.target == DEVICE} == {("backward", accumulate - 1)}


@pytest.mark.parametrize("fields", [{}, dict(offload="params=host", stage=3)], ids=str)
def test_nothing_is_late_where_the_device_steps(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="choose offload optimizer=host") as error:
        RunConfig(**dict(stage=2) | fields, delayed_update=1)
    assert "\n" not in str(error.value)


def test_a_plan_is_of_a_step_beside_which_an_update_goes_on() -> None:
    """The second of two, or the first one of the asked steps that is like all later ones."""
    on = cluster_of(find_hardware("v100-32"), node=find_node("dgx-2"))
    asked = plan_config(**SMALL | dict(stage=2, steps=None, offload="optimizer=host", delayed_update=9))
    steady = plan(asked, cluster=on).time
    assert plan(asked.replace(steps=5, delayed_update=3), cluster=on).time == steady
    before = plan(asked.replace(steps=3, delayed_update=3), cluster=on).time
    assert before == plan(asked.replace(delayed_update=0), cluster=on).time != steady
    with pytest.raises(InputError, match="choose 2 steps, or leave it out"):
        plan(asked.replace(steps=1, delayed_update=1), cluster=on)
    result = plan_first_step(asked)
    assert steady is not None
    assert timeline_of(result, on).seconds == pytest.approx(steady.seconds, rel=1e-9)


def test_stage_0_is_never_late_and_no_contradiction() -> None:
    fields = SMALL | dict(offload="optimizer=host", delayed_update=1, accumulate=1)
    config = RunConfig(**fields, stage=1)
    compared = Comparison("stage", {stage: run(config.at_stage(stage)) for stage in (0, 1, 2, 3)})
    assert compared.identical == [["0"], ["1", "2", "3"]]
    assert compared.contradictions == []
