"""Stage 3 by leaf module: what a unit's bits and volume are, less is gathered; ahead by elements, and what stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_prefetch import in_flight
from test_shapes import assert_same_record

from zerosim.analysis.checks import checks
from zerosim.analysis.compare import control_bytes
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.device.events import Alloc, Event, Free, Kernel, Launch
from zerosim.parallel.schedule import schedule, uses_of
from zerosim.tensor.tensor import cpu
from zerosim.train.build_model import build_model
from zerosim.train.plan import plan
from zerosim.train.run import run

H = 8
SMALL: dict[str, Any] = dict(layers=2, hidden=H, heads=2, seq=4, steps=2, micro_batch=1, ranks=3, stage=3)
LEAVES = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]


def small(**changes: Any) -> RunConfig:
    return RunConfig(**{**SMALL, "gather": "module", **changes})


CASES: list[dict[str, Any]] = [
    dict(precision="fp32", clip_norm=0.1, accumulate=2, ranks=4, dp_replicate=2),
    dict(clip_norm=0.1, recompute="full", dropout=0.1, prefetch=2, tie_embeddings=False, keep_last_unit=True),
    dict(model="llama", recompute="selective:mlp,layernorm,attn_proj", prefetch_elements=300, max_live=700),
    dict(recompute="selective:op", dropout=0.1, saves="megatron", persistent_numel=3 * H, accumulate=2),
    dict(ranks=4, tp=2, sequence_parallel=True, recompute="selective:layernorm", recipe="fsdp2"),
    dict(ranks=4, pp=2, accumulate=2, layers=4, pipeline="interleaved", keep_last_unit=True),
    dict(ranks=4, pp=2, accumulate=2, recompute="full:2", keep_last_unit=True, prefetch_elements=300),
    dict(partition="owner", cast_shards=True, persistent_numel=H, prefetch_elements=300, reduce_bucket=0),
    dict(recipe="deepspeed", reduce_bucket=100, persistent_numel=64, model="mlp"),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_of_units_and_bytes_those_of_the_forms(case: dict[str, Any]) -> None:
    units, modules = run(small(**case, gather="unit")), run(small(**case))
    assert modules.losses == units.losses
    assert list(modules.weights) == list(units.weights)
    for name, values in units.weights.items():
        np.testing.assert_array_equal(values, modules.weights[name], err_msg=name)
    for step, other in zip(modules.steps, units.steps, strict=True):  # slices are other elements: fp64 adds otherwise
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=1e-14)
    assert modules.live_bytes_after == [0] * modules.config.mesh.ranks
    assert control_bytes(modules, 1) == control_bytes(units, 1)
    for stage in range(modules.config.mesh.pp):
        assert all(check.agrees for check in [*checks(modules)[stage].states, *checks(modules, 1)[stage].sent])


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[7]], ids=str)
def test_shapes_leave_the_record_of_a_real_run(case: dict[str, Any]) -> None:
    assert_same_record(small(**case, steps=1))


# -- turns ------------------------------------------------------------------------------------------
def gathered(events: list[Event]) -> list[str]:
    """The module of each gather of a forward or backward, in the order of their launches."""
    calls = (event for event in events if isinstance(event, Launch) and event.op == "all_gather")
    return [call.scope.unit for call in calls if call.scope.phase in ("forward", "backward")]


@pytest.mark.parametrize("recompute", ["none", "full", "full:2"])
def test_turns_are_listed_leaf_by_leaf(recompute: str) -> None:
    """A block that runs again is gathered for that, and again for its backward: what the strategy is told, it does."""
    config = small(steps=1, recompute=recompute)
    model = build_model(config, cpu())
    uses = uses_of(schedule(1, 0, 1), model.units)
    assert gathered(plan(config, keep_events=True).events[0]) == [use.unit.name for use in uses for _ in use.unit.flats]
    of_block = [use.unit.name for use in uses if use.unit.name.startswith("h.1.")]
    forward = [f"h.1.{leaf}" for leaf in LEAVES]
    assert of_block == forward + (forward if recompute != "none" else []) + forward[::-1]


def test_a_norm_is_not_gathered_again_for_biases_whose_gradients_read_no_input() -> None:
    result = plan(RunConfig(**SMALL, gather="module", freeze="*,!bias", recompute="selective:layernorm"))
    assert all(check.agrees for check in checks(result, 0)[0].sent)


def test_one_leaf_is_there_at_a_time() -> None:
    """The most is 4 h^2 of weight and 4 h of bias, in 2 bytes, where a block has 12 h^2 + 13 h."""

    def most(config: RunConfig) -> int:
        live: dict[int, int] = {}
        found = 0
        for event in plan(config, keep_events=True).events[0]:
            if isinstance(event, Alloc) and event.kind == "unsharded_param":
                live[event.id] = event.nbytes
            elif isinstance(event, Free):
                live.pop(event.id, None)
            found = max(found, sum(live.values()))
        return found

    plain = dict(vocab=2, seq=2, ranks=2, steps=1)
    assert most(small(**plain)) == 2 * (4 * H * H + 4 * H)
    assert most(small(**plain, gather="unit")) == 2 * (12 * H * H + 13 * H)


# -- what stays, and what is ahead ------------------------------------------------------------------
@pytest.mark.parametrize(("threshold", "widths"), [(H - 1, 0), (H, 8), (3 * H, 11)])
def test_tensors_stay_by_their_own_size(threshold: int, widths: int) -> None:
    """A block has six tensors of h elements (norms, two biases) and one of 3h, ln_f has two of h. Weights go."""
    result = plan(small(layers=1, ranks=2, persistent_numel=threshold))
    assert result.memory[0].marks["after_step"].by_kind.get("unsharded_param", 0) == 2 * widths * H


def test_elements_are_gathered_ahead_and_one_tensor_goes_beyond() -> None:
    """DeepSpeed's fetch_sub_module: at each turn the next tensors until they are so many; what is ahead adds up."""
    events = plan(small(ranks=2, steps=1, prefetch_elements=H + 1), keep_events=True).events[0]
    names = gathered(events)
    assert names[:7] == ["wte", "wpe", "h.0.ln_1", "h.0.ln_1", "h.0.attn.c_attn", "h.0.attn.c_attn", "h.0.attn.c_proj"]
    ahead = dict.fromkeys(unit for _, unit, _ in in_flight(events, "all_gather"))
    assert list(ahead)[:3] == ["wpe", "h.0.ln_1", "h.0.attn.c_attn"]
    turns = [(call.scope.unit, at) for at, call in enumerate(events) if isinstance(call, Launch)]
    first = next(at for unit, at in turns if unit == "h.0.attn.c_proj")
    kernels = (event for event in events[:first] if isinstance(event, Kernel) and event.scope.phase == "forward")
    computed = {kernel.scope.unit for kernel in kernels}
    assert "h.0.attn.c_attn" not in computed  # launched before its turn, and the turn before its own


def test_a_limit_holds_back_what_is_ahead_alone() -> None:
    """With as many elements there as the limit nothing is launched ahead; a turn's own parameters come regardless."""
    config = small(ranks=2, steps=1, vocab=2, seq=2)
    plain, free, held, none = (
        plan(config.replace(**ahead), keep_events=True)
        for ahead in (
            {},
            dict(prefetch_elements=10**6),
            dict(prefetch_elements=10**6, max_live=4 * H * H + 4 * H + 1),
            dict(prefetch_elements=10**6, max_live=1),
        )
    )
    assert gathered(none.events[0]) == gathered(plain.events[0])
    assert not in_flight(none.events[0], "all_gather")
    assert in_flight(held.events[0], "all_gather")
    peaks = [result.memory[0].peak.total_bytes for result in (none, held, free)]
    assert peaks == sorted(set(peaks))
    for result in (free, held, none):
        assert result.sent_bytes(0, 0) == plain.sent_bytes(0, 0)


# -- input ------------------------------------------------------------------------------------------


def test_an_explanation_says_what_is_gathered_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "explain --stage 3 --ranks 4 --hidden 100 --layers 2 --heads 2 --seq 8 --micro-batch 1"
    for gather, numbers in (("unit", f"{12 * 100**2 + 13 * 100:,} · 2"), ("module", f"{4 * 100**2 + 4 * 100:,} · 2")):
        assert main([*asked.split(), "--gather", gather]) == 0
        assert numbers in capsys.readouterr().out
