"""Meshes, models and schedules at random: a run ends, leaves nothing, is what shapes say and learns what one rank does.

Seeded, and few; `python tests/parallel/test_mesh_fuzz.py 1000` runs as many as one likes, and a second number is the
first case (`1 417`: that one alone). A third word, `cp`: ranks of each mesh share rows.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import zerosim
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.train.plan import plan
from zerosim.train.run import run

SEED = 17
SECONDS = 240  # of one case, on a machine that has much else to do
MOST_RANKS = 16
LONG = 96  # ranks x layers x microbatches; a few are longer
CLOSE = 1e-11
MESH = {
    *(
        "tp",
        "pp",
        "dp_replicate",
        "pipeline",
        "virtual_stages",
        "micro_batch_group",
        "stage_layers",
        "balance_ends",
        "sequence_parallel",
    ),
    *("keep_gathered", "pad_vocab", "replica_reduction", "collective", "bucket_bytes", "recipe", "partition"),
    *("partition_activations", "gather", "prefetch_elements", "max_live", "cp", "context", "context_order"),
    "ranks_per_node",
}
"""What one rank alone has not."""


def drawn(rng: random.Random, *, shares_rows: bool) -> RunConfig:
    """A run that is none, one in some: then it is refused in one line, and the next one is drawn."""
    while True:
        fields = _fields(rng)
        if shares_rows:
            fields |= _context(rng, fields)
        work = fields["ranks"] * fields["accumulate"] * fields.get("layers", fields.get("units"))
        if fields["ranks"] > MOST_RANKS or (work > LONG and rng.random() < 0.9):
            continue
        try:
            return RunConfig(**fields)
        except InputError as error:
            if "\n" in str(error):
                raise
            REFUSED.update([str(error).split()[0]])


REFUSED: Counter[str] = Counter()


def _fields(rng: random.Random) -> dict[str, Any]:
    pp, tp, shards = rng.choice((1, 2, 2, 3, 4)), rng.choice((1, 1, 2, 3, 4)), rng.choice((1, 1, 2, 3))
    stage = rng.randrange(4)
    replicas = rng.choice((1, 1, 2)) if stage else 1
    fields: dict[str, Any] = dict(
        ranks=pp * tp * shards * replicas, pp=pp, tp=tp, dp_replicate=replicas, stage=stage, steps=2, micro_batch=1
    )
    fields |= dict(precision=rng.choice(("fp64", "fp64", "fp64", "fp32", "bf16", "fp16")), seed=rng.randrange(99))
    fields |= dict(accumulate=rng.choice((1, 2, 3, 4, 6)), partition=rng.choice(("slices", "slices", "owner")))
    fields |= dict(parallel=rng.choice((1, 1, 3)), collective=rng.choice(("direct", "direct", "ring")))
    if rng.random() < 0.3:
        fields |= rng.choice((dict(clip_norm=0.5), dict(bucket_bytes=512), dict(recipe=_recipe(rng))))
    if fields["precision"] == "fp64":
        fields |= dict(grad_dtype="fp64")  # some recipes have fp32 gradients
    if rng.random() < 0.5:
        fields |= dict(optimizer="sgd", lr=0.1, momentum=0.5)
    if stage == 3:
        fields |= rng.choice(({}, {}, dict(reshard_after_forward=False), dict(keep_last_unit=True)))
        fields |= rng.choice(({}, dict(gather="module"), dict(gather="module", prefetch_elements=300, max_live=700)))
    if replicas > 1:
        fields |= dict(replica_reduction=rng.choice(("step", "micro_batch")))
    if pp > 1:
        fields |= rng.choice(
            (
                {},
                dict(pipeline="gpipe"),
                dict(pipeline="interleaved", virtual_stages=rng.choice((2, 2, 3))),
                dict(pipeline="interleaved", virtual_stages=2, micro_batch_group=pp + 1, accumulate=2 * pp + 1),
                dict(pipeline="zb-h1", accumulate=pp + rng.choice((0, 1, 2, 5))),
                dict(pipeline="zb-v", accumulate=2 * pp + rng.choice((0, 1, 4))),
            )
        )
    chunks = pp * (2 if fields.get("pipeline") == "zb-v" else fields.get("virtual_stages", 1))
    layers = chunks * rng.choice((1, 1, 2) if chunks < 4 else (1,))
    if rng.random() < 0.4 and pp > 1:
        inner = (1, 1, 2) if chunks == pp else (0, 1, 1, 2)
        cut = [rng.choice(inner if 0 < chunk < chunks - 1 else (0, 1, 2)) for chunk in range(chunks)]
        fields["stage_layers"], layers = ",".join(map(str, cut)), max(1, sum(cut))
    model = rng.choice(("gpt", "gpt", "llama", "llama", "flat"))
    if model == "flat":
        return {**fields, "model": model, "params": rng.choice((840, 1001)), "units": layers, "vocab": 256, "seq": 4}
    hidden, heads = rng.choice(((8, 4), (12, 2), (16, 4), (24, 4))) if tp != 3 else rng.choice(((12, 3), (24, 6)))
    fields |= dict(model=model, layers=layers, hidden=hidden, heads=heads, seq=rng.choice((3, 4, 8)))
    fields |= dict(vocab=256 + 2 * (tp == 3), ffn=rng.choice((None, None, 5 * tp)))
    fields |= dict(tie_embeddings=rng.random() < 0.5, recompute=rng.choice(("none", "none", "selective", "full")))
    fields |= dict(attention=rng.choice(("eager", "eager", "flash")), saves=rng.choice(("lean", "megatron")))
    if model == "llama":
        fields |= dict(kv_heads=rng.choice((1, 2) if tp != 3 else (1, 3)))
    else:
        fields |= dict(dropout=rng.choice((0.0, 0.0, 0.1)))
    if tp > 1:
        fields |= rng.choice(({}, dict(sequence_parallel=True), dict(sequence_parallel=True, keep_gathered=True)))
        fields |= dict(pad_vocab=rng.random() < 0.2)
    if fields["recompute"] == "full":
        fields |= dict(cpu_checkpointing=rng.random() < 0.4, partition_activations=tp > 1 and rng.random() < 0.6)
    return fields


def _context(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    cp, how = rng.choice((2, 2, 3, 4, 4, 8)), rng.choice((None, "ring", "allgather", "ulysses", "ulysses+ring"))
    order = rng.choice((None, None, "zigzag", "contiguous"))
    found = dict(ranks=fields["ranks"] * cp, cp=cp, context=how, context_order=order, model=rng.choice(MODELS))
    found |= dict(seq=2 * cp * rng.choice((1, 1, 2, 3)) * rng.choice((1, fields["tp"])), micro_batch=rng.choice((1, 2)))
    if how != "ulysses":
        found |= dict(attention=rng.choice((None, "flash")))
    if how == "ulysses+ring" or rng.random() < 0.2:
        found |= dict(ranks_per_node=fields["tp"] * rng.choice((2, cp // 2 or 1, cp, 2 * cp)))
    return {name: value for name, value in found.items() if value is not None}


MODELS = ("gpt", "gpt", "llama", "llama", "bloom", "gemma2")


def _recipe(rng: random.Random) -> str:
    return rng.choice(("deepspeed", "fsdp2", "megatron"))


def check(config: RunConfig) -> None:
    real = run(config, keep_events=True)
    ranks = config.mesh.ranks
    assert real.live_bytes_after == [0] * ranks
    skipped = [step for step, report in enumerate(real.steps) if report.skipped]
    every, few = (plan(config, every_rank=each, skipped=skipped, keep_events=each) for each in (True, False))
    for rank in range(ranks):
        assert every.events[rank] == real.events[rank], f"events of rank {rank}"
        assert every.memory[rank] == real.memory[rank], f"memory of rank {rank}"
        # Of many microbatches few are run: in which of them the peak is, they do not say.
        assert few.memory[rank].to_dict() == real.memory[rank].to_dict(), f"memory of rank {rank}, by its class"
        for shapes in (every, few):
            assert shapes.traffic[rank] == real.traffic[rank], f"traffic of rank {rank}"
    if config.precision.param_dtype == "fp64":
        one = run(alone(config))
        pairs = [*zip(real.mean_losses, one.mean_losses, strict=True)]
        pairs += [(ours.grad_norm, theirs.grad_norm) for ours, theirs in zip(real.steps, one.steps, strict=True)]
        assert all(math.isclose(ours, theirs, rel_tol=CLOSE) for ours, theirs in pairs), pairs


def alone(config: RunConfig) -> RunConfig:
    """The same global batch on one rank, microbatch by microbatch."""
    fields = {name: value for name, value in config.to_dict().items() if name not in MESH}
    count = config.global_batch // config.data.micro_batch
    clip_norm = config.optim.clip_norm  # of a recipe, too
    return RunConfig.from_dict({**fields, "ranks": 1, "stage": 0, "accumulate": count, "clip_norm": clip_norm})


def run_cases(count: int, first: int = 0, *, shares_rows: bool = False) -> dict[str, int]:
    """How many cases had a pipeline, tensor parallelism, ...; what goes wrong is raised, its case named."""
    seen: Counter[str] = Counter()
    gc.disable()  # what is in a cycle is live at the end
    for case in range(first, first + count):
        gc.collect()
        config = drawn(random.Random(f"{SEED} {case}"), shares_rows=shares_rows)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            check(config)
        except BaseException:
            print(f"case {case}: {config!r}", file=sys.stderr)
            raise
        faulthandler.cancel_dump_traceback_later()
        axes = config.mesh.axes
        seen.update(axis for axis in ("pp", "tp", "cp", "dp_shard", "dp_replicate") if axes.size(axis) > 1)
        seen.update([config.model.family, config.precision.param_dtype, f"stage {config.parallel.zero_stage}"])
        if axes.pp > 1:
            seen.update([config.parallel.pipeline_schedule])
        if config.parallel.sequence_parallel:
            seen.update(["sequence_parallel"])
        if axes.cp > 1:
            seen.update([config.context.how, "zigzag" if config.context.is_zigzag else "contiguous"])
    return dict(sorted(seen.items()))


def seen_in(count: int, first: int, *words: str) -> set[str]:
    """What so many cases had, from the first one on."""
    environment = {**os.environ, "PYTHONPATH": str(Path(zerosim.__file__).parents[1])}
    command = [sys.executable, "-W", "error", __file__, str(count), str(first), *words]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    return set(json.loads(done.stdout))


@pytest.mark.slow
def test_random_meshes_leave_what_they_should() -> None:
    seen = seen_in(20, 0)
    assert seen >= {"pp", "tp", "dp_shard", "dp_replicate", "gpipe", "1f1b", "interleaved", "sequence_parallel"}
    assert seen >= {"zb-h1", "zb-v"}
    assert seen >= {"gpt", "llama", "flat", "fp64", "bf16", *(f"stage {stage}" for stage in range(4))}


@pytest.mark.slow
def test_so_do_meshes_whose_ranks_share_rows() -> None:
    """Cases 0 to 499 were checked once. These have all of what is asked for below."""
    seen = seen_in(16, 21, "cp")
    assert seen >= {"ring", "allgather", "ulysses", "ulysses+ring", "zigzag", "contiguous"}
    assert seen >= {"pp", "tp", "cp", "dp_shard", "dp_replicate", "sequence_parallel", *MODELS, "fp64", "bf16"}
    assert seen >= {f"stage {stage}" for stage in range(4)}


if __name__ == "__main__":
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began = time.monotonic()
    print(json.dumps(run_cases(count, first, shares_rows=sys.argv[3:] == ["cp"])))
    if count > 30:
        print(f"{time.monotonic() - began:.0f} s; refused before: {dict(REFUSED)}", file=sys.stderr)
