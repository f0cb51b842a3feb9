"""A configuration as a launch script of Megatron-LM: arrays of arguments and a torchrun line, as `shell.py` reads."""

from __future__ import annotations

import shlex
from typing import Any

from zerosim.config.parts.context import cut_of
from zerosim.config.run import RunConfig
from zerosim.dialects.megatron.keys import KINDS_OF_BLOCK, PARTS
from zerosim.dialects.written.shell import arguments, wrapped
from zerosim.errors import InputError

_CONTEXTS = {"ring": "p2p", "ulysses": "a2a", "allgather": "allgather", "ulysses+ring": "a2a+p2p"}
_SHARDS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "sgd": "sgd", "muon": "muon", "lion": "lion"}
_DENSE = {"mistral": "llama", "smollm3": "llama", "granite": "llama", "seed_oss": "qwen2", "mixtral": "llama"}
_MIXED = {"qwen3_moe": "qwen3"}


def written(config: RunConfig) -> str:
    """Return a script with all that Megatron's arguments can say. Raises: InputError for a model that it lacks."""
    parts = {
        "MODEL_ARGS": _model(config),
        "MOE_ARGS": _experts(config),
        "BATCH_ARGS": _batch(config),
        "PARALLEL_ARGS": _parallel(config),
        "MEMORY_ARGS": _memory(config),
        "FP8_ARGS": _eight_bits(config),
    }
    mesh = config.mesh
    each = mesh.ranks_per_node if 0 < mesh.ranks_per_node < mesh.ranks else mesh.ranks
    each = each if mesh.ranks % each == 0 else mesh.ranks
    lines = ["#!/bin/bash"]
    if mesh.tp * mesh.cp > 1 and not _is_fsdp(config):
        lines.append("export CUDA_DEVICE_MAX_CONNECTIONS=1")
    if config.memory.allocator == "caching" and config.memory.allocator_conf:
        lines.append(f"export PYTORCH_CUDA_ALLOC_CONF={shlex.quote(config.memory.allocator_conf)}")
    for name, words in parts.items():
        if words:
            lines += [f"{name}=(", *wrapped(words), ")"]
    used = " ".join(f"${{{name}[@]}}" for name, words in parts.items() if words)
    lines.append(f"torchrun --nproc_per_node {each} --nnodes {mesh.ranks // each} pretrain_gpt.py {used}")
    return "\n".join(lines) + "\n"


def _is_fsdp(config: RunConfig) -> bool:
    return config.parallel.zero_stage > 1


def _model(config: RunConfig) -> list[str]:
    model, tp = config.model, config.mesh.tp
    family = _MIXED.get(model.family, _DENSE.get(model.family, model.family))
    block = KINDS_OF_BLOCK.get(family)
    if block is None or (model.has_experts and family not in ("gpt", "llama", "qwen3")):
        raise InputError(f"model {model.name}: Megatron's arguments describe no {model.family}; choose gpt or llama")
    norm, gated, positions, biased, of_q, norms = block[:6]
    learned = positions == "learned_absolute"
    shares = model.kv_heads != model.heads or family == "gpt_bigcode"
    padded = config.parallel.pad_vocab if tp > 1 else model.vocab % 128 == 0
    return arguments(
        ("num-layers", model.layers),
        ("hidden-size", model.hidden),
        ("ffn-hidden-size", model.ffn),
        ("num-attention-heads", model.heads),
        ("group-query-attention", shares),
        ("num-query-groups", shares and model.kv_heads),
        ("kv-channels", model.head_dim if model.head_dim * model.heads != model.hidden else None),
        ("seq-length", model.seq),
        ("max-position-embeddings", max(model.seq, model.positions) if learned else model.seq),
        ("position-embedding-type", "" if learned else positions),
        ("rotary-base", "" if learned else int(model.rope_base)),
        ("swiglu", gated),
        ("normalization", norm if norm != "LayerNorm" else ""),
        ("norm-epsilon", model.norm_eps if model.norm_eps != 1e-5 else None),
        ("disable-bias-linear", not biased),
        ("add-qkv-bias", of_q and not biased),
        ("qk-layernorm", norms),
        ("untie-embeddings-and-output-weights", not model.tie_embeddings),
        ("attention-dropout", str(model.dropout)),
        ("hidden-dropout", str(model.dropout)),
        ("tokenizer-type", "NullTokenizer"),
        ("vocab-size", model.vocab),
        ("make-vocab-size-divisible-by", None if padded else 1),
        ("mock-data", True),
        ("mtp-num-layers", config.mtp.layers or None),
        ("mtp-loss-scaling-factor", config.mtp.loss if config.mtp.layers else None),
    )


def _experts(config: RunConfig) -> list[str]:
    model, experts, mesh = config.model, config.experts, config.mesh
    if not model.has_experts:
        return []
    sends = {"deepep": "flex"}.get(experts.dispatcher, experts.dispatcher)
    kind = "none" if not experts.aux_loss else "seq_aux_loss" if experts.aux_loss_over == "sequence" else "aux_loss"
    limited = experts.capacity_factor is not None
    return arguments(
        ("num-experts", model.experts),
        ("moe-router-topk", model.top_k),
        ("moe-ffn-hidden-size", model.expert_ffn),
        ("moe-shared-expert-intermediate-size", model.width("shared") if model.has_shared_experts else None),
        ("moe-token-dispatcher-type", sends if mesh.axes.is_folded or limited else ""),
        ("moe-shared-expert-overlap", experts.shared_expert_overlap),
        ("moe-enable-deepep", mesh.axes.is_folded and sends == "flex"),
        ("moe-grouped-gemm", config.precision.stored == "bf16"),
        ("moe-router-load-balancing-type", kind),
        ("moe-aux-loss-coeff", experts.aux_loss or None),
        ("moe-z-loss-coeff", experts.z_loss or None),
        ("moe-router-enable-expert-bias", experts.bias_rate > 0),
        ("moe-router-score-function", "sigmoid" if experts.bias_rate else ""),  # Megatron's biases need it
        ("moe-router-bias-update-rate", experts.bias_rate or None),
        ("moe-router-dtype", "fp32" if experts.router_dtype == "fp32" else ""),
        ("moe-expert-capacity-factor", experts.capacity_factor),
        ("moe-token-drop-policy", "position" if experts.token_drop == "position" else ""),
        ("moe-pad-expert-input-to-capacity", limited and experts.pad_to_capacity and sends != "flex"),
    )


def _batch(config: RunConfig) -> list[str]:
    data, optim, scale = config.data, config.optim, config.precision
    steps = optim.steps or max(1000, 10 * optim.warmup)
    optimizer = _OPTIMIZERS.get(optim.optimizer, "")
    if optimizer == "muon" and config.parallel.zero_stage:  # Megatron's divides no states
        optimizer = ""
    adam, dynamic = optimizer == "adam", scale.stored == "fp16" and not _fixed(config)
    return arguments(
        ("micro-batch-size", data.micro_batch),
        ("global-batch-size", config.global_batch),
        ("train-iters", steps),
        ("optimizer", optimizer),
        ("lr", str(optim.lr)),
        ("min-lr", str(optim.min_lr) if optim.min_lr else ""),
        ("lr-decay-style", optim.lr_schedule),
        ("lr-warmup-iters", optim.warmup or None),
        ("adam-beta1", optim.betas[0] if adam else None),
        ("adam-beta2", optim.betas[1] if adam else None),
        ("adam-eps", optim.eps if adam else None),
        ("sgd-momentum", str(optim.momentum) if optimizer == "sgd" else ""),
        ("muon-momentum", str(optim.momentum) if optimizer == "muon" else ""),
        ("weight-decay", str(optim.weight_decay)),
        ("clip-grad", str(optim.clip_norm)),
        (scale.stored, scale.stored in ("bf16", "fp16")),
        ("loss-scale", str(scale.loss_scale) if _fixed(config) else ""),
        ("initial-loss-scale", 2**scale.initial_scale_power if dynamic else None),
        ("loss-scale-window", scale.loss_scale_window if dynamic else None),
        ("hysteresis", scale.hysteresis if dynamic else None),
        ("min-loss-scale", str(scale.min_loss_scale) if dynamic else ""),
    )


def _fixed(config: RunConfig) -> bool:
    return isinstance(config.precision.loss_scale, int | float)


def _parallel(config: RunConfig) -> list[str]:
    mesh, parallel, reduction = config.mesh, config.parallel, config.reduction
    stage, grads, stored = parallel.zero_stage, config.precision.grad_dtype, config.precision.stored
    torch = _is_fsdp(config) and _takes_torch(config)
    late = reduction.overlaps or torch
    inner = cut_of(mesh, config.context).within
    levels = [inner, mesh.cp // inner] if config.context.how == "ulysses+ring" and mesh.cp > 1 else []
    gathers = reduction.in_forward if stage in (1, 2) else stage == 3 and config.gathering.prefetch > 0
    wide = {"fp32": 4}.get(grads, 2)
    bucket = parallel.bucket_bytes // wide if parallel.bucket_bytes and late else 0
    offloads = stage > 0 and config.offload.memory_of("optimizer") == "host"
    return arguments(
        ("tensor-model-parallel-size", mesh.tp if mesh.tp > 1 else None),
        ("sequence-parallel", parallel.sequence_parallel),
        ("context-parallel-size", mesh.cp if mesh.cp > 1 else None),
        ("cp-comm-type", _CONTEXTS[config.context.how] if mesh.cp > 1 else ""),
        ("hierarchical-context-parallel-sizes", levels),
        *_pipeline(config),
        ("expert-model-parallel-size", mesh.ep if mesh.ep > 1 else None),
        ("expert-tensor-parallel-size", mesh.etp),
        ("use-distributed-optimizer", stage == 1),
        ("use-megatron-fsdp", _is_fsdp(config) and not torch),
        ("data-parallel-sharding-strategy", _SHARDS[stage] if _is_fsdp(config) and not torch else ""),
        ("ckpt-format", "fsdp_dtensor" if _is_fsdp(config) and not torch else ""),
        ("use-torch-fsdp2", torch),
        ("torch-fsdp2-no-reshard-after-forward", torch and stage == 2),
        ("num-distributed-optimizer-instances", mesh.dp_replicate if stage and mesh.dp_replicate > 1 else None),
        ("overlap-grad-reduce", reduction.overlaps and not torch),
        ("overlap-param-gather", gathers and reduction.overlaps and not torch),
        ("ddp-bucket-size", bucket or None),
        ("grad-reduce-in-bf16", stored == "bf16" and grads == "bf16"),
        ("accumulate-allreduce-grads-in-fp32", stored == "fp16" and grads == "fp32"),
        ("optimizer-cpu-offload", offloads),
        ("use-precision-aware-optimizer", offloads),
        ("tp-comm-overlap", config.clock.tp_comm_overlap),
    )


def _takes_torch(config: RunConfig) -> bool:
    """Return whether Megatron's own fully_shard says it."""
    mesh, model = config.mesh, config.model
    return (
        config.parallel.recipe == "fsdp2"
        and mesh.pp == mesh.ep == 1
        and not model.tie_embeddings
        and config.precision.stored != "fp16"
    )


def _pipeline(config: RunConfig) -> list[tuple[str, Any]]:
    pp, parallel, layers = config.mesh.pp, config.parallel, config.model.layers
    if pp == 1:
        return []
    pairs: list[tuple[str, Any]] = [("pipeline-model-parallel-size", pp)]
    chunks = parallel.num_chunks if parallel.pipeline == "interleaved" else 1
    cut = config.layers_by_chunk(layers) if parallel.pipeline != "zb-v" else [0] * pp
    cut[-1] -= config.mtp.layers  # Megatron has them beside the last layers too
    if parallel.balance_ends and (layers + 2) % (pp * chunks) == 0:
        pairs += [("account-for-embedding-in-pipeline-split", True), ("account-for-loss-in-pipeline-split", True)]
    elif len(set(cut)) > 1:
        stages = [f"{'t' if count == 1 else f't*{count}' if count else ''}" for count in cut]
        text = f"{'|'.join(stages)}{'m' * config.mtp.layers}"
        return [*pairs, ("pipeline-model-parallel-layout", f"E{text}L"), *_group(config, chunks)]
    if chunks > 1:
        pairs.append(("num-virtual-stages-per-pipeline-rank", chunks))
    return [*pairs, *_group(config, chunks)]


def _group(config: RunConfig, chunks: int) -> list[tuple[str, Any]]:
    group = config.micro_batch_group
    name = "microbatch-group-size-per-virtual-pipeline-stage"
    return [(name, group)] if chunks > 1 and group != config.mesh.pp else []


def _memory(config: RunConfig) -> list[str]:
    memory, grads = config.memory, config.grads
    full, flash, te = memory.recompute == "full", memory.attention == "flash", config.parallel.transformer_engine
    named = memory.recompute.partition(":")[2].split(",") if memory.recompute.startswith("selective") else []
    named = ["core_attn"] if memory.recompute == "selective" else named
    grouped = config.model.has_experts and config.precision.stored == "bf16"
    modules = [PARTS[one] for one in named if one in PARTS and (one != "mlp_act" or grouped)]
    backend = ("fused" if config.clock.flash_kernel == "cudnn" else "flash") if flash else "unfused"
    graphs = config.clock.cuda_graphs and not full and "expandable_segments:True" not in (memory.allocator_conf or "")
    fuses = config.parallel.zero_stage > 1 or grads.fused
    return arguments(
        ("recompute-granularity", "full" if full else "selective" if modules else ""),
        ("recompute-method", "uniform" if full else ""),
        ("recompute-num-layers", 1 if full else None),
        ("recompute-modules", modules),
        ("distribute-saved-activations", full and config.partitions_inputs),
        ("transformer-impl", "" if te else "local"),
        ("attention-backend", backend if te else ""),
        ("use-flash-attn", flash and not te),
        ("attention-softmax-in-fp32", memory.fp32_softmax),
        ("no-masked-softmax-fusion", memory.fp32_softmax),
        ("no-gradient-accumulation-fusion", not fuses or (_is_fsdp(config) and _takes_torch(config))),
        ("cross-entropy-loss-fusion", memory.loss == "megatron-fused"),
        ("cuda-graph-impl", "local" if graphs else ""),
    )


def _eight_bits(config: RunConfig) -> list[str]:
    """Return the arguments of Transformer Engine's products; none for another library's, which Megatron lacks."""
    fp8, most = config.fp8, config.model.layers // config.mesh.pp
    if not fp8.is_on or fp8.library != "te" or not config.parallel.transformer_engine:
        return []
    delays, ends = fp8.kind == "delayed", (fp8.exact_first, fp8.exact_last)
    gathers = fp8.param_gather and config.parallel.zero_stage > 0  # Megatron refuses it for states that are whole
    exact = any(ends) and max(ends) <= most and not delays  # delayed scaling refuses it
    return arguments(
        ("fp8-format", fp8.form),
        ("fp8-recipe", fp8.kind),
        ("fp8-margin", fp8.margin or None),
        ("fp8-amax-history-len", fp8.amax_history if delays else None),
        ("fp8-amax-compute-algo", fp8.amax_algo if delays else ""),
        ("no-fp8-wgrad", fp8.exact_wgrad and delays),
        ("fp8-param-gather", gathers),
        ("first-last-layers-bf16", exact),
        ("num-layers-at-start-in-bf16", str(ends[0]) if exact else ""),
        ("num-layers-at-end-in-bf16", str(ends[1]) if exact else ""),
    )
