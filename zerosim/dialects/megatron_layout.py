"""Ranks, the batch, pipeline stages and ZeRO of a Megatron command line, with the assertions of its parser."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from zerosim.dialects.megatron_args import Arguments
from zerosim.dialects.shell_words import Open

WORLD = "--tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size"
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_CONTEXTS = {"p2p": "ring", "a2a": "ulysses", "allgather": "allgather", "a2a+p2p": "ulysses+ring"}
_LAYOUT = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
           "--pipeline-model-parallel-layout")  # fmt: skip
_UNEVEN = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
_ENDS = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")


class Layout(NamedTuple):
    """The mesh: `ranks` and `dp` are None where nobody says them."""

    ranks: int | None
    tp: int
    pp: int
    cp: int
    dp: int | None


def layout_of(arguments: Arguments) -> Layout:
    """Set the ranks and the axes of the mesh."""
    ranks = _ranks(arguments)
    tp, pp, cp = (
        max(1, arguments.flag(option) or arguments[f"--{name}-parallel-size"])
        for option, name in (("tp", "tensor-model"), ("pp", "pipeline-model"), ("cp", "context"))
    )
    total = tp * pp * cp
    if ranks is not None and ranks % total:
        why = f"AssertionError: world size ({ranks}) is not divisible by total_model_size ({total})"
        arguments.refuse(WORLD, why, f"pass --ranks {total}, or another multiple of it")
        ranks = None
    if tp > 1 and arguments.has("--sequence-parallel"):
        arguments.sets("--sequence-parallel", sequence_parallel=True)
    elif arguments.has("--sequence-parallel"):
        arguments.tell("--sequence-parallel", "ignored", "disabled with a warning, because tensor parallelism is 1")
    if arguments.has("--tp-comm-overlap"):
        if tp > 1 and arguments.has("--sequence-parallel"):
            arguments.sets("--tp-comm-overlap", tp_comm_overlap=True)
        else:
            why = "AssertionError: it can happen only when sequence parallelism is enabled"
            arguments.refuse("--tp-comm-overlap", why, "add --sequence-parallel, with tensor parallelism")
    _contexts(arguments, tp, cp)
    _experts(arguments)
    _connections(arguments, tp, cp)
    dp = None if ranks is None else ranks // total
    _batch(arguments, dp)
    _stages_of_pipeline(arguments, pp)
    return Layout(ranks, tp, pp, cp, dp)


def _number(arguments: Arguments, *names: str) -> int | None:
    text = next((arguments.environment[name] for name in names if name in arguments.environment), "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 8 and not isinstance(text, Open) else None


def _ranks(arguments: Arguments) -> int | None:
    each = _number(arguments, "--nproc_per_node", "NPROC_PER_NODE") or _number(arguments, "GPUS_PER_NODE")
    nodes = _number(arguments, "--nnodes", "NNODES", "NUM_NODES")
    whole = each * (nodes or 1) if each else _number(arguments, "WORLD_SIZE")
    given = arguments.flag("ranks")
    if whole and given and whole != given:
        arguments.notes.note(f"the script starts {whole} ranks, --ranks says {given}")
    if whole:
        source = f"{each} ranks on {nodes or 1} nodes" if each else "WORLD_SIZE"
        arguments.usually(source, ranks=whole)
    ranks: int | None = given or whole
    if each and ranks and ranks > each and ranks % each == 0:
        arguments.usually("ranks of a node", ranks_per_node=each)
    return ranks


def _connections(arguments: Arguments, tp: int, cp: int) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = arguments.environment.get(name)
    shards = next((one for one in ("--use-megatron-fsdp", "--use-torch-fsdp2") if arguments.has(one)), "")
    if value == "1" and shards:
        why = f"AssertionError: FSDP always requires {name} value large than one"
        arguments.refuse(shards, why, f"leave {name}=1 out")
    elif value not in (None, "1") and not isinstance(value, Open) and not shards and tp * cp > 1:
        why = f"AssertionError: {name} is {value}, and tp or cp needs 1 (GPUs up to Hopper)"
        arguments.refuse(WORLD, why, f"export {name}=1")


def _contexts(arguments: Arguments, tp: int, cp: int) -> None:
    kinds = arguments["--cp-comm-type"]
    if cp == 1:
        for name in ("--cp-comm-type", "--hierarchical-context-parallel-sizes"):
            arguments.tell(name, "ignored", "context parallelism is 1")
        return
    if (seq := arguments.flag("seq") or arguments["--seq-length"]) and seq % (2 * cp):
        arguments.refuse("--seq-length", "AssertionError: seq-length should be a multiple of 2 * context-parallel-size",
                         f"choose a multiple of {2 * cp}")  # fmt: skip
    if len(set(kinds)) > 1 or kinds[0] not in _CONTEXTS:
        arguments.lacks("--cp-comm-type", f"{' '.join(kinds)}: another exchange in each layer")
        return
    arguments.sets("--cp-comm-type", context=_CONTEXTS[kinds[0]])
    levels = arguments["--hierarchical-context-parallel-sizes"]
    if kinds[0] == "a2a+p2p":
        if not levels:
            why = "AssertionError: --hierarchical-context-parallel-sizes must be set when a2a+p2p is used"
            arguments.refuse("--cp-comm-type", why, "add it, the ranks of a node first")
        elif len(levels) != 2 or levels[0] * levels[1] != cp:
            arguments.refuse("--hierarchical-context-parallel-sizes", f"AssertionError: its product must be {cp}")
        else:
            arguments.sets("--hierarchical-context-parallel-sizes", ranks_per_node=levels[0] * tp)


def _experts(arguments: Arguments) -> None:
    ep, experts = arguments["--expert-model-parallel-size"], arguments["--num-experts"] or 0
    if arguments.has("--expert-model-parallel-size") and ep == 1:
        arguments.tell("--expert-model-parallel-size", "ignored", "1 is the default")
    elif ep > 1 and not experts:
        why = "AssertionError: num_experts must be non None to use expert model parallelism"
        arguments.refuse("--expert-model-parallel-size", why, "add --num-experts")
    elif ep > 1 and experts % ep:
        why = f"AssertionError: Number of experts ({experts}) should be a multiple of expert model parallel_size"
        arguments.refuse("--expert-model-parallel-size", why)
    elif ep > 1 and arguments["--fp16"]:
        arguments.refuse("--expert-model-parallel-size, --fp16", "AssertionError: not supported with fp16 training",
                         "choose --bf16")  # fmt: skip
    elif ep > 1:
        arguments.sets("--expert-model-parallel-size", ep=ep)
    if experts and arguments.has("--expert-tensor-parallel-size"):
        arguments.sets("--expert-tensor-parallel-size", etp=arguments["--expert-tensor-parallel-size"])
    else:
        arguments.tell("--expert-tensor-parallel-size", "ignored", "there are no experts")


def _batch(arguments: Arguments, dp: int | None) -> None:
    micro = arguments.flag("micro_batch") or arguments["--micro-batch-size"]
    rows, grows = arguments["--global-batch-size"], "--step-batch-size-schedule"
    if micro is None or micro < 1:
        if "--micro-batch-size" not in arguments.notes.document.keys or micro is not None:
            arguments.refuse("--micro-batch-size", "AssertionError without a text: it is required", "pass --micro-batch")
        return
    if arguments.has(grows):
        if arguments.has("--global-batch-size"):
            why = "ValueError: cannot specify both"
            arguments.refuse(f"--global-batch-size, {grows}", why, f"--without {grows.lstrip('-')} plans the last batch")
        else:
            arguments.lacks(grows, "a batch that grows", advice="write --global-batch-size: one plan for the first, "
                            "one for the last")  # fmt: skip
    if arguments.has("--rampup-batch-size"):
        if arguments.has("--train-iters"):
            why = "AssertionError: expected no batch-size rampup for iteration-based training"
            arguments.refuse("--rampup-batch-size, --train-iters", why, "--without rampup-batch-size plans the last batch")
        else:
            arguments.lacks("--rampup-batch-size", "a batch that grows")
    if dp is None:
        arguments.tell("--global-batch-size", "understood", f"{rows} rows; microbatches follow with --ranks")
        return
    rows = rows or micro * dp
    if rows % (micro * dp):
        why = f"AssertionError: eval_global_batch_size ({rows}) is not divisible by micro batch size ({micro}) times data"
        arguments.refuse("--global-batch-size", f"{why} parallel size ({dp})", f"choose a multiple of {micro * dp}")
        return
    arguments.sets("--global-batch-size", f"{rows} / ({micro} x {dp})", accumulate=rows // (micro * dp))


def _stages_of_pipeline(arguments: Arguments, pp: int) -> None:
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
            why = f"{layers} layers do not divide into stages with {first or 'as many'} first and {last or 'as many'} last"
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
    for pattern in (r"\(([^()]+)\)\*(\d{1,5})", r"(.)\*(\d{1,5})"):
        if sum(len(part) * int(times) for part, times in re.findall(pattern, text)) > 1_000_000:
            arguments.refuse(name, "a layout of more than a million layers", by="zerosim")
            return None, None
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    stages = text.split("|")
    if unknown := set(text) - set("EtLm|"):
        arguments.refuse(name, f"AssertionError: Invalid layer character: {sorted(unknown)[0]}", "they are E, t, m, L, |")
    elif "m" in text:
        arguments.lacks(name, "stages with blocks that predict further tokens")
    elif len(stages) % pp:
        why = f"AssertionError: The length of pipeline_model_parallel_layout ({len(stages)}) must be divisible by {pp}"
        arguments.refuse(name, why)
    elif text.count("t") != layers:
        arguments.refuse(name, f"its {text.count('t')} t are not {layers} layers", "count them again")
    else:
        cut = [stage.count("t") for stage in stages]
        return len(stages) // pp, None if len(set(cut)) == 1 else cut
    return None, None
