"""torchtitan's microbatches, and the blocks of each pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from zerosim.dialects.torchtitan.mesh import AXES, BY, Setup
from zerosim.dialects.torchtitan.models import UNPIPED, divided
from zerosim.placement.stages import smallest_group

_LOCAL, _GLOBAL = "training.local_batch_size", "training.global_batch_size"
_MICRO = "parallelism.pipeline_parallel_microbatch_size"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_FQNS, _LAYERS = "parallelism.module_fqns_per_model_part", "parallelism.pipeline_parallel_layers_per_stage"
_FIRST = "parallelism.pipeline_parallel_first_stage_less_layers"
_LAST = "parallelism.pipeline_parallel_last_stage_less_layers"
SCHEDULES: Mapping[str, str] = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "zbvzerobubble": "zb-v",
}
"""PyTorch's names in small letters, and ours."""
_MULTI = ("interleaved1f1b", "zbvzerobubble", "interleavedzerobubble", "loopedbfs", "dualpipev")
"""Schedules with several chunks on a rank."""


def batch(setup: Setup) -> None:
    """Set microbatches: rows of a rank, and as many as the global batch needs."""
    notes, keys, given = setup.notes, setup.keys, setup.notes.context.given
    piped, local, whole = setup.degrees.pp > 1, keys[_LOCAL], keys[_GLOBAL]
    local = local if piped else given.get("micro_batch", local)
    micro, passes = local, 1
    if piped:
        micro = given.get("micro_batch", keys[_MICRO])
        if local % micro:
            why = f"ValueError: Batch size {local} must be divisible by microbatch_size {micro}"
            setup.refuse((_MICRO, _LOCAL, AXES["pp"]), why)
            return
        passes = local // micro
        setup.sets(_MICRO, micro_batch=micro)
        notes.tell(_LOCAL, "understood", f"{passes} microbatches of {micro}")
    else:
        notes.tell(_MICRO, "ignored", "without a pipeline")
        setup.sets(_LOCAL, micro_batch=local)
    replicate, shard = setup.degrees.replicate, setup.degrees.shard
    if whole < 0:
        accumulate, steps = passes, 1
    elif not shard:
        notes.tell(_GLOBAL, "understood", f"{whole} rows a step, over the ranks that --ranks says")
        return
    else:
        rows = local * replicate * shard
        if whole % rows:
            why = (
                "AssertionError: global batch size must be multiple of local batch size times data-parallel degree "
                f"({whole} % ({local} * {replicate * shard}) != 0)"
            )
            notes.refuse(_GLOBAL, BY, why, f"write a multiple of {rows}")
            return
        steps = whole // rows
        accumulate = passes * steps
    setup.sets(_GLOBAL, accumulate=accumulate)
    if piped and not setup.has(_GLOBAL):
        notes.sources["accumulate"] = _LOCAL
    if piped and steps > 1:
        notes.note(f"torchtitan empties the pipeline {steps} times a step; zerosim passes all microbatches in one go.")


def pipeline(setup: Setup) -> None:
    """Set the schedule and the blocks of each pipeline stage."""
    notes, keys, pp = setup.notes, setup.keys, setup.degrees.pp
    schedule, csv = keys[_SCHEDULE].lower(), "parallelism.pipeline_parallel_schedule_csv"
    if pp == 1:
        for key in (_SCHEDULE, csv, _FQNS, _LAYERS, _FIRST, _LAST):
            notes.tell(key, "ignored", "no pipeline")
        return
    if setup.family in UNPIPED:
        why = f"RuntimeError: Pipeline Parallel is enabled but {setup.family} does not support pipelining"
        notes.refuse(AXES["pp"], BY, why)
    if keys[csv]:
        notes.lacks(csv, "a schedule from a file")
    if schedule not in SCHEDULES:
        if schedule in _MULTI:
            notes.lacks(_SCHEDULE, f"schedule {keys[_SCHEDULE]}", costs=True, advice="write 1F1B or Interleaved1F1B")
        else:
            why = f"ValueError: Unknown schedule name {keys[_SCHEDULE]!r}"
            notes.refuse(_SCHEDULE, BY, why, "write 1F1B, GPipe, Interleaved1F1B or ZBVZeroBubble")
        return
    kind = SCHEDULES[schedule]
    setup.sets(_SCHEDULE, pipeline=kind)
    if kind == "interleaved" and (count := notes.values.get("accumulate")):
        rounds = max(1, count // pp)
        if count % rounds:
            why = f"ValueError: Interleaved 1F1B requires the number of microbatches ({count}) to be a multiple of the"
            notes.refuse(_SCHEDULE, "PyTorch", f"{why} number of rounds ({rounds})")
        elif count // rounds != smallest_group(pp, count):
            notes.usually("PyTorch's Interleaved1F1B", micro_batch_group=count // rounds)
    _chunks(setup, kind)


def _chunks(setup: Setup, kind: str) -> None:
    """Set the chunks of a rank and their blocks, as torchtitan divides them."""
    notes, keys, pp, layers = setup.notes, setup.keys, setup.degrees.pp, setup.layers
    first, last, each, parts = keys[_FIRST], keys[_LAST], keys[_LAYERS], keys[_FQNS]
    chunks = pp * (2 if kind in ("interleaved", "zb-v") else 1)
    if each is not None and layers:
        chunks = ceil((layers + first + last) / each)
        text = f"Number of virtual stages ({chunks}) must be divisible by pipeline parallel size ({pp})"
        if chunks % pp:
            notes.refuse(_LAYERS, BY, f"ValueError: {text}")
            return
        if (chunks > pp) != (kind in ("interleaved", "zb-v")):
            few = "exactly 1 stage" if chunks > pp else "at least 2 stages"
            notes.refuse(
                _LAYERS, BY, f"ValueError: schedule {keys[_SCHEDULE]} requires {few} per rank, not {chunks // pp}"
            )
            return
        notes.tell(_LAYERS, "understood", f"{chunks // pp} chunks a rank")
    counts = list[int]()
    source = next((key for key in (_FQNS, _LAYERS, _FIRST, _LAST) if setup.has(key)), "")
    source = source or "torchtitan's default: one block less in the first and the last chunk"
    if parts is not None:
        counts, chunks = _counted(parts), len(parts)
        if chunks % pp:
            notes.refuse(_FQNS, BY, f"AssertionError: num_stages {chunks} must be evenly divisible by pp_degree {pp}")
            return
        if sum(counts) != layers:
            notes.lacks(_FQNS, "parts whose blocks are not in order, or not all of them", costs=True)
            return
    elif layers:
        try:
            counts = divided(chunks, layers, first, last)
        except ValueError as error:
            setup.refuse((source, AXES["pp"]) if setup.has(source) else (AXES["pp"],), f"ValueError: {error}")
            return
    if kind == "interleaved":
        notes.usually(_SCHEDULE, virtual_stages=chunks // pp)
    if counts and len(set(counts)) > 1:
        notes.usually(source, stage_layers=",".join(map(str, counts)))
    text = (
        f"blocks of each chunk: {', '.join(map(str, counts))}" if counts else "--model says how many blocks there are"
    )
    for key in (_FQNS, _LAYERS, _FIRST, _LAST):
        notes.tell(key, "understood", text)


def _counted(parts: list[list[str]]) -> list[int]:
    """Return the blocks of each part; nothing if they, the table or the head are not in the model's order."""
    numbers = [[name.removeprefix("layers.") for name in part if name.startswith("layers.")] for part in parts]
    flat = [number for part in numbers for number in part]
    if (
        flat != [str(index) for index in range(len(flat))]
        or "tok_embeddings" not in parts[0]
        or "output" not in parts[-1]
    ):
        return []
    return [len(part) for part in numbers]
