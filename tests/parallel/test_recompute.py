"""Recompute: weights to the bit those of a run that keeps everything, fewer bytes, and nothing left behind."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from built import gpt, place
from same import assert_same_bits

from zerosim.config import RunConfig
from zerosim.config.recompute import PARTS as OF_BLOCK
from zerosim.device.device import Device, Kind, Phase
from zerosim.device.events import Alloc, Kernel, Launch, Retag
from zerosim.dtypes import fp64
from zerosim.nn import ActivationPolicy, Recompute, Unit
from zerosim.tensor.tensor import Tensor, cpu, tensor
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(layers=2, hidden=16, heads=2, seq=8, vocab=256, micro_batch=2, steps=3, dropout=0.2)


def small(**changes: Any) -> RunResult:
    return run(RunConfig(**{**SMALL, **changes}))


STAGES = [(0, "slices"), *itertools.product((1, 2, 3), ("slices", "owner"))]
WAYS: dict[tuple[str, int], list[dict[str, str]]] = {
    ("fp32", 1): [dict(recompute="selective"), dict(recompute="full", saves="megatron")],
    ("bf16", 2): [dict(recompute="full"), dict(saves="megatron")],
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(("stage", "partition"), STAGES)
@pytest.mark.parametrize(
    ("precision", "accumulate"), [("fp32", 1), ("bf16", 2), pytest.param("fp16", 2, marks=pytest.mark.slow)]
)
def test_weights_are_those_without_recompute(stage: int, partition: str, precision: str, accumulate: int) -> None:
    """Tied embeddings, dropout, one and several slots; every stage and partition with every way, in fp16 with all."""
    base = dict(stage=stage, partition=partition, ranks=2, precision=precision, accumulate=accumulate, steps=2)
    if precision == "fp16":
        base |= {"initial_scale_power": 8}
    wanted = small(**base)
    for way in WAYS.get((precision, accumulate)) or itertools.chain(*WAYS.values()):
        assert_same_bits(small(**base, **way), wanted)


ZERO_BUBBLE: list[dict[str, Any]] = [
    dict(pipeline="zb-h1", stage=3, tie_embeddings=False),
    dict(pipeline="zb-v", stage=3, model="llama", kv_heads=1, dropout=0.0),
    dict(pipeline="zb-h1", stage=3, model="llama", gather="module", dropout=0.0, attention="flash"),
    dict(pipeline="zb-v", stage=3, gather="module", saves="megatron"),
    dict(pipeline="zb-v", stage=2, lora_rank=2, lora_target="all-linear", base="nf4"),
    dict(pipeline="zb-h1", stage=1, tp=2, saves="megatron"),
    dict(pipeline="zb-h1", stage=0),
]


@cache  # what keeps everything is the same for each part
def delayed(way: int, **more: str) -> RunResult:
    base = dict(ranks=4, pp=2, layers=4, accumulate=4, steps=1, precision="fp32", micro_batch=1, seq=4)
    return small(**base | ZERO_BUBBLE[way], **more)


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", [part for part in OF_BLOCK if part != "mla_up_proj"])  # no latents here
@pytest.mark.parametrize("way", ZERO_BUBBLE, ids=str)
def test_a_pending_weight_gradient_holds_what_was_recomputed_and_reads_no_parameter(
    way: dict[str, Any], part: str
) -> None:
    """What was discarded is recomputed for the input's gradient, while the unit is gathered: no unit is gathered
    again."""
    kept, again = delayed(ZERO_BUBBLE.index(way)), delayed(ZERO_BUBBLE.index(way), recompute=f"selective:{part}")
    assert_same_bits(again, kept)
    assert again.live_bytes_after == [0] * again.config.mesh.ranks
    if "gather" not in way:  # by module, recompute gathers a leaf again
        states = [[[row for row in rows if row.purpose == "states"] for rows in one.traffic] for one in (kept, again)]
        assert states[0] == states[1]


PARTS = ["selective:layernorm", "selective:core_attn,layernorm,mlp", "selective:op", "full:2"]
PARTS += ["0=full+1=selective:layernorm,dropout", "0=selective:mlp,attn_proj", "1=full"]
WORLDS: list[dict[str, Any]] = [
    dict(ranks=1, stage=0, precision="fp32"),
    dict(ranks=2, stage=3, precision="bf16", saves="megatron", accumulate=2, tie_embeddings=False),
    dict(ranks=4, stage=2, tp=2, sequence_parallel=True, attention="flash", precision="fp16", initial_scale_power=8),
    dict(ranks=4, stage=1, tp=2, pp=2, layers=4, accumulate=2, precision="bf16"),
    dict(ranks=4, stage=1, tp=2, model="llama", kv_heads=1, dropout=0.0, precision="fp32"),
]


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_parts_that_run_again_change_no_bit(world: dict[str, Any]) -> None:
    wanted = small(**world, steps=1)
    for recompute in PARTS:
        assert_same_bits(other := small(**world, steps=1, recompute=recompute), wanted)
        assert other.live_bytes_after == wanted.live_bytes_after
        saved = [sum(sum(row.nbytes for row in rows) for rows in each.saved.values()) for each in (other, wanted)]
        assert saved[0] < saved[1]


# -- traffic, work, bytes ---------------------------------------------------------------------------------
def test_stage_3_gathers_once_in_backward() -> None:
    plain, again = small(stage=3, ranks=2), small(stage=3, ranks=2, recompute="full")
    assert plain.traffic == again.traffic


def events(recompute: str, **changes: Any) -> list[Any]:
    config = RunConfig(**{**SMALL, "ranks": 1, "steps": 1, "recompute": recompute, **changes})
    return run(config, keep_events=True).events[0]


def flops(recorded: list[Any], phase: str, unit: str) -> int:
    return sum(e.flops for e in recorded if isinstance(e, Kernel) and e.scope.phase == phase and e.scope.unit == unit)


def test_full_runs_each_block_forward_once_more_and_nothing_else() -> None:
    plain, again = events("none"), events("full")
    for unit in ("h.0", "h.1"):
        assert flops(again, "backward", unit) == flops(plain, "backward", unit) + flops(plain, "forward", unit)
    for unit in ("wte", "wpe", "ln_f", "lm_head"):
        assert flops(again, "backward", unit) == flops(plain, "backward", unit)
    for unit in ("h.0", "h.1", "ln_f", "lm_head"):
        assert flops(again, "forward", unit) == flops(plain, "forward", unit)
    assert len([e for e in plain if isinstance(e, Launch)]) == len([e for e in again if isinstance(e, Launch)])


@pytest.mark.parametrize(
    ("part", "kernels"),
    [
        ("core_attn", ["attention_scores", "softmax", "attention_values", "dropout_mask"]),
        ("layernorm", ["layer_norm", "layer_norm"]),
        ("mlp", ["linear", "gelu"]),
        ("mlp_act", ["gelu"]),
        ("dropout", ["dropout_mask", "dropout_mask"]),
        ("attn_proj", ["linear", "dropout_mask", "dropout", "add"]),
        (
            "op",
            ["attention_scores", "softmax", "attention_values", "dropout_mask", "gelu", "layer_norm", "layer_norm",
             "linear", "dropout_mask", "dropout", "add", "dropout_mask", "dropout_mask"],
        ),
    ],
)  # fmt: skip
def test_a_part_runs_its_own_kernels_once_more_and_nothing_else(part: str, kernels: list[str]) -> None:
    def work(recorded: list[Any], phase: str, unit: str = "h.1") -> Counter[tuple[str, int]]:
        found = (e for e in recorded if isinstance(e, Kernel) and e.scope[1:3] == (phase, unit))
        return Counter((e.name, e.flops) for e in found)

    plain, again = events("none"), events(f"selective:{part}")
    assert work(again, "forward") == work(plain, "forward")
    more = work(again, "backward") - work(plain, "backward")
    assert sorted(name for name, _ in more.elements()) == sorted(kernels)
    assert {each for each in more if each[0] != "dropout_mask"} <= set(work(plain, "forward"))
    assert not work(plain, "backward") - work(again, "backward")
    assert work(again, "backward", "ln_f") == work(plain, "backward", "ln_f")


def test_peak_of_full_is_its_inputs_and_one_block() -> None:
    """A block more adds its kept input to the peak, 2 sbh, and its own model states: nothing of its insides."""
    peaks = []
    for layers in (4, 5):
        sizes: dict[str, Any] = dict(
            layers=layers, hidden=16, heads=4, seq=64, micro_batch=4, steps=1, stage=0, ranks=1
        )
        peak = small(**sizes, recompute="full").memory[0].peak
        assert peak.scope.phase == "backward"
        peaks.append({k: v for k, v in peak.by_kind.items() if k in ("activation", "activation_grad", "kept", "temp")})
    few, more = peaks
    assert more["kept"] - few["kept"] == 2 * 64 * 4 * 16
    assert {k: v for k, v in few.items() if k != "kept"} == {k: v for k, v in more.items() if k != "kept"}


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("recompute", "saves"), [("selective", "lean"), ("full", "megatron")])
def test_nothing_is_left_without_the_garbage_collector(stage: int, recompute: str, saves: str) -> None:
    gc.collect()
    gc.disable()
    try:
        result = small(
            stage=stage, ranks=2, steps=2, accumulate=2, recompute=recompute, saves=saves, sample="ab", sample_tokens=2
        )
        assert result.live_bytes_after == [0, 0]
    finally:
        gc.enable()


# -- the unit ----------------------------------------------------------------------------------------------
def blocks(device: Device, recompute: str = "full", dropout: float = 0.0) -> list[Unit]:
    return place(gpt(device, policy=ActivationPolicy(recompute=recompute), dropout=dropout)).units


def test_blocks_alone_are_wrapped() -> None:
    units = blocks(cpu())
    assert [isinstance(unit, Recompute) for unit in units] == [False, False, True, True, False, False]
    assert [unit.name for unit in units] == ["wte", "wpe", "h.0", "h.1", "ln_f", "lm_head"]
    assert not any(isinstance(unit, Recompute) for unit in blocks(cpu(), "selective"))


def test_slots_wait_in_any_order_and_inputs_go_as_they_are_used() -> None:
    device = cpu()
    unit, plain = blocks(device, dropout=0.3)[2], blocks(device, "none", dropout=0.3)[2]
    seed = tensor(np.ones((1, 6, 8)), device, dtype="fp64").buffer

    def value(slot: int) -> Tensor:
        return tensor(np.random.default_rng(slot).standard_normal((1, 6, 8)), device, dtype="fp64")

    for one in (unit, plain):
        for slot in range(3):
            with device.scope(step=1, unit="h.0", slot=slot):
                one.forward(value(slot), slot)
    for slot in (1, 2, 0):
        with device.scope(step=1, unit="h.0", slot=slot):
            ours, theirs = [seed], [seed]
            unit.backward(ours, slot)
            plain.backward(theirs, slot)
        assert (ours[0].array == theirs[0].array).all()
        assert (unit.flat.take_grad().array == plain.flat.take_grad().array).all()
    with pytest.raises(KeyError):
        unit.backward([seed], 0)


def test_only_the_input_stays_and_it_is_called_kept(device: Device, live: Any) -> None:
    unit = blocks(device)[2]
    x = tensor(np.ones((1, 6, 8)), device, dtype="fp64")
    before = live()
    y = unit.forward(x)
    assert live() == before + 8 * 48  # the result
    kept, shape = x.buffer.storage.id, x.shape
    del x, y
    assert live() == before
    retags = [e for e in device.recorder.history if isinstance(e, Retag)]
    assert [(e.id, e.kind) for e in retags] == [(kept, "kept")]
    grads = [device.alloc(shape, fp64, Kind.ACTIVATION_GRAD)]
    device.kernel(0, device.backend.fill, grads[0].array, 1.0)
    unit.backward(grads)
    grads.clear()
    assert live() == before - 8 * 48 + 8 * unit.flat.numel  # the input is gone, the gradient is there
    unit.flat.take_grad()


def test_forget_and_evaluation(device: Device, live: Any) -> None:
    unit = blocks(device, dropout=0.5)[2]
    before = live()
    unit.forward(tensor(np.ones((1, 6, 8)), device, dtype="fp64"))
    assert live() == before + 8 * 48
    unit.forget()
    assert live() == before
    with device.phase(Phase.EVALUATE), device.no_grad():
        unit.forward(tensor(np.ones((1, 6, 8)), device, dtype="fp64"))
        assert live() == before
    assert not [e for e in device.recorder.history if isinstance(e, Alloc) and e.kind == "kept"]


def test_the_peak_of_stage_3_by_hand() -> None:
    """One small GPT, its bytes added up from the schedule: L 2, h 16, a 2, s 8, b 1, V 100, N 4, bf16, full recompute.

    At the peak the first block is in backward, its forward run again: states, the other's gradient shard, the
    block gathered, its whole gradient under way and that of the tied table, the kept inputs, what the block saves.
    """
    config = RunConfig(
        stage=3, ranks=4, layers=2, hidden=16, heads=2, seq=8, micro_batch=1, vocab=100, dropout=0.1, steps=1,
        recompute="full", saves="megatron", bucket_bytes=None,
    )  # fmt: skip
    memory = plan(config).memory[0]
    totals = {mark: snapshot.total_bytes for mark, snapshot in memory.marks.items()}
    assert totals["after_init"] == 29_120
    assert totals["end_of_forward"] == 31_940
    assert memory.peak.total_bytes == 53_708
    assert memory.peak.scope.unit == "h.0"
