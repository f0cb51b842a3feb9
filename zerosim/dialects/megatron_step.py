"""Activations, kernels, the optimizer and experts' routing on a Megatron command line."""

from __future__ import annotations

import math
from typing import Any

from zerosim.dialects.megatron_args import Arguments
from zerosim.dialects.megatron_keys import PARTS
from zerosim.dialects.megatron_layout import Layout
from zerosim.dialects.shell_words import Open

_PARTS = {theirs: ours for ours, theirs in PARTS.items()}
_KNOWN_PARTS = (*_PARTS, "moe", "shared_experts")
_FUSIONS = ("--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion",
            "--no-persist-layer-norm")  # fmt: skip
_MOE = ("--moe-router-topk", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size", "--moe-layer-freq",
        "--moe-token-dispatcher-type", "--moe-enable-deepep", "--moe-flex-dispatcher-backend",
        "--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "--moe-z-loss-coeff",
        "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "--moe-router-dtype",
        "--moe-expert-capacity-factor", "--moe-pad-expert-input-to-capacity", "--moe-token-drop-policy",
        "--moe-grouped-gemm", "--moe-layer-recompute", "--moe-extended-tp", "--moe-use-legacy-grouped-gemm",
        "--moe-apply-probs-on-input", "--moe-router-num-groups", "--moe-router-group-topk",
        "--overlap-moe-expert-parallel-comm", "--moe-shared-expert-overlap")  # fmt: skip


def step_of(arguments: Arguments, layout: Layout) -> None:
    """Set everything else of a step."""
    _recompute(arguments, layout)
    _attention(arguments)
    _kernels(arguments)
    _experts(arguments)
    _optimizer(arguments)
    _rates(arguments)


def _recompute(arguments: Arguments, layout: Layout) -> None:
    name, method, count = "--recompute-granularity", arguments["--recompute-method"], arguments["--recompute-num-layers"]
    kind, modules = arguments[name], arguments["--recompute-modules"]
    old = arguments.values.get("--activations-checkpoint-method")
    if old is not None or arguments.has("--checkpoint-activations"):
        arguments.usually("what the removed arguments meant", recompute="full")
        return
    if arguments["--recompute-activations"]:
        kind = "selective"
        arguments.tell("--recompute-activations", "understood", "--recompute-granularity selective")
    details = ("--recompute-method", "--recompute-num-layers")
    if kind == "full":
        shares = "--distribute-saved-activations"
        if method is None or count is None:
            what = 'recompute_method must be "block" or "uniform"' if method is None else (
                "recompute_num_layers must be between 1 and num_layers_per_pipeline_rank"
            )
            why = f"ValueError of TransformerConfig: Using recompute_granularity: full so {what}"
            arguments.refuse(name, why, "add --recompute-method uniform --recompute-num-layers 1")
        elif count == 1 and method == "uniform" or method == "block" and _is_all(arguments, layout, count):
            arguments.sets(name, f"{method} {count}", recompute="full")
        else:
            what = f"groups of {count} layers" if method == "uniform" else f"{count} layers of each pipeline stage"
            arguments.lacks("--recompute-num-layers", f"recompute in {what}", costs=True,
                            advice="write --recompute-method uniform --recompute-num-layers 1")  # fmt: skip
            arguments.usually(name, recompute="full")
        for one in details:
            arguments.tell(one, "understood", f"{method} {count}")
        arguments.tell("--recompute-modules", "ignored", "whole blocks are recomputed")
        if arguments[shares]:
            if layout.tp == 1:
                arguments.refuse(shares, "AssertionError: it can only be across tensor model parallel groups")
            elif arguments["--sequence-parallel"]:
                arguments.refuse(shares, "ValueError: must be false when sequence parallel is enabled")
            else:
                arguments.sets(shares, partition_activations=True)
        return
    if arguments["--distribute-saved-activations"]:
        why = "AssertionError: only application to full recompute granularity"
        arguments.refuse("--distribute-saved-activations", why, "add --recompute-granularity full")
    if kind == "selective":
        if method is not None:
            why = "AssertionError: recompute method is not yet supported for selective recomputing granularity"
            arguments.refuse("--recompute-method", why, "--without recompute-method plans the rest")
        if count is not None:
            why = "ValueError of TransformerConfig: with selective recompute_num_layers must be None"
            arguments.refuse("--recompute-num-layers", why, "--without recompute-num-layers plans the rest")
        _parts(arguments, modules, name if arguments.has(name) else "--recompute-activations")
        return
    for one in (*details, "--recompute-modules"):
        arguments.tell(one, "ignored", "without --recompute-granularity nothing is recomputed")


def _is_all(arguments: Arguments, layout: Layout, count: int) -> bool:
    """Return whether so many layers are all of a chunk."""
    layers = arguments.flag("layers") or arguments["--num-layers"]
    chunks = arguments.notes.values.get("virtual_stages") or 1
    return layers is not None and count * layout.pp * chunks >= layers


def _parts(arguments: Arguments, modules: list[str], name: str) -> None:
    unknown = [one for one in modules if one not in _KNOWN_PARTS]
    if unknown:
        arguments.refuse("--recompute-modules", f"ValueError: {unknown[0]!r} is none of {', '.join(_KNOWN_PARTS)}")
        return
    grouped = arguments["--num-experts"] and arguments["--moe-grouped-gemm"]
    if "moe_act" in modules and not grouped:
        why = "ValueError of TransformerConfig: moe_act is only supported with moe_grouped_gemm"
        arguments.refuse("--recompute-modules", why, "leave moe_act out")
        return
    if "mla_up_proj" in modules and not arguments["--multi-latent-attention"] and arguments.flag("model") is None:
        why = "ValueError of TransformerConfig: mla_up_proj is only supported with multi_latent_attention"
        arguments.refuse("--recompute-modules", why, "leave mla_up_proj out")
        return
    if lost := [one for one in modules if one not in _PARTS]:
        arguments.lacks("--recompute-modules", f"recompute of {' and '.join(lost)}")
    parts = [_PARTS[one] for one in modules if one in _PARTS]
    value = "selective" if parts == ["core_attn"] else f"selective:{','.join(dict.fromkeys(parts))}"
    arguments.sets(name, recompute=value if parts else "none")
    arguments.tell("--recompute-modules", "understood", f"recompute {value}")


def _attention(arguments: Arguments) -> None:
    backend, impl = arguments["--attention-backend"], arguments["--transformer-impl"]
    if impl == "inference_optimized":
        arguments.lacks("--transformer-impl", "blocks for inference")
    local = impl == "local"
    if arguments.has("--transformer-impl") and impl != "inference_optimized":
        arguments.sets("--transformer-impl", transformer_engine=not local)
    if backend == "local" and arguments.values.get("--spec") != ["local"]:
        why = "AssertionError: --attention-backend local is only supported with --spec local"
        arguments.refuse("--attention-backend", why, "write unfused, or --transformer-impl local")
    is_half = arguments["--fp16"] or arguments["--bf16"]
    wide = arguments.has("--attention-softmax-in-fp32", "--apply-query-key-layer-scaling")
    keeps = wide and arguments.has("--no-masked-softmax-fusion")
    flash = backend in ("flash", "fused") or (backend == "auto" and bool(is_half) and not local)
    flash = (local and arguments.has("--use-flash-attn")) or (flash and not local)
    if flash:
        kernel = {"flash_kernel": "fa2"} if backend == "flash" or local else {}
        kernel = {"flash_kernel": "cudnn"} if backend == "fused" else kernel
        name = "--use-flash-attn" if local else "--attention-backend"
        arguments.sets(name, "cuDNN's fused attention, or flash" * (backend == "auto"), attention="flash", **kernel)
    else:
        arguments.sets("--attention-backend", attention="eager", fp32_softmax=keeps)
    softmax = "flash attention saves no softmax" if flash else f"fp32_softmax {keeps}"
    for name in ("--attention-softmax-in-fp32", "--apply-query-key-layer-scaling", "--no-masked-softmax-fusion"):
        arguments.tell(name, "ignored" if flash else "understood", softmax)
    arguments.tell("--use-flash-attn", "ignored", "Transformer Engine's blocks read --attention-backend")


def _kernels(arguments: Arguments) -> None:
    off = "--no-gradient-accumulation-fusion"
    if arguments[off] and not arguments["--use-torch-fsdp2"] and arguments.notes.values.get("stage") in (0, 1):
        arguments.sets(off, gradient_accumulation_fusion=False)
    elif not arguments["--use-torch-fsdp2"]:
        arguments.tell(off, "ignored", "stages 2 and 3 have none")
    without = {
        "--no-bias-gelu-fusion": arguments["--swiglu"] or arguments["--disable-bias-linear"],
        "--no-bias-swiglu-fusion": not arguments["--swiglu"],
        "--no-rope-fusion": arguments["--position-embedding-type"] != "rope",
    }
    for name in _FUSIONS:
        if without.get(name):
            arguments.tell(name, "ignored", "its blocks have no such kernel")
        else:
            arguments.lacks(name, "kernels that are not fused")
    if arguments["--cross-entropy-loss-fusion"]:
        arguments.sets("--cross-entropy-loss-fusion", loss="megatron-fused")
        arguments.tell("--cross-entropy-fusion-impl", "understood", "loss megatron-fused")
    else:
        arguments.tell("--cross-entropy-fusion-impl", "ignored", "without --cross-entropy-loss-fusion")
    _graphs(arguments)
    conf = arguments.environment.get("PYTORCH_CUDA_ALLOC_CONF") or arguments.environment.get("PYTORCH_ALLOC_CONF")
    if conf and not isinstance(conf, Open):
        arguments.usually("PYTORCH_CUDA_ALLOC_CONF", allocator="caching", allocator_conf=conf)


def _graphs(arguments: Arguments) -> None:
    old = [name for name in ("--enable-cuda-graph", "--external-cuda-graph") if arguments.has(name)]
    impl, name = arguments["--cuda-graph-impl"], old[0] if old else "--cuda-graph-impl"
    if old and (impl != "none" or len(old) > 1):
        arguments.refuse(", ".join([*old, "--cuda-graph-impl"]), "AssertionError: one of them at most", "keep one")
    if impl == "none" and not old:
        for one in ("--cuda-graph-impl", "--cuda-graph-modules", "--cuda-graph-scope"):
            arguments.tell(one, "ignored", "no CUDA graphs")
        return
    if arguments["--recompute-granularity"] == "full":
        why = "AssertionError: recompute_granularity must not be full when CUDA Graphs are enabled"
        arguments.refuse(name, why, f"--without {name.lstrip('-')} plans the rest")
    if "expandable_segments:True" in arguments.environment.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        why = "AssertionError: expandable_segments:True may not be safe when using CUDA Graphs"
        arguments.refuse(name, why, "leave expandable_segments out")
    arguments.sets(name, cuda_graphs=True)
    for one in ("--cuda-graph-modules", "--cuda-graph-scope"):
        arguments.tell(one, "understood", "cuda_graphs True: each block's forward and backward")


def _experts(arguments: Arguments) -> None:
    if not arguments["--num-experts"]:
        for name in _MOE:
            arguments.tell(name, "ignored", "there are no experts")
        return
    kind, sends = "--moe-token-dispatcher-type", arguments["--moe-token-dispatcher-type"]
    spread = "deepep" if sends == "flex" else sends
    if arguments["--expert-model-parallel-size"] > 1:
        arguments.sets(kind, dispatcher=spread)
    else:
        arguments.tell(kind, "ignored", "all experts are on every rank")
    backend = arguments["--moe-flex-dispatcher-backend"]
    for name in ("--moe-enable-deepep", "--moe-flex-dispatcher-backend"):
        arguments.tell(name, "understood" if sends == "flex" else "ignored", f"dispatcher {spread}")
    if sends == "flex" and backend != "deepep":
        arguments.lacks("--moe-flex-dispatcher-backend", f"{backend}'s exchange")
    _balance(arguments)
    if arguments["--moe-router-dtype"] == "fp32":
        arguments.sets("--moe-router-dtype", router_dtype="fp32")
    elif arguments["--moe-router-dtype"] is None:
        arguments.usually("Megatron without --moe-router-dtype", router_dtype="model")
    else:
        arguments.lacks("--moe-router-dtype", "a router in fp64")
    factor = arguments["--moe-expert-capacity-factor"]
    spreads = arguments["--expert-model-parallel-size"] > 1
    if factor is not None and factor > 0 and sends == "allgather" and spreads:
        what = f"a capacity beside {kind} allgather, the default"
        arguments.lacks("--moe-expert-capacity-factor", what, advice=f"write {kind} alltoall")
    elif factor is not None and factor > 0:
        policy = "weight" if arguments["--moe-token-drop-policy"] == "probs" else "position"
        arguments.sets("--moe-expert-capacity-factor", capacity_factor=factor, token_drop=policy)
        arguments.tell("--moe-token-drop-policy", "understood", f"token_drop {policy}")
        if arguments["--moe-pad-expert-input-to-capacity"]:
            arguments.sets("--moe-pad-expert-input-to-capacity", pad_to_capacity=True)
    for name in ("--moe-pad-expert-input-to-capacity", "--moe-token-drop-policy", "--moe-expert-capacity-factor"):
        if factor is None or factor <= 0:
            arguments.tell(name, "ignored", "no token is dropped")
    arguments.tell("--moe-grouped-gemm", "understood", "experts_kernel grouped")
    if not arguments.has("--moe-grouped-gemm"):
        arguments.notes.note("without --moe-grouped-gemm Megatron runs one expert after the other; here all are grouped")
    elif not arguments["--bf16"]:
        why = "AssertionError: Currently GroupedGEMM for MoE only supports bf16 dtype"
        arguments.refuse("--moe-grouped-gemm", why, "add --bf16")


def _balance(arguments: Arguments) -> None:
    kinds, factors = arguments["--moe-router-load-balancing-type"], arguments["--moe-aux-loss-coeff"]
    name = "--moe-router-load-balancing-type"
    known = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
    if unknown := [kind for kind in kinds if kind not in known]:
        arguments.refuse(name, f"argparse exits 2: invalid choice: {unknown[0]!r}", f"they are {', '.join(known)}")
    elif len(kinds) > 1 or kinds[0] in ("sinkhorn", "global_aux_loss"):
        arguments.lacks(name, f"{' and '.join(kinds)}: another balance", costs=False)
        arguments.tell("--moe-aux-loss-coeff", "lacking", "of another balance")
    elif kinds[0] == "none" or not factors[0]:
        for one in (name, "--moe-aux-loss-coeff"):
            arguments.tell(one, "ignored", "no loss balances the experts")
    else:
        arguments.sets("--moe-aux-loss-coeff", aux_loss=factors[0])
        if kinds[0] == "seq_aux_loss":
            arguments.sets(name, aux_loss_over="sequence")
        arguments.tell(name, "understood", kinds[0])
    if arguments["--moe-z-loss-coeff"]:
        arguments.sets("--moe-z-loss-coeff", z_loss=arguments["--moe-z-loss-coeff"])
    if arguments["--moe-router-enable-expert-bias"]:
        arguments.sets("--moe-router-enable-expert-bias", bias_rate=arguments["--moe-router-bias-update-rate"])
        arguments.tell("--moe-router-bias-update-rate", "understood", "the biases' step")
    else:
        arguments.tell("--moe-router-bias-update-rate", "ignored", "without --moe-router-enable-expert-bias")


def _optimizer(arguments: Arguments) -> None:
    kind = arguments["--optimizer"]
    values: dict[str, Any] = {
        "adam": {"optimizer": "adamw"},
        "sgd": {"optimizer": "sgd", "momentum": arguments["--sgd-momentum"]},
        "muon": {"optimizer": "muon", "momentum": arguments["--muon-momentum"]},
        "dist_muon": {"optimizer": "muon", "momentum": arguments["--muon-momentum"]},
        "lion": {"optimizer": "lion"},
    }.get(kind, {})
    if kind in ("muon", "dist_muon"):
        if kind == "muon" and arguments["--use-distributed-optimizer"]:
            why = "AssertionError: Muon optimizer does not support distributed optimizer for now"
            arguments.refuse("--optimizer, --use-distributed-optimizer", why, "--without use-distributed-optimizer")
        if arguments["--use-torch-fsdp2"] or arguments["--use-megatron-fsdp"]:
            arguments.refuse("--optimizer", "AssertionError: Muon optimizer does not support FSDP for now")
    if values:
        arguments.sets("--optimizer", **values)
    else:
        arguments.lacks("--optimizer", f"optimizer {kind}")
    for name, owner in (("--sgd-momentum", "sgd"), ("--muon-momentum", "muon")):
        arguments.tell(name, "understood" if owner in kind else "ignored", f"optimizer {kind}")
    averages = ("--adam-beta1", "--adam-beta2")
    if kind == "adam":
        arguments.sets(averages[0], betas=(arguments[averages[0]], arguments[averages[1]]))
        arguments.tell(averages[1], "understood", f"betas {arguments[averages[1]]}")
        arguments.usually("Megatron's biases and norms do not decay", decay="matrices")
    else:
        for name in (*averages, "--adam-eps"):
            arguments.tell(name, "ignored", f"optimizer {kind}")


def _rates(arguments: Arguments) -> None:
    rate, least = arguments.flag("lr") or arguments["--lr"], arguments["--min-lr"]
    if rate is not None and least > rate:
        arguments.refuse("--min-lr, --lr", f"AssertionError without a text: {least} is above {rate}", "choose less")
    style = arguments["--lr-decay-style"]
    if style in ("cosine", "constant"):
        arguments.sets("--lr-decay-style", schedule=style)
    else:
        arguments.lacks("--lr-decay-style", f"a rate that falls by {style}", costs=False)
    both = [name for name in ("--train-iters", "--train-samples") if arguments.has(name)]
    steps, rows = arguments["--train-iters"], arguments["--train-samples"]
    if len(both) > 1:
        arguments.refuse(", ".join(both), "AssertionError: expected iteration-based training", "keep one")
    for name, count, of in (("--train-iters", steps, "steps"), ("--train-samples", rows, "rows")):
        if count is not None:
            arguments.tell(name, "understood", f"{count:,} {of}; a plan has one step")
    wrong = "--lr-decay-samples --lr-warmup-samples" if steps else "--lr-decay-iters --lr-warmup-iters" if rows else ""
    for name in wrong.split():
        if arguments[name]:
            based = "iteration" if steps else "sample"
            why = f"AssertionError: expected {based}-based learning rate {'decay' if 'decay' in name else 'warmup'}"
            arguments.refuse(f"{both[0]}, {name}", why, "count both in steps, or both in rows")
    _warmup(arguments, steps, rows)


def _warmup(arguments: Arguments, steps: int | None, rows: int | None) -> None:
    share, batch = arguments["--lr-warmup-fraction"], arguments["--global-batch-size"]
    name, warm = "--lr-warmup-iters", arguments["--lr-warmup-iters"]
    samples = arguments["--lr-warmup-samples"]
    if share is not None and (warm or samples):
        arguments.refuse("--lr-warmup-fraction", "AssertionError: can only specify one of them", "keep one")
        return
    if share is not None:
        name, length = "--lr-warmup-fraction", arguments["--lr-decay-iters"] or steps
        decay = arguments["--lr-decay-samples"] or rows
        length = length or (math.ceil(decay / batch) if decay and batch else None)
        warm = None if length is None else int(share * length)
    elif samples:
        name, warm = "--lr-warmup-samples", math.ceil(samples / batch) if batch else None
    if warm is None:
        arguments.lacks(name, "a share of an unknown length", costs=False)
    elif warm:
        arguments.sets(name, warmup=warm)
    for one in ("--lr-warmup-iters", "--lr-warmup-samples", *([name] if warm == 0 else [])):
        if not arguments[one] or warm == 0:
            arguments.tell(one, "ignored", "no warm-up")
