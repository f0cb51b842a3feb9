"""A buffer that is not trained is a row that is missing: no gradient, no optimizer state, no message for either."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.config import RunConfig
from zerosim.device.events import Alloc, Launch
from zerosim.errors import InputError
from zerosim.placement.spec import FlatSpec, unit_of
from zerosim.train.plan import plan
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(layers=4, hidden=16, heads=2, seq=8, vocab=256, steps=2, micro_batch=1, seed=5)
CASES: tuple[dict[str, Any], ...] = (
    *(dict(ranks=4, stage=stage) for stage in range(4)),
    *(dict(ranks=4, stage=stage, partition="owner") for stage in (1, 2, 3)),
    *(dict(ranks=4, stage=stage, dp_replicate=2) for stage in (1, 2, 3)),
    *(dict(ranks=2, stage=stage, recipe="deepspeed", reduce_bucket=2000) for stage in (1, 2, 3)),
    *(dict(ranks=2, stage=stage, recipe="fsdp2") for stage in (2, 3)),
    *(dict(ranks=2, stage=stage, recipe="megatron") for stage in (0, 1)),
    dict(ranks=2, stage=0, recipe="ddp"),
    dict(ranks=1, stage=0, recipe="ddp"),
    dict(ranks=4, stage=0, recipe="ddp", tp=2),
    dict(ranks=4, stage=0, recipe="ddp", pp=2, accumulate=2),
    dict(ranks=2, stage=0, recipe="ddp", optimizer="adam8bit"),
    dict(ranks=4, stage=3, tp=2, accumulate=2),
    dict(ranks=4, stage=2, pp=2, accumulate=2),
    dict(ranks=4, stage=1, pp=2, tp=2, clip_norm=0.1, precision="fp16"),
)


@pytest.mark.parametrize("more", [{}, {"gather": "module"}, {"partition": "owner"}], ids=str)
@pytest.mark.parametrize(
    ("model", "freeze"),
    [({"model": "mlp", "hidden": 4}, "layers.0"), ({"model": "flat", "params": 210, "units": 4}, "units.1,units.2")],
    ids=str,
)
def test_models_without_blocks_have_frozen_weights_too(
    model: dict[str, Any], freeze: str, more: dict[str, Any]
) -> None:
    config = RunConfig(**model, freeze=freeze, ranks=4, stage=3, seq=4, steps=1, **more)
    result = run(config)
    assert plan(config).traffic == result.traffic
    assert formulas_agree(checks(result))


SOME = "*,!h.1,!ln_f"
"""What is frozen: everything but a block and the last norm."""


def trained(flat: FlatSpec) -> bool:
    return flat.unit in ("h.1", "ln_f")


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_frozen_stays_as_it_was_and_a_plan_counts_the_same(case: dict[str, Any]) -> None:
    config = RunConfig(**SMALL, **case, freeze=SOME)
    result, planned = run(config), plan(config, every_rank=True)
    assert [one.to_dict() for one in planned.memory] == [one.to_dict() for one in result.memory]
    assert planned.traffic == result.traffic
    assert formulas_agree(checks(result))
    first = run(config.replace(steps=1, lr=1e-30)).weights
    changed = {name for name, values in result.weights.items() if np.any(values != first[name])}
    assert changed == {name for name in first if name.startswith(("h.1.", "ln_f."))}


@pytest.mark.parametrize("frozen", [dict(lora_rank=1), dict(freeze="h.0"), dict(freeze="*,!h.1")], ids=str)
@pytest.mark.parametrize("layers", ["1,0,0,1", "1,0,1,0", "0,0,1,1", "0,1,0,1"])
def test_an_empty_chunk_passes_gradients_on_where_something_below_it_is_trained(
    layers: str, frozen: dict[str, Any]
) -> None:
    """Its place in the model is that of the next chunk's first unit."""
    sizes: dict[str, Any] = dict(layers=2, hidden=4, heads=2, seq=2, vocab=256, ranks=2, pp=2, accumulate=2, steps=1)
    for stage in (0, 1):
        config = RunConfig(**sizes, stage=stage, pipeline="interleaved", stage_layers=layers, micro_batch=2, **frozen)
        result = run(config)
        assert plan(config).traffic == result.traffic
        assert formulas_agree(checks(result))


@pytest.mark.bits
def test_the_stages_hold_and_send_what_is_trained_and_give_the_same_bits() -> None:
    """In elements: P parameters, of which T are trained; sizes that N divides."""
    config, n = RunConfig(**SMALL, ranks=4, stage=0, freeze=SOME), 4
    results = [run(config.replace(stage=stage)) for stage in range(4)]
    flats = results[0].layout.flats.values()
    p, t = sum(flat.numel for flat in flats), sum(flat.numel for flat in flats if trained(flat))
    assert 0 < t < p
    for stage, result in enumerate(results):
        held = result.memory[0].marks["end_of_backward"].by_kind
        assert held["param"] == 2 * (p // n if stage == 3 else p)
        assert held["grad"] == 2 * (t // n if stage > 1 else t)
        assert held["optim"] == 12 * (t // n if stage else t)
        sent: Counter[str] = Counter()
        for row in result.traffic[0]:
            if row.step == 0 and row.purpose == "states":
                sent[row.op] += row.sent_bytes
        # Each unit once for forward, the tied table twice; for backward those from the first trained one on.
        back = sum(flat.numel for flat in flats if flat.unit in ("h.1", "h.2", "h.3", "ln_f", "wte"))
        gathered = {0: 0, 1: t, 2: t, 3: p + 256 * 16 + back}[stage]
        assert sent["all_gather"] == 2 * gathered * (n - 1) // n
        assert sent["reduce_scatter"] == (2 * t * (n - 1) // n if stage else 0)
        assert sent["all_reduce"] == (0 if stage else 4 * t * (n - 1) // n)
        assert all(np.array_equal(result.weights[name], one) for name, one in results[0].weights.items())


LORA: dict[str, Any] = dict(lora_rank=4)
TRAINS_ON_ONE_STAGE: dict[str, Any] = dict(freeze="*,!h.3,!ln_f", tie_embeddings=False)
BUFFERS: tuple[tuple[dict[str, Any], dict[str, Any], list[int]], ...] = (
    (dict(ranks=2, stage=0, recipe="ddp"), LORA, [2 * 1024] * 2),
    (dict(ranks=2, stage=0, recipe="ddp", grad_dtype="fp32"), LORA, [4 * 1024] * 2),
    (dict(ranks=2, stage=0, grad_buckets="views"), LORA, [0] * 2),
    (dict(ranks=4, stage=0, recipe="ddp", pp=2, accumulate=2), LORA, [2 * 512] * 4),
    (dict(ranks=4, stage=0, recipe="ddp", pp=2, accumulate=2), TRAINS_ON_ONE_STAGE, [0, 0, 2 * 3312, 2 * 3312]),
    (dict(ranks=4, stage=0, recipe="ddp", tp=2), LORA, [2 * 768] * 4),
    (dict(ranks=1, stage=0, recipe="ddp"), LORA, [0]),
    (dict(ranks=2, stage=0, recipe="ddp", tp=2), LORA, [0] * 2),
    (dict(ranks=1, stage=0, recipe="ddp", grad_buckets="copies"), LORA, [2 * 1024]),
    *((dict(ranks=2, stage=stage, recipe="megatron"), LORA, [0] * 2) for stage in range(2)),
    *((dict(ranks=2, stage=stage, recipe="fsdp2"), LORA, [0] * 2) for stage in (2, 3)),
    *((dict(ranks=n, stage=3, recipe="deepspeed", reduce_bucket=5000), LORA, [2 * 5000] * n) for n in (1, 2)),
    *(
        (dict(ranks=n, stage=stage, recipe="deepspeed", reduce_bucket=5000), LORA, [0] * n)
        for n in (1, 2)
        for stage in (1, 2)
    ),
    (dict(ranks=2, stage=3, pp=2, accumulate=2, reduce_bucket=300), TRAINS_ON_ONE_STAGE, [0, 2 * 300]),
)


@pytest.mark.quick(5)
@pytest.mark.parametrize(("case", "what", "nbytes"), BUFFERS, ids=str)
def test_permanent_reduction_buffers_are_for_trained_weights_alone(
    case: dict[str, Any], what: dict[str, Any], nbytes: list[int]
) -> None:
    """PyTorch's DDP has buckets of trained parameters, and one rank has no DDP unless it is asked for. DeepSpeed's
    buffer has one size, whatever is trained and on how many ranks, at stage 3 from the start. Megatron's gradient
    buffer and FSDP2's shards are gradients. Of 18,400 parameters 1,024 are adapters'."""
    result = plan(RunConfig(**SMALL, **case, **what), every_rank=True)
    assert [memory.marks["after_init"].by_kind.get("comm", 0) for memory in result.memory] == nbytes
    assert formulas_agree(checks(result))
    trained = sum(f.num_parameters for f in result.layout.flats.values() if result.layout.is_trained(f.name))
    for memory in result.memory:  # in fp32 at most, stored and not reduced yet
        held = memory.marks["end_of_backward"].by_kind.get("grad", 0) + memory.peak.by_kind.get("unsharded_grad", 0)
        assert held <= 8 * trained


def test_constant_size_buffers_are_there_in_each_backward_where_something_is_trained() -> None:
    """DeepSpeed's stages 1 and 2, on one rank as on two: what a stage trains decides whether, not how large."""
    pipeline: dict[str, Any] = dict(ranks=2, pp=2, accumulate=2, **TRAINS_ON_ONE_STAGE)
    for case, counts in ((LORA | dict(ranks=1), [2]), (LORA | dict(ranks=2), [2, 2]), (pipeline, [0, 4])):
        config = RunConfig(**SMALL, stage=2, recipe="deepspeed", reduce_bucket=5000, **case)
        events = plan(config, every_rank=True, keep_events=True).events
        made = [
            sum(isinstance(e, Alloc) and e.kind == "comm" and e.nbytes == 2 * 5000 for e in each) for each in events
        ]
        assert made == counts


@pytest.mark.parametrize(
    "more", [{}, {"recompute": "full"}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"model": "llama"}], ids=str
)
def test_of_what_is_frozen_no_gradient_is_made_and_below_the_lowest_nothing(more: dict[str, Any]) -> None:
    """Neither a buffer nor a kernel for it: only its input's gradient, from the first trained unit on."""
    block, norm = ("layers.", "norm") if "model" in more else ("h.", "ln_f")
    freeze = f"*,!{block}2,!{norm}"
    config = RunConfig(**SMALL | {"tie_embeddings": False, "steps": 1}, ranks=4, stage=3, freeze=freeze, **more)
    result = run(config, keep_events=True)
    made: Counter[str] = Counter()
    units = set()
    for events in result.events:
        for event in events:
            if event.scope.phase == "backward":
                units.add(event.scope.unit)
            if isinstance(event, Alloc) and event.kind == "unsharded_grad":
                made[event.scope.unit] += event.nbytes
    frozen_below = {unit for unit in units if unit.startswith((f"{block}0", f"{block}1", "wte", "wpe", "embed"))}
    assert not frozen_below
    assert {unit_of(unit) for unit in made} == {f"{block}2", norm}


def test_a_block_whose_maps_are_frozen_keeps_no_inputs_for_them() -> None:
    """What a frozen map reads is kept by nobody: of a block above the lowest trained one only what norms, GELU and
    attention read stays."""
    config = RunConfig(**SMALL, ranks=2, stage=1)
    results = [run(config), run(config.replace(freeze="*,!h.1"))]
    kept = [{row.op for row in result.saved["h.2"] if row.what == "input"} for result in results]
    assert kept[0] - kept[1] == {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}


ZERO_BUBBLE = [("zb-h1", 0), ("zb-h1", 3), ("zb-v", 1), ("zb-v", 2)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("pipeline", "stage"), ZERO_BUBBLE)
def test_a_frozen_block_above_a_trained_one_has_no_weight_gradient_to_wait_for(pipeline: str, stage: int) -> None:
    """A schedule lists its weight gradient all the same. Blocks that are repeated leave its record too."""
    config = RunConfig(
        **SMALL | dict(steps=1), ranks=2, pp=2, pipeline=pipeline, stage=stage, accumulate=4, freeze="h.3"
    )
    result, few = run(config), plan(config)
    every = plan(config, every_rank=True, every_block=True)
    assert result.live_bytes_after == [0, 0]
    for planned in (few, every):
        assert [one.to_dict() for one in planned.memory] == [one.to_dict() for one in result.memory]
        assert planned.traffic == result.traffic


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("overlap", ["none", "reduce"])
def test_a_pipeline_stage_that_trains_nothing_has_no_buffer_to_reduce_from(stage: int, overlap: str) -> None:
    fields = SMALL | dict(
        ranks=4, pp=2, stage=stage, reduce_bucket=3001, overlap=overlap, tie_embeddings=False, steps=1
    )
    config = RunConfig(**fields, freeze="wte,wpe,h.0,h.1")
    result, planned = run(config, keep_events=True), plan(config)
    assert [one.to_dict() for one in planned.memory] == [one.to_dict() for one in result.memory]
    buffers = [
        sum(isinstance(event, Alloc) and event.nbytes == 2 * 3001 for event in events) for events in result.events
    ]
    assert buffers == [0, 0, *[1 + (overlap == "reduce")] * 2]


@pytest.mark.parametrize("recompute", ["full", "full:2"])
@pytest.mark.parametrize("offload", ["", "params=host"])
def test_a_recomputed_block_that_no_backward_reaches_is_not_prefetched_for_one(recompute: str, offload: str) -> None:
    """By leaf module a recomputed block's backward begins with its leaves' forward, if there is a backward."""
    fields = SMALL | dict(ranks=2, stage=3, gather="module", prefetch=2, recompute=recompute, offload=offload)
    result = run(RunConfig(**fields, freeze="*,!ln_f"), keep_events=True)
    assert result.live_bytes_after == [0, 0]
    backward = {
        event.scope.unit
        for event in result.events[0]
        if isinstance(event, Launch) and event.op == "all_gather" and event.scope.phase == "backward"
    }
    assert backward == {"lm_head", "ln_f"}


def test_a_pattern_that_matches_nothing_names_the_only_parameter() -> None:
    config = RunConfig(model="flat", params=1000, units=1, ranks=1, steps=1, freeze="wte")
    with pytest.raises(InputError, match=r"'wte': matches no parameter of flat; its parameters are units\.0\.weight$"):
        run(config)


@pytest.mark.parametrize("gather", ["unit", "module"])
def test_an_owner_holds_all_states_of_its_buffers(gather: str) -> None:
    """Frozen buffers are dealt out among themselves, so that a trained one's parameters lie with its states."""
    config = RunConfig(**SMALL, ranks=4, stage=3, partition="owner", gather=gather, freeze="wte,h.1")
    layout = plan(config).layout
    for rank in range(4):
        for name in layout.flats:
            parts = {layout.part(rank, name, state) for state in layout.rows(name)}
            assert parts == {layout.own(rank, name)}


def test_a_frozen_buffer_has_no_gaps_between_blocks_of_states_that_it_lacks() -> None:
    config = RunConfig(**SMALL, ranks=2, stage=3, optimizer="adam8bit", freeze=SOME)
    result, planned = run(config), plan(config)
    assert [one.to_dict() for one in planned.memory] == [one.to_dict() for one in result.memory]
    for name, flat in result.layout.flats.items():
        assert (flat.numel > flat.num_parameters) == result.layout.is_trained(name)
