"""Without grad_sync stages 2 and 3 add up whole gradients and reduce once a step, with the bits of stage 0."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from zerosim.analysis.checks import checks
from zerosim.cli.main import main
from zerosim.config import RunConfig, plan_config
from zerosim.errors import InputError
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(
    model="gpt", layers=2, hidden=16, heads=2, seq=8, vocab=256, ranks=4, accumulate=3, steps=2, grad_sync=False
)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"partition": "owner"},
        {"dp_replicate": 2, "replica_reduction": "micro_batch"},
        {"recipe": "fsdp2"},
        {"recipe": "deepspeed"},
        {"pp": 2, "pipeline": "zb-h1"},
        {"tp": 2},
    ],
)
def test_counts_are_the_forms(stage: int, more: dict[str, Any]) -> None:
    result = run(RunConfig(**{**SMALL, "stage": stage, **more}))
    for pipeline_stage in range(result.config.mesh.pp):
        assert all(check.agrees for check in checks(result)[pipeline_stage].states)
        assert all(check.agrees for check in checks(result, 1)[pipeline_stage].sent)
    assert result.live_bytes_after == [0] * 4


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_bits_are_those_of_stage_0(stage: int) -> None:
    """Sums over microbatches come before those over ranks, as in stages 0 and 1."""
    held, ddp = run(RunConfig(**SMALL, stage=stage)), run(RunConfig(**{**SMALL, "grad_sync": True}, stage=0))
    assert held.losses == ddp.losses
    for name, value in held.weights.items():
        np.testing.assert_array_equal(value, ddp.weights[name])


def one_micro_batch(*, grad_sync: bool) -> RunResult:
    return run(RunConfig(**{**SMALL, "accumulate": 1, "grad_sync": grad_sync}, stage=3), keep_events=True)


def test_one_micro_batch_is_as_without() -> None:
    one, other = (one_micro_batch(grad_sync=on) for on in (False, True))
    assert one.events[0] == other.events[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_fsdp2_holds_whole_fp32_gradients_between_micro_batches(stage: int) -> None:
    """4 Psi bytes are held while the second microbatch runs its forward; reduced once a step."""
    fields = {**SMALL, "recipe": "fsdp2", "stage": stage, "steps": 1}
    held, synced = (plan(plan_config(**{**fields, "grad_sync": on})) for on in (False, True))
    at = held.memory[0].marks["end_of_forward"].by_kind
    assert at["unsharded_grad"] == 4 * sum(unit.numel for unit in held.units)
    assert "grad" not in at
    assert synced.memory[0].marks["end_of_forward"].by_kind["grad"] == sum(unit.numel for unit in held.units)

    def reduced(result: RunResult) -> Fraction:
        return next(check.mean for check in checks(result, 0)[0].sent if check.name == "reduce_scatter")

    assert reduced(synced) == 3 * reduced(held)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_fsdp1_adds_microbatches_in_the_weights_format_whatever_it_reduces_in(stage: int) -> None:
    """Whole, in 2 bytes (Z14). Reductions then are of fp32 copies. Small gradients beside a large one are lost."""
    fields = {**SMALL, "recipe": "fsdp1", "stage": stage, "compress": "none"}
    held = run(RunConfig(**fields))
    psi = sum(unit.numel for unit in held.units)
    assert plan(RunConfig(**fields)).memory[0].marks["end_of_forward"].by_kind["unsharded_grad"] == 2 * psi
    wide = run(RunConfig(**fields, sum_computed_grads=False))
    assert plan(wide.config).memory[0].marks["end_of_forward"].by_kind["unsharded_grad"] == 4 * psi
    assert held.losses[0] == wide.losses[0]
    assert any((value != wide.weights[name]).any() for name, value in held.weights.items())
    assert all(check.agrees for check in checks(held)[0].states)
    once = RunConfig(**{**fields, "accumulate": 1})
    for name, value in run(once).weights.items():
        np.testing.assert_array_equal(value, run(once.replace(sum_computed_grads=False)).weights[name])


@pytest.mark.parametrize("flag", ["--no-grad-sync", "--no-sync"])
def test_the_flag_turns_it_off(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "gpt2", "--ranks", "8", "--accumulate", "2", flag]
    assert main([*words, "--stage", "2", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["grad_sync"] is False
    assert main([*words, "--stage", "1"]) == 2
    assert f"{flag}: stage 1 does not use it" in capsys.readouterr().err


def test_stages_that_keep_whole_gradients_have_none() -> None:
    with pytest.raises(InputError, match="stage 1 does not use it"):
        RunConfig(**SMALL, stage=1)
