"""Activations and kernels on a Megatron command line."""

from __future__ import annotations

from zerosim.dialects.megatron.args import Arguments
from zerosim.dialects.megatron.keys import PARTS
from zerosim.dialects.megatron.layout import Layout
from zerosim.dialects.shell.words import Open

_PARTS = {theirs: ours for ours, theirs in PARTS.items()}
_KNOWN_PARTS = (*_PARTS, "moe", "shared_experts")
_FUSIONS = ("--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion",
            "--no-persist-layer-norm")  # fmt: skip


def step_of(arguments: Arguments, layout: Layout) -> None:
    """Set what is saved and recomputed, and whose kernels run."""
    _recompute(arguments, layout)
    _attention(arguments)
    _kernels(arguments)


def _recompute(arguments: Arguments, layout: Layout) -> None:
    name, method = "--recompute-granularity", arguments["--recompute-method"]
    count = arguments["--recompute-num-layers"]
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
            what = "recompute_num_layers must be between 1 and num_layers_per_pipeline_rank"
            what = 'recompute_method must be "block" or "uniform"' if method is None else what
            why = f"ValueError of TransformerConfig: Using recompute_granularity: full so {what}"
            arguments.refuse(name, why, "add --recompute-method uniform --recompute-num-layers 1")
        elif (count == 1 and method == "uniform") or (method == "block" and _is_all(arguments, layout, count)):
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
