"""Blocks that are repeated leave the record of blocks that run: event by event, ids and all."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerosim.comm.runtime import Context, launch, launch_alone
from zerosim.config import plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.device.device import Kind
from zerosim.dtypes import fp32
from zerosim.errors import InputError, OutOfMemory, RankFailed
from zerosim.tensor.tensor import Tensor
from zerosim.train.build import build_rank, place_rank
from zerosim.train.build_updater import build_updater
from zerosim.train.plan import plan
from zerosim.train.rank import Inputs, train_rank
from zerosim.train.repeated import Call, Player, Rehearsals, Repeated
from zerosim.train.world import world_of

sys.path.insert(0, str(Path(__file__).parents[1]))

from digests import fields_of

GPT = dict(model="gpt", layers=3, hidden=32, heads=4, seq=16, vocab=64, ranks=4, accumulate=2)
LLAMA = dict(GPT, model="llama", kv_heads=2)
EIGHT = dict(LLAMA, layers=4, hidden=128, ffn=256, seq=128, accumulate=3, fp8_library="te")
CASES: dict[str, dict[str, Any]] = {
    "ddp": dict(GPT, stage=0, recipe="ddp"),
    "dropout": dict(GPT, stage=1, dropout=0.1, attention="eager"),
    "two steps": dict(GPT, stage=2, steps=2),
    "gathered units": dict(LLAMA, stage=3, recipe="fsdp2", recompute="full", attention="flash"),
    "leaf modules": dict(GPT, stage=3, recipe="deepspeed", recompute="full:2", prefetch_elements=5000),
    "leaf modules again": dict(LLAMA, stage=3, gather="module", recompute="selective:layernorm,mlp_act"),
    "a unit that stays": dict(GPT, stage=3, pp=2, layers=4, keep_last_unit=True),
    "owners": dict(GPT, stage=2, partition="owner", optimizer="muon"),
    "tensor parallel": dict(LLAMA, stage=1, tp=2, recipe="megatron"),
    "the second stage's ring": dict(LLAMA, layers=4, stage=1, pp=2, tp=2, collective="ring", freeze="model.layers.3"),
    "sequence parallel": dict(GPT, stage=1, tp=2, sequence_parallel=True, recompute="selective", layers=2),
    "kept on the host": dict(
        LLAMA, stage=3, tp=2, recompute="full", partition_activations=True, cpu_checkpointing=True
    ),
    "pipeline": dict(GPT, layers=4, stage=1, pp=2, recompute="full:2", pipeline="interleaved"),
    "zero bubble": dict(GPT, layers=4, stage=0, pp=2, pipeline="zb-h1", accumulate=4),
    "two chunks": dict(LLAMA, layers=4, stage=1, pp=2, tp=2, pipeline="zb-v", accumulate=4, recompute="full"),
    "their leaf modules": dict(GPT, layers=4, stage=3, pp=2, pipeline="zb-h1", accumulate=4, gather="module"),
    "unlike blocks": dict(GPT, layers=4, stage=3, dropout=0.1, recompute="0=full+1-2=selective:mlp,dropout"),
    "unlike chunks": dict(LLAMA, layers=4, stage=1, pp=2, tp=2, recompute="0=selective:layernorm+2-3=full"),
    "curvature": dict(GPT, stage=1, optimizer="sophia"),
    "amax histories": dict(EIGHT, stage=1, fp8="delayed", tp=2, sequence_parallel=True, steps=2),
    "codes that stay": dict(EIGHT, stage=1, fp8="mxfp8", pp=2, pipeline="zb-h1", accumulate=4, recompute="full"),
    "weights as codes": dict(EIGHT, stage=3, fp8="tensorwise", fp8_param_gather=True),
    "weights as codes, and a copy": dict(EIGHT, stage=2, fp8="delayed", fp8_param_gather=True, optimizer="sophia"),
    "an allocator": dict(GPT, stage=3, allocator="caching", capacity=10**9, steps=2),
    "out of memory": dict(GPT, stage=1, capacity=250_000),
}


def left(fields: dict[str, Any], *, every_block: bool) -> Any:
    """The record of each rank that ran, or what ended it."""
    try:
        result = plan(plan_config(**fields), keep_events=True, every_block=every_block)
    except OutOfMemory as error:
        return str(error), error.live, error.by_unit
    return {rank: result.events[rank] for rank in result.ran}


@pytest.mark.quick(4)
@pytest.mark.parametrize("case", CASES)
def test_a_repeated_block_leaves_the_record_of_one_that_runs(case: str) -> None:
    assert left(CASES[case], every_block=False) == left(CASES[case], every_block=True)


@pytest.mark.parametrize("case", ["amax histories", "weights as codes, and a copy"])
def test_blocks_whose_maps_keep_something_are_rehearsed_twice(case: str) -> None:
    """A step's first pass brings it up to date, and later passes only read it."""
    found: Rehearsals = {}
    config = plan_config(**CASES[case])

    rows = np.zeros((1, config.model.columns), np.int64)
    inputs = Inputs(1, lambda ctx, model, step: [rows] * config.data.accumulate, lambda flat, group: None)
    world = replace(world_of(config), backend="meta", transport="threads", max_running=1)
    launch_alone(lambda ctx: train_rank(ctx, config, inputs, repeats=found), world, 0, ())
    asks = [sum(isinstance(step, Call) and step.do is Player.keep for step in one.forward) for one in found.values()]
    assert len(asks) == 2
    assert asks[0] > 0 == asks[1]


def test_without_gradients_or_with_another_function_a_block_runs() -> None:
    """A rehearsal is of a block's own function, and leaves a graph for backward: neither is asked for here."""
    config = plan_config(**CASES["ddp"])

    def record(repeats: Rehearsals | None) -> Any:
        def program(ctx: Context) -> Any:
            built = build_rank(ctx, config, build_updater(config, 1), repeats=repeats)
            place_rank(ctx, built.model, built.strategy, lambda flat, group: None)
            block = next(unit for unit in built.model.units if unit.name == "h.0")
            assert isinstance(block, Repeated) == (repeats is not None)
            x = Tensor(ctx.device.alloc((1, 16, 32), fp32, Kind.ACTIVATION))
            with ctx.device.no_grad():
                block.forward(x)
            block.forward(x, 0, lambda x: x * 2.0)
            return list(ctx.device.recorder.events)

        return launch(program, world_of(config, keep_events=True))

    assert record({}) == record(None)


@pytest.mark.quick(4)
@pytest.mark.parametrize("case", [case for case in CASES if case != "out of memory"])
def test_ledgers_that_fold_stretches_have_the_figures_and_tables_of_single_events(case: str) -> None:
    cluster = cluster_of(find_hardware("h100-80"))

    def figures(every_block: bool) -> Any:
        result = plan(plan_config(**CASES[case]), every_block=every_block, cluster=cluster)
        memory = [(one.marks, one.peak, one.moments, one.others) for one in result.memory]
        return repr((memory, result.traffic, result.saved, result.saved_again, result.time))

    assert figures(every_block=False) == figures(every_block=True)


def test_one_case_runs_out_of_memory_inside_a_block() -> None:
    refusal, *_ = left(CASES["out of memory"], every_block=False)
    assert "is out of memory in forward of h." in refusal


@pytest.mark.slow
def test_it_does_so_in_what_is_drawn_at_random() -> None:
    compared = 0
    for case in range(250):
        fields, rng = fields_of(case), random.Random(case)
        fields["recompute"] = rng.choice(["none", "none", "selective", "full", "full:2", "selective:layernorm,mlp_act"])
        fields["capacity"] = rng.choice([None, None, None, 20_000, 60_000, 200_000])
        try:
            expected = left(fields, every_block=True)
        except (InputError, RankFailed):  # most that is drawn is refused
            continue
        assert left(fields, every_block=False) == expected, (case, fields)
        compared += 1
    assert compared > 40
