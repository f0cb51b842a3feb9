"""What DeepSpeed 0.19.8 does, as run: bytes at the step's peak, gathers after it, clipping and skipped steps."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from same import assert_same_bits
from test_shapes import assert_same_record

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.config import RunConfig
from zerosim.config.presets.recipes import find_recipe
from zerosim.device.events import Alloc, Event, Free, Launch
from zerosim.errors import InputError, NonFiniteGradient
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

SIZES: dict[str, Any] = dict(model="mlp", layers=2, hidden=16, steps=2, micro_batch=1, ranks=1, optimizer="adamw")
BUCKET = 4000


def small(**changes: Any) -> RunConfig:
    given = {**SIZES, "recipe": "hf-deepspeed", "stage": 2, "reduce_bucket": BUCKET, "persistent_numel": 0, **changes}
    return RunConfig(
        **{name: value for name, value in given.items() if given["stage"] == 3 or name != "persistent_numel"}
    )


def live(events: list[Event]) -> list[tuple[Event, int]]:
    """The model states, buffers and temporaries that are alive after each event."""
    sizes, total, found = dict[int, int](), 0, []
    for event in events:
        if isinstance(event, Alloc):
            sizes[event.id] = event.nbytes
            total += event.nbytes
        elif isinstance(event, Free):
            total -= sizes.pop(event.id)
        found.append((event, total))
    return found


def peak_of_step(result: RunResult, step: int) -> Fraction:
    """The optimizer step's peak in bytes per parameter, without stage 3's buffer."""
    inside = [total for event, total in live(result.events[0]) if event.scope[:2] == (step, "optimizer")]
    lasting = 2 * BUCKET * (result.config.parallel.zero_stage == 3)
    return Fraction(max(inside) - lasting, result.num_parameters)


@pytest.mark.parametrize(
    ("changes", "first", "later"),
    [
        (dict(), 22, 22),  # foreach
        (dict(foreach=False), 18, 22),  # fused: the cast of the flat gradients is the peak
        (dict(for_loop=True), 26, 26),
        (dict(stage=1), 22, 22),
        (dict(stage=3), 24, 24),
        (dict(stage=3, foreach=False), 20, 22),
        (dict(stage=3, for_loop=True), 28, 28),
    ],
    ids=str,
)
def test_the_step_holds_as_many_bytes_a_parameter_as_deepspeeds(
    changes: dict[str, Any], first: int, later: int
) -> None:
    """One rank, as DeepSpeed ran with torch's AdamW as the client's optimizer. The norm's sums are some bytes more."""
    result = run(small(**changes), keep_events=True)
    assert [round(peak_of_step(result, step), 1) for step in (0, 1)] == [first, later]
    plain = dict(foreach=False, for_loop=False, flatten_grads=False, lazy_states=False, grads_in_partition=False)
    known = {
        name: value
        for name, value in plain.items()
        if name != "grads_in_partition" or small(**changes).grads.in_partition
    }
    assert_same_bits(result, run(small(**{**changes, **known})))
    assert_same_record(result.config, result)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_cast_of_flat_gradients_is_two_bytes_of_the_slice_more(ranks: int) -> None:
    result = run(small(ranks=ranks, foreach=False), keep_events=True)
    padded = sum(result.layout.padded(name) for name in result.layout.flats)
    peak = max(total for event, total in live(result.events[0]) if event.scope[:2] == (1, "optimizer"))
    assert peak == pytest.approx(2 * padded + 20 * padded // ranks, abs=200)


def test_without_a_flat_slice_a_loop_holds_the_temporaries_of_one_tensor() -> None:
    settings = dict(SIZES, stage=0, precision="fp32")
    loop, fused = (run(RunConfig(**settings, for_loop=on), keep_events=True) for on in (True, False))
    assert_same_bits(loop, fused)
    temporaries = [
        sum(
            e.nbytes
            for e in one.events[0]
            if isinstance(e, Alloc) and e.kind == "temp" and e.scope.phase == "optimizer"
        )
        for one in (loop, fused)
    ]
    largest = sum(max(weight.numel for weight in flat.weights) for flat in loop.layout.flats.values())
    assert temporaries[0] - temporaries[1] == 2 * 2 * 4 * largest  # two, in two steps


def test_a_loop_is_torchs() -> None:
    with pytest.raises(InputError, match="for_loop: muon is not modelled"):
        RunConfig(optimizer="muon", for_loop=True)
    with pytest.raises(InputError, match="PyTorch has one implementation of a step"):
        RunConfig(for_loop=True, foreach=True)
    assert "foreach" in RunConfig(recipe="fsdp2", for_loop=True).set_aside


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_gradient_of_a_backward_makes_room_for_the_whole_slice(accumulate: int, ranks: int) -> None:
    """Later microbatches have a second one, until their backward ends."""
    config = small(accumulate=accumulate, ranks=ranks, steps=1)
    result = run(config, keep_events=True)
    made = [
        e.nbytes for e in result.events[0] if isinstance(e, Alloc) and (e.kind, e.scope.phase) == ("grad", "backward")
    ]
    own, count = 2 * sum(result.layout.padded(name) for name in result.layout.flats) // ranks, len(result.layout.flats)
    assert [sum(made[at : at + count]) for at in range(0, len(made), 2 * count)] == [own] * accumulate  # then each part
    plain = run(config.replace(grads_in_partition=False), keep_events=True)
    assert_same_bits(result, plain)
    by_slice = (
        [
            max(
                total for event, total in live(one.events[0]) if event.scope.unit == "layers.0" and event.scope.slot > 0
            )
            for one in (result, plain)
        ]
        if accumulate > 1
        else [1, 0]
    )
    assert by_slice[0] > by_slice[1]
    assert result.memory[0].marks["end_of_backward"] == plain.memory[0].marks["end_of_backward"]
    assert_same_record(config, result)


def test_stage_0_in_bf16_keeps_states_whole_and_reduces_two_bytes() -> None:
    """FP16_UnfusedOptimizer: no fp32 buffer, one all-reduce in bf16, fp32 copies of the gradients in the step."""
    result = run(small(recipe="deepspeed", stage=0, ranks=4, reduce_bucket=0), keep_events=True)
    psi = result.num_parameters
    assert result.sent_bytes(0, 1) == 2 * 2 * psi * 3 // 4
    for mark, each in (("after_init", 14), ("end_of_backward", 16), ("gradients_upcast", 20)):
        by_kind = result.memory[0].marks[mark].by_kind
        assert sum(by_kind.get(kind, 0) for kind in ("param", "grad", "optim")) == each * psi
    recipe = find_recipe("deepspeed")
    assert recipe.note(0) is None
    assert "BF16_Optimizer" in (recipe.note(0, pp=2) or "")


@pytest.mark.quick(2)
@pytest.mark.parametrize("trained", [dict(lora_rank=2), dict(freeze="!h.1.mlp.c_fc.weight"), dict()], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_stage_3_gathers_what_stays_gathered_after_each_step_one_by_one(
    trained: dict[str, Any], accumulate: int
) -> None:
    """Frozen tensors too."""
    config = RunConfig(
        layers=2, hidden=16, heads=2, seq=8, vocab=256, steps=2, ranks=2, stage=3, recipe="deepspeed",
        persistent_numel=40, reduce_bucket=3000, accumulate=accumulate, **trained,
    )  # fmt: skip
    result = run(config, keep_events=True)
    stay = [name for name, flat in result.layout.flats.items() if flat.num_parameters <= 40]
    gathers = [
        e
        for e in result.events[0]
        if isinstance(e, Launch) and e.op == "all_gather" and e.scope[:2] == (1, "optimizer")
    ]
    assert len(gathers) == len(stay) > 5
    assert formulas_agree(checks(result))
    assert_same_record(config, result)


@pytest.mark.parametrize("stage", range(4))
def test_gradients_are_clipped_to_a_norm_of_one_unless_said_otherwise(stage: int) -> None:
    config = RunConfig(recipe="deepspeed", stage=stage)
    assert config.optim.clip_norm == 1.0
    assert config.replace(clip_norm=0).optim.clip_norm == 0
    assert config.replace(clip_norm=0.5).optim.clip_norm == 0.5
    assert RunConfig(stage=stage).optim.clip_norm == 0
    off, plain = small(stage=stage, recipe="deepspeed", clip_norm=0, reduce_bucket=0), RunConfig(**SIZES, stage=stage)
    assert_same_bits(run(off), run(plain))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", range(4))
def test_a_step_with_an_infinite_gradient_is_skipped(stage: int, precision: str) -> None:
    """Except at stage 0 in fp32, where DeepSpeed looks at nothing."""
    settings = dict(SIZES, recipe="deepspeed", stage=stage, precision=precision, steps=3)
    settings |= dict(lr=1e37, clip_norm=0, **({"reduce_bucket": 1000} if stage else {}))
    assert RunConfig(**settings).precision.skip_nonfinite == (stage > 0 or precision == "bf16")
    if stage == 0 and precision == "fp32":
        with pytest.raises(NonFiniteGradient):
            run(RunConfig(**settings))
    else:
        assert any(report.skipped for report in run(RunConfig(**settings)).steps)


def test_microbatches_are_added_in_the_parameters_format() -> None:
    for stage in range(4):
        assert RunConfig(recipe="deepspeed", stage=stage, precision="bf16").precision.grad_dtype == "bf16"


def test_overlap_comm_below_stage_3_is_a_second_bucket() -> None:
    one, two = (run(small(overlap_comm=on, ranks=2, steps=1), keep_events=True) for on in (False, True))
    buckets = [
        [e.nbytes for e in run_.events[0] if isinstance(e, Alloc) and e.nbytes == 2 * BUCKET and e.kind == "comm"]
        for run_ in (one, two)
    ]
    assert [len(found) for found in buckets] == [1, 2]
    assert_same_bits(one, two)
    assert plan(small(stage=3, overlap_comm=True)).config.reduction.buffers == 1


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_host_holds_eighteen_bytes_of_the_slice_under_zero_offload(precision: str, accumulate: int) -> None:
    """Master 4 and gradient 4 from the start, Adam's 8 and staging 2 from the first step. Microbatches add up in a
    buffer of 2 more."""
    settings: dict[str, Any] = dict(
        SIZES, recipe="deepspeed", stage=2, ranks=2, reduce_bucket=BUCKET, precision=precision, accumulate=accumulate,
        offload="optimizer=host", initial_scale_power=8,
    )  # fmt: skip
    result, plain = (run(RunConfig(**settings, host_buffers=on), keep_events=True) for on in (True, False))
    assert_same_bits(result, plain)
    own = sum(result.layout.padded(name) for name in result.layout.flats) // 2
    host = result.memory[0].others["host"]
    assert host.marks["after_init"].total_bytes == 8 * own
    held = (18 if accumulate == 1 else 20) * own
    assert host.marks["after_step"].total_bytes == held
    assert 0 <= host.peak.total_bytes - held <= 2 * max(result.layout.padded(name) for name in result.layout.flats)
    assert formulas_agree(checks(result))
    assert formulas_agree(checks(plan(RunConfig(**{**settings, "steps": None}))))
    assert_same_record(RunConfig(**settings))


def test_pinned_memory_is_a_power_of_two_of_each_request() -> None:
    """One request for all of a rank's masters, gradients and staging; Adam's states are pageable."""
    settings: dict[str, Any] = dict(
        SIZES, recipe="deepspeed", stage=2, ranks=2, reduce_bucket=BUCKET, offload="optimizer=host", steps=1
    )
    pinned, pageable = (run(RunConfig(**settings, pin_memory=on)) for on in (True, False))
    assert_same_bits(pinned, pageable)
    own = sum(pinned.layout.padded(name) for name in pinned.layout.flats) // 2
    rests = sum((1 << (each * own - 1).bit_length()) - each * own for each in (4, 4, 2))
    ends = [result.memory[0].others["host"].marks["after_step"].total_bytes for result in (pinned, pageable)]
    assert ends[0] - ends[1] == rests > 0
    by_unit = dict(SIZES, recipe="fsdp2", stage=3, ranks=2, offload="optimizer=host,params=host", steps=1)
    pinned, pageable = (run(RunConfig(**by_unit, pin_memory=on)) for on in (True, False))
    sizes = [pinned.layout.padded(name) // 2 for name in pinned.layout.flats]
    rests = sum((1 << (each * own - 1).bit_length()) - each * own for own in sizes for each in (4, 2))
    ends = [result.memory[0].others["host"].marks["after_step"].total_bytes for result in (pinned, pageable)]
    assert ends[0] - ends[1] == rests
    with pytest.raises(InputError, match="pin_memory: no model state lies on the host"):
        RunConfig(pin_memory=True)


def test_processes_that_load_fp32_weights_hold_them_on_the_host_until_their_device_has_them() -> None:
    settings: dict[str, Any] = dict(SIZES, stage=2, ranks=4, steps=1, offload="optimizer=host", ranks_per_node=2)
    every, plain, first = (run(RunConfig(**settings, host_load=which)) for which in ("every", "none", "first"))
    before = plain.memory[0].others["host"]
    held = before.marks["after_init"].total_bytes
    for result, loading in ((every, (0, 1, 2, 3)), (first, (0, 2))):
        assert_same_bits(result, plain)
        peaks = [one.others["host"].peak.total_bytes for one in result.memory]
        most = max(4 * result.num_parameters + held, before.peak.total_bytes)
        assert peaks == [most if rank in loading else before.peak.total_bytes for rank in range(4)]
        assert result.memory[0].others["host"].marks["after_init"].total_bytes == held
        for shown in (plan(result.config, every_rank=True), plan(result.config)):
            assert [one.others["host"].peak.total_bytes for one in shown.memory] == peaks
    kept = dict(model="gpt", layers=2, hidden=8, heads=2, seq=4, recompute="full", cpu_checkpointing=True)
    assert formulas_agree(checks(plan(RunConfig(**{**settings, "offload": "", **kept}, host_load="every"))))
    alone = plan(RunConfig(**{**settings, "offload": ""}, host_load="first"))
    found = [one.others["host"].peak.total_bytes if "host" in one.others else 0 for one in alone.memory]
    assert found == [4 * alone.num_parameters, 0] * 2


def test_without_zero_init_a_device_has_all_weights_before_its_shard() -> None:
    settings: dict[str, Any] = dict(SIZES, stage=3, ranks=4, steps=1)
    whole, plain = (run(RunConfig(**settings, host_load=which)) for which in ("device", "every"))
    assert_same_bits(whole, plain)
    before = plain.memory[0].marks["after_init"].total_bytes
    assert whole.memory[0].marks["after_init"].total_bytes == before
    assert whole.memory[0].peak.total_bytes == max(2 * whole.num_parameters + before, plain.memory[0].peak.total_bytes)
    assert plan(whole.config).memory == plan(whole.config, every_rank=True).memory
    with pytest.raises(InputError, match="stage 2 holds whole parameters in any case; choose every"):
        RunConfig(**{**settings, "stage": 2}, host_load="device")
