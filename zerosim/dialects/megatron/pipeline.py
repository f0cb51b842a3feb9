"""Pipeline stages of a Megatron command line, in each of the ways in which it divides layers."""

from __future__ import annotations

import re
from typing import Any

from zerosim.dialects.megatron.args import Arguments

_LAYOUT = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
           "--pipeline-model-parallel-layout")  # fmt: skip
_UNEVEN = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
_ENDS = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")


def stages_of(arguments: Arguments, pp: int) -> None:
    """Set how layers are divided among pipeline stages, and the schedule."""
    ways = [name for name in _LAYOUT if arguments.has(name)]
    if len(ways) > 1:
        arguments.refuse(", ".join(ways), "AssertionError: No more than one of them can be set", "keep one")
        return
    if pp == 1:
        for name in (*_UNEVEN, *_ENDS, "--microbatch-group-size-per-virtual-pipeline-stage"):
            arguments.tell(name, "ignored", "there is one pipeline stage")
    layers = arguments.flag("layers") or arguments["--num-layers"]
    chunks, cut = _cut(arguments, layers, pp) if layers else (1, None)
    if chunks is None:
        return
    waits = arguments.has("--no-overlap-p2p-communication")
    if chunks > 1 and pp < (3 if waits else 2):
        why = "and p2p communication overlap is disabled, pipeline-model-parallel size should be greater than 2"
        why = why if waits else "pipeline-model-parallel size should be greater than 1"
        arguments.refuse(ways[0], f"AssertionError: when interleaved schedule is used, {why}")
        return
    if waits and chunks == 1:
        arguments.tell("--no-overlap-p2p-communication", "ignored", "only the interleaved schedule overlaps")
    values: dict[str, Any] = {} if chunks == 1 else {"pipeline": "interleaved", "virtual_stages": chunks}
    if cut is not None and pp > 1:
        values["stage_layers"] = ",".join(map(str, cut))
    for name in ways:
        arguments.sets(name, **values) if values else arguments.tell(name, "ignored", "one chunk on each rank")
    if not ways:
        uneven = next((name for name in (*_UNEVEN, *_ENDS) if arguments.has(name)), "--pipeline-model-parallel-size")
        arguments.usually(uneven, **values)
    for name in (*_UNEVEN, *_ENDS) if pp > 1 else ():
        shown = f"stage_layers {values['stage_layers']}" if cut else "balance_ends True"
        arguments.tell(name, "understood", shown)
    group = "--microbatch-group-size-per-virtual-pipeline-stage"
    each, micro_batches = arguments[group] or pp, arguments.notes.values.get("accumulate")
    if chunks > 1 and micro_batches and 0 < micro_batches % each < pp:
        why = f"RuntimeError: the remainder of {micro_batches} microbatches / {each} should be 0 or at least {pp}"
        arguments.refuse(f"--global-batch-size, {group}", why, f"choose a multiple of {each} microbatches")
    if arguments.has(group) and chunks > 1:
        arguments.sets(group, micro_batch_group=arguments[group])
    elif pp > 1:
        arguments.tell(group, "ignored", "only the interleaved schedule has groups")


def _cut(arguments: Arguments, layers: int, pp: int) -> tuple[int | None, list[int] | None]:
    """Return the chunks of a rank, and the layers of each chunk in the model's order if they differ."""
    if arguments.has(_LAYOUT[2]):
        return _by_layout(arguments, layers, pp)
    first, last = (arguments[name] for name in _UNEVEN)
    ends = [int(bool(arguments[name])) for name in _ENDS]
    each, chunks = arguments[_LAYOUT[0]], arguments[_LAYOUT[1]] or 1
    if (first or last) and pp > 1:
        if each:
            arguments.refuse(_LAYOUT[0], f"AssertionError: with uneven pipeline stages use {_LAYOUT[1]}")
            return None, None
        inner, left = pp - bool(first) - bool(last), layers - (first or 0) - (last or 0)
        middle = left // inner if inner else 0
        stages = [*([first] if first else []), *[middle] * inner, *([last] if last else [])]
        if sum(stages) != layers or middle < 0 or any(one % chunks for one in stages):
            why = f"{layers} layers, {first or 'as many'} first and {last or 'as many'} last: the rest does not divide"
            arguments.refuse(next(name for name in _UNEVEN if arguments.has(name)), why)
            return None, None
        return chunks, [stages[stage] // chunks for _ in range(chunks) for stage in range(pp)]
    counted = layers + sum(ends)
    if counted % pp:
        why = f"AssertionError: Number of layers ({counted}) should be divisible by the pipeline-model-parallel size"
        arguments.refuse("--num-layers, --pipeline-model-parallel-size", why, f"choose a divisor of {counted}")
        return None, None
    if each:
        if counted // pp % each:
            why = f"AssertionError: number of layers per pipeline stage ({counted // pp}) must be divisible by it"
            arguments.refuse(_LAYOUT[0], why)
            return None, None
        chunks = counted // pp // each
    if counted // pp % chunks:
        why = f"AssertionError: {counted // pp} layers of a pipeline stage do not divide into {chunks} chunks"
        arguments.refuse(_LAYOUT[1], why)
        return None, None
    if pp == 1 or not any(ends):
        return chunks, None
    if all(ends):
        arguments.usually(_ENDS[0], balance_ends=True)
        return chunks, None
    cut = [counted // pp // chunks] * (pp * chunks)
    cut[0] -= ends[0]
    cut[-1] -= ends[1]
    return chunks, cut


def _by_layout(arguments: Arguments, layers: int, pp: int) -> tuple[int | None, list[int] | None]:
    """Return what a layout such as 'Et*3|(tt|)*3L' says."""
    text, name = arguments[_LAYOUT[2]].replace(",", ""), _LAYOUT[2]
    for pattern in (r"\(([^()]+)\)\*(\d{1,9})", r"(.)\*(\d{1,9})"):
        if sum(len(part) * int(times) for part, times in re.findall(pattern, text)) > 1_000_000:
            arguments.refuse(name, "a layout of more than a million layers", by="zerosim")
            return None, None
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    stages = text.split("|")
    if unknown := set(text) - set("EtLm|"):
        why = f"AssertionError: Invalid layer character: {sorted(unknown)[0]}"
        arguments.refuse(name, why, "they are E, t, m, L and |")
    elif (more := text.count("m")) != (arguments["--mtp-num-layers"] or 0):
        arguments.refuse(name, f"its {more} m are not --mtp-num-layers", "count them again")
    elif more and not text.endswith("t" + "m" * more + "L"):
        arguments.lacks(name, "blocks that predict further tokens on another stage than the last layer")
    elif len(stages) % pp:
        why = f"AssertionError: The length of pipeline_model_parallel_layout ({len(stages)}) must be divisible by {pp}"
        arguments.refuse(name, why)
    elif text.count("t") != layers:
        arguments.refuse(name, f"its {text.count('t')} t are not {layers} layers", "count them again")
    else:
        cut = [stage.count("t") for stage in stages]
        return len(stages) // pp, None if len(set(cut)) == 1 else cut
    return None, None
