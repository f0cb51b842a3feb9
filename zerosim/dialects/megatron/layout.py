"""Ranks, the batch, pipeline stages and ZeRO of a Megatron command line, with the assertions of its parser."""

from __future__ import annotations

from typing import NamedTuple

from zerosim.dialects.megatron.args import Arguments
from zerosim.dialects.megatron.pipeline import stages_of
from zerosim.dialects.shell.words import Open

WORLD = "--tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size"
_CONTEXTS = {"p2p": "ring", "a2a": "ulysses", "allgather": "allgather", "a2a+p2p": "ulysses+ring"}


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
    stages_of(arguments, pp)
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
            why = "AssertionError without a text: it is required"
            arguments.refuse("--micro-batch-size", why, "pass --micro-batch")
        return
    if arguments.has(grows):
        if arguments.has("--global-batch-size"):
            why, advice = "ValueError: cannot specify both", f"--without {grows.lstrip('-')} plans the last batch"
            arguments.refuse(f"--global-batch-size, {grows}", why, advice)
        else:
            arguments.lacks(grows, "a batch that grows", advice="write --global-batch-size: one plan for the first, "
                            "one for the last")  # fmt: skip
    if arguments.has("--rampup-batch-size"):
        if arguments.has("--train-iters"):
            why = "AssertionError: expected no batch-size rampup for iteration-based training"
            advice = "--without rampup-batch-size plans the last batch"
            arguments.refuse("--rampup-batch-size, --train-iters", why, advice)
        else:
            arguments.lacks("--rampup-batch-size", "a batch that grows")
    if dp is None:
        arguments.tell("--global-batch-size", "understood", f"{rows} rows; microbatches follow with --ranks")
        return
    rows = rows or micro * dp
    if rows % (micro * dp):
        why = f"AssertionError: eval_global_batch_size ({rows}) is not divisible by micro batch size ({micro})"
        why += f" times data parallel size ({dp})"
        arguments.refuse("--global-batch-size", why, f"choose a multiple of {micro * dp}")
        return
    arguments.sets("--global-batch-size", f"{rows} / ({micro} x {dp})", accumulate=rows // (micro * dp))
