"""ZeRO, gradients and their overlap on a Megatron command line."""

from __future__ import annotations

from zerosim.dialects.megatron.args import Arguments
from zerosim.dialects.megatron.eight_bits import eight_bits
from zerosim.dialects.megatron.layout import Layout

_STRATEGY = "--data-parallel-sharding-strategy"
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_DTYPES = ("--main-grads-dtype", "--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype")


def states_of(arguments: Arguments, layout: Layout) -> None:
    """Set the ZeRO stage and its recipe, how gradients are stored and sent, and where states lie."""
    stage = _stage(arguments, layout)
    _precision(arguments)
    _overlap(arguments, stage)
    _buckets(arguments)
    _replicas(arguments, layout, stage)
    _offload(arguments, stage)
    eight_bits(arguments, layout)


def _stage(arguments: Arguments, layout: Layout) -> int:
    stage = 0
    if arguments["--use-torch-fsdp2"]:
        return _torch(arguments, layout)
    arguments.usually("Megatron-LM", recipe="megatron")
    if arguments["--use-megatron-fsdp"]:
        stage = _STRATEGIES.index(arguments[_STRATEGY])
        arguments.sets("--use-megatron-fsdp", f"{_STRATEGY} {arguments[_STRATEGY]}", stage=stage)
        arguments.tell(_STRATEGY, "understood", f"stage {stage}")
        if arguments.values.get("--ckpt-format") != "fsdp_dtensor":
            why = "AssertionError: Megatron FSDP only supports fsdp_dtensor checkpoint format"
            arguments.refuse("--use-megatron-fsdp", why, "add --ckpt-format fsdp_dtensor")
        arguments.tell("--use-distributed-optimizer", "understood", "Megatron-FSDP divides states")
        return stage
    arguments.tell(_STRATEGY, "ignored", "without --use-megatron-fsdp it does nothing")
    for name in ("--outer-dp-sharding-strategy", "--fsdp-double-buffer", "--keep-fp8-transpose-cache",
                 "--suggested-communication-unit-size"):  # fmt: skip
        arguments.tell(name, "ignored", "without --use-megatron-fsdp it does nothing")
    if arguments.values.get("--ckpt-format") == "fsdp_dtensor":
        why = "AssertionError: --ckpt-format fsdp_dtensor is only tested with Megatron FSDP"
        arguments.refuse("--ckpt-format", why, "leave it out")
    stage = int(bool(arguments["--use-distributed-optimizer"]))
    arguments.sets("--use-distributed-optimizer", stage=stage)
    if stage and layout.dp == 1:
        arguments.notes.note("there is one data-parallel rank: the distributed optimizer has nothing to divide")
    return stage


def _torch(arguments: Arguments, layout: Layout) -> int:
    name, off = "--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward"
    for is_wrong, why in (
        (layout.pp > 1, "is not supported with pipeline parallelism"),
        (arguments["--expert-model-parallel-size"] > 1, "is not supported with expert parallelism"),
        (arguments["--use-distributed-optimizer"], "is not supported with MCore's distributed optimizer"),
        (not arguments["--no-gradient-accumulation-fusion"], "is not supported with gradient accumulation fusion"),
        (not arguments["--untie-embeddings-and-output-weights"], "requires --untie-embeddings-and-output-weights"),
        (arguments["--fp16"], "not supported with fp16 yet"),
    ):
        if is_wrong:
            arguments.refuse(name, f"AssertionError: {name} {why}", "--without use-torch-fsdp2 plans the rest")
    stage = 2 if arguments[off] else 3
    arguments.sets(name, stage=stage, recipe="fsdp2", loss="megatron")
    arguments.tell(off, "understood", "stage 2")
    arguments.tell("--no-gradient-accumulation-fusion", "understood", "FSDP2 adds no products to a buffer")
    return stage


def _precision(arguments: Arguments) -> None:
    half, brain = arguments["--fp16"], arguments["--bf16"]
    if half and brain:
        if arguments.has("--fp16") and arguments.has("--bf16"):
            arguments.refuse("--fp16, --bf16", "AssertionError without a text: one of them at most", "keep one")
        brain = not half
    precision = "fp16" if half else "bf16" if brain else "fp32"
    arguments.sets(f"--{precision}" if precision != "fp32" else "--bf16", precision=precision)
    if arguments.has("--grad-reduce-in-bf16"):
        if brain:
            arguments.sets("--grad-reduce-in-bf16", grad_dtype="bf16")
        else:
            arguments.tell("--grad-reduce-in-bf16", "ignored", "only --bf16 has it")
    if arguments.has("--accumulate-allreduce-grads-in-fp32"):
        if brain and arguments.has("--grad-reduce-in-bf16"):
            arguments.tell("--accumulate-allreduce-grads-in-fp32", "ignored", "--grad-reduce-in-bf16 wins")
        else:
            arguments.sets("--accumulate-allreduce-grads-in-fp32", grad_dtype="fp32")
    start, every = arguments["--initial-loss-scale"], arguments["--loss-scale-window"]
    if half and arguments["--loss-scale"] is None:
        power = start.hex().split("p")
        if start >= 1 and power[0] == "0x1.0000000000000":
            arguments.sets("--initial-loss-scale", initial_scale_power=min(126, int(power[1])))
        else:
            arguments.lacks("--initial-loss-scale", "a scale that is no power of 2", costs=False)
        arguments.sets("--loss-scale-window", loss_scale_window=max(1, int(every)))
    else:
        for name in ("--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis"):
            arguments.tell(name, "ignored", "no dynamic loss scale")


def _overlap(arguments: Arguments, stage: int) -> None:
    divides = arguments["--use-distributed-optimizer"] or arguments["--use-megatron-fsdp"]
    if arguments["--overlap-grad-reduce"]:
        arguments.sets("--overlap-grad-reduce", overlap_reduction=True)
    if not arguments["--overlap-param-gather"]:
        if arguments.has("--overlap-param-gather-with-optimizer-step"):
            why = "AssertionError: Must use --overlap-param-gather-with-optimizer-step with --overlap-param-gather"
            arguments.refuse("--overlap-param-gather-with-optimizer-step", why, "add --overlap-param-gather")
        return
    name = "--overlap-param-gather"
    if not divides:
        why = f"AssertionError: {name} only supported with distributed optimizer or megatron fsdp"
        arguments.refuse(name, why, "add --use-distributed-optimizer")
    elif not arguments["--overlap-grad-reduce"]:
        why = f"AssertionError: Must use {name} with --overlap-grad-reduce"
        arguments.refuse(name, why, "add --overlap-grad-reduce")
    elif stage in (1, 2):
        arguments.sets(name, overlap_param_gather=True)
    elif stage == 3:
        arguments.sets(name, prefetch=1)
    else:
        arguments.tell(name, "ignored", "nothing is divided")


def _buckets(arguments: Arguments) -> None:
    size, count = arguments["--ddp-bucket-size"], "--ddp-num-buckets"
    if not arguments["--overlap-grad-reduce"]:
        for name in ("--ddp-bucket-size", count):
            arguments.tell(name, "ignored", "without --overlap-grad-reduce there is one bucket")
        return
    arguments.lacks(count, "a number of buckets", advice="write --ddp-bucket-size, or pass --bucket-bytes")
    if size:
        wide = 4 if arguments.notes.values.get("grad_dtype", "fp16" if arguments["--fp16"] else "fp32") == "fp32" else 2
        arguments.sets("--ddp-bucket-size", bucket_bytes=size * wide)


def _replicas(arguments: Arguments, layout: Layout, stage: int) -> None:
    name, count = "--num-distributed-optimizer-instances", arguments["--num-distributed-optimizer-instances"]
    if count == 1 or stage == 0:
        arguments.tell(name, "ignored", "one instance" if count == 1 else "states are not divided")
    elif layout.dp is not None and layout.dp % count:
        arguments.refuse(name, f"AssertionError: {count} instances do not divide {layout.dp} data-parallel ranks")
    else:
        arguments.sets(name, dp_replicate=count)
    if arguments["--outer-dp-sharding-strategy"] == "no_shard":
        arguments.tell("--outer-dp-sharding-strategy", "understood", "replicas hold the same shards")


def _offload(arguments: Arguments, stage: int) -> None:
    name, aware = "--optimizer-cpu-offload", "--use-precision-aware-optimizer"
    if arguments[name]:
        if not arguments[aware]:
            why = f"AssertionError: The optimizer cpu offload must be used in conjunction with `{aware}`"
            arguments.refuse(name, why, f"add {aware}")
        elif stage == 0:
            arguments.lacks(name, "states in host memory that are not divided", costs=True,
                            advice="add --use-distributed-optimizer")  # fmt: skip
        else:
            arguments.sets(name, offload="optimizer=host")
        arguments.tell(aware, "understood", "the offload needs it")
        if arguments["--optimizer-offload-fraction"] == 1:
            arguments.tell("--optimizer-offload-fraction", "understood", "all states")
    else:
        for other in ("--optimizer-offload-fraction", "--overlap-cpu-optimizer-d2h-h2d"):
            arguments.tell(other, "ignored", f"without {name}")
    small = [one for one in _DTYPES if arguments[one] != "fp32"]
    if arguments[aware] and not small:
        arguments.tell(aware, "understood", "all its dtypes are fp32")
    for dtype in _DTYPES:
        if not arguments[aware]:
            arguments.tell(dtype, "ignored", f"without {aware}")
