"""Megatron-LM's arguments at d98e8a6: precision, states, rates and activations; those that are gone; and the table."""

from __future__ import annotations

from collections.abc import Mapping

from zerosim.dialects.megatron.keys import (
    BATCH,
    EXPERTS,
    MODEL,
    OF_SWIFT,
    RANKS,
    number,
    of,
    off,
    switch,
    text,
    whole,
    words,
)
from zerosim.dialects.rows import Row, word

_DTYPE = word("fp32", "bf16", "fp16", "fp8")
_PRECISION = (
    off("--fp16 --bf16", "half-type parameters with fp32 masters; fp32 without", "--precision", "same", "bytes"),
    off("--grad-reduce-in-bf16", "with --bf16: gradients in bf16", "--grad-dtype bf16", "same", "bytes traffic"),
    off("--accumulate-allreduce-grads-in-fp32", "gradients in fp32; on with --bf16", "--grad-dtype fp32", "same",
         "bytes"),
    of("--loss-scale", number, None, "a fixed loss scale; dynamic in fp16", "--loss-scale", "same", "none",
        "loss_scale"),
    of("--initial-loss-scale", number, 2.0**32, "where a dynamic scale starts", "--initial-scale-power", "same",
        "none"),
    of("--min-loss-scale", number, 1.0, "the least scale", "--min-loss-scale", "same", "none", "min_loss_scale"),
    of("--loss-scale-window", number, 1000.0, "steps until it doubles", "--loss-scale-window", "same", "none"),
    of("--hysteresis", whole, 2, "overflows until it halves", "--hysteresis", "same", "none", "hysteresis"),
    off("--attention-softmax-in-fp32 --apply-query-key-layer-scaling", "eager softmax in fp32, without its fusion",
         "--fp32-softmax", "same", "bytes"),
    of("--fp8-format", word("e4m3", "hybrid"), None, "products in 8 bits", "", "missing", "bytes traffic seconds"),
    of("--fp4-format", word("e2m1"), None, "products in 4 bits", "", "missing", "bytes traffic seconds"),
    of("--fp8-recipe", text, "delayed", "how 8-bit scales are chosen", "", "missing", "bytes traffic seconds"),
    off("--fp8-param-gather --fp4-param-gather", "parameters are gathered in 8 or 4 bits", "", "missing",
         "bytes traffic seconds"),
)  # fmt: skip
_STATES = (
    off("--use-distributed-optimizer", "ZeRO stage 1", "--stage 1", "same", "bytes traffic"),
    of("--num-distributed-optimizer-instances", whole, 1, "states are divided in dp / this many ranks",
        "--dp-replicate", "same", "bytes traffic"),
    off("--overlap-grad-reduce", "reduce beside backward", "--overlap-reduction", "same", "seconds"),
    off("--overlap-param-gather", "gather in the next forward; needs --overlap-grad-reduce and divided states",
         "--overlap-param-gather", "same", "seconds"),
    off("--overlap-param-gather-with-optimizer-step", "the first gather beside the step; interleaved alone", "",
         "missing", "seconds"),
    of("--ddp-bucket-size", whole, None, "elements of a bucket; max(4e7, 1e6 dp). One bucket without overlap",
        "--bucket-bytes", "same", "traffic seconds"),
    of("--ddp-num-buckets", whole, None, "how many buckets", "--bucket-bytes", "same", "traffic seconds"),
    off("--ddp-average-in-collective --ddp-pad-buckets-for-high-nccl-busbw --use-nccl-ub --no-align-param-gather",
         "details of collectives", "", "missing", "seconds"),
    off("--use-megatron-fsdp", "ZeRO by --data-parallel-sharding-strategy; needs --ckpt-format fsdp_dtensor",
         "--stage", "same", "bytes traffic"),
    of("--data-parallel-sharding-strategy", word("no_shard", "optim", "optim_grads", "optim_grads_params"),
        "optim_grads_params", "ZeRO stage 0 to 3, with --use-megatron-fsdp", "--stage", "same", "bytes traffic",
        myth="it divides states by itself: without --use-megatron-fsdp it does nothing"),
    of("--outer-dp-sharding-strategy", word("no_shard", "optim"), "no_shard", "divide states over replicas too", "",
        "near", "bytes"),
    off("--fsdp-double-buffer --keep-fp8-transpose-cache", "more buffers of Megatron-FSDP", "", "near", "bytes"),
    of("--suggested-communication-unit-size", whole, None, "elements that FSDP sends at once", "", "near", "bytes"),
    off("--use-torch-fsdp2", "PyTorch's fully_shard, without pp, ep and the distributed optimizer",
         "--stage 3 --recipe fsdp2", "same", "bytes"),
    off("--torch-fsdp2-no-reshard-after-forward", "parameters stay gathered", "--stage 2 --recipe fsdp2", "same",
         "bytes"),
    off("--optimizer-cpu-offload", "optimizer states in host memory; needs --use-precision-aware-optimizer",
         "--offload optimizer=host, from stage 1 on", "near", "bytes traffic"),
    of("--optimizer-offload-fraction", number, 1.0, "share of them", "", "near", "bytes traffic"),
    off("--overlap-cpu-optimizer-d2h-h2d", "copies beside the CPU's step", "", "near", "bytes traffic"),
    off("--use-precision-aware-optimizer", "states may have fewer bits", "", "missing", "bytes"),
    of("--main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype", _DTYPE, "fp32",
        "bits of states, with the precision-aware optimizer", "", "missing", "bytes"),
    of("--optimizer", text, "adam", "adam is AdamW; sgd, muon, lion", "--optimizer", "same", "bytes"),
    of("--sgd-momentum --muon-momentum", number, 0.9, "momentum of that optimizer", "--momentum", "same", "none"),
)  # fmt: skip
_RATES = (
    of("--lr", number, None, "learning rate", "--lr", "same", "none", "lr"),
    of("--min-lr", number, 0.0, "rate at the end, at most --lr", "--min-lr", "same", "none", "min_lr"),
    of("--lr-decay-style", word("constant", "linear", "cosine", "inverse-square-root", "WSD"), "linear",
        "how the rate falls", "--schedule cosine or constant", "same", "none"),
    of("--lr-warmup-iters --lr-warmup-samples", whole, 0, "linear warm-up", "--warmup", "same", "none"),
    of("--lr-warmup-fraction", number, None, "warm-up, as a share of the decay", "--warmup", "same", "none"),
    of("--lr-decay-iters --lr-decay-samples", whole, None, "length of the decay", "", "ignored", "none"),
    of("--weight-decay", number, 0.01, "of matrices: biases and norms do not decay", "--weight-decay", "same", "none",
        "weight_decay"),
    of("--adam-beta1", number, 0.9, "decay rates of the averages", "--betas", "same", "none"),
    of("--adam-beta2", number, 0.999, "decay rates of the averages", "--betas", "same", "none"),
    of("--adam-eps", number, 1e-8, "epsilon", "--eps", "same", "none"),
    of("--clip-grad", number, 1.0, "clip to this norm; 0: no clipping", "--clip-norm", "same", "none", "clip_norm"),
    of("--decoupled-lr --decoupled-min-lr --start-weight-decay --end-weight-decay", number, None,
        "other rates for some parameters, or at other times", "", "ignored", "none"),
)  # fmt: skip
_ACTIVATIONS = (
    off("--recompute-activations", "--recompute-granularity selective", "--recompute selective", "same", "bytes"),
    of("--recompute-granularity", word("full", "selective"), None, "what backward recomputes; full needs a method",
        "--recompute", "same", "bytes seconds"),
    of("--recompute-method", word("uniform", "block"), None, "groups of N layers, or N layers of a stage",
        "--recompute full", "near", "bytes seconds"),
    of("--recompute-num-layers", whole, None, "that N; nothing by itself", "--recompute full", "near",
        "bytes seconds"),
    of("--recompute-modules", words, ["core_attn"], "with selective: parts of a block", "--recompute selective:PARTS",
        "same", "bytes"),
    off("--distribute-saved-activations", "tp's ranks share checkpointed inputs", "--partition-activations", "same",
         "bytes traffic"),
    off("--fine-grained-activation-offloading", "saved inputs of parts wait in host memory",
         "--offload-activations is near", "near", "bytes traffic"),
    of("--offload-modules", words, None, "which parts", "--offload-activations is near", "near", "bytes traffic"),
    off("--cpu-offloading", "activations and weights of some layers in host memory", "", "missing", "bytes traffic"),
    of("--cpu-offloading-num-layers", whole, 0, "how many layers", "", "missing", "bytes traffic"),
    of("--attention-backend", word("auto", "flash", "fused", "unfused", "local"), "auto", "whose attention kernel",
        "--attention, --flash-kernel", "same", "bytes seconds"),
    off("--use-flash-attn", "flash attention of the local blocks; --attention-backend stays auto", "--attention flash",
         "same", "bytes seconds"),
    of("--transformer-impl", word("transformer_engine", "local", "inference_optimized"), "transformer_engine",
        "whose blocks", "--transformer-engine", "same", "bytes"),
    off("--no-gradient-accumulation-fusion", "products do not add to the gradient buffer",
         "--no-gradient-accumulation-fusion", "same", "bytes seconds"),
    off("--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
         "--no-rope-fusion --no-persist-layer-norm", "kernels that are not fused", "--fp32-softmax; --kernels is near",
         "near", "bytes seconds"),
    off("--cross-entropy-loss-fusion", "a fused loss, which keeps fewer logits", "--loss megatron-fused", "same",
         "bytes"),
    of("--cross-entropy-fusion-impl", word("native", "te"), "native", "whose", "--loss megatron-fused", "same",
       "bytes"),
    off("--tp-comm-overlap", "tp's collectives beside products; needs sequence parallelism", "--tp-comm-overlap",
         "same", "seconds"),
    of("--cuda-graph-impl", word("none", "local", "transformer_engine"), "none", "one launch for many kernels",
        "--cuda-graphs", "same", "seconds bytes"),
    of("--cuda-graph-modules --cuda-graph-scope", words, None, "which parts", "--cuda-graphs", "same",
        "seconds bytes"),
    off("--enable-cuda-graph --external-cuda-graph", "deprecated: --cuda-graph-impl", "--cuda-graphs", "same",
         "seconds bytes"),
)  # fmt: skip
GONE: Mapping[str, str] = {
    "--batch-size": "no longer valid: --micro-batch-size",
    "--warmup": "no longer valid: --lr-warmup-fraction",
    "--model-parallel-size": "no longer valid: --tensor-model-parallel-size",
    "--checkpoint-activations": "it prints that it is no longer valid, and exits: --recompute-activations",
    "--activations-checkpoint-method": "today --recompute-granularity full --recompute-method METHOD "
    "--recompute-num-layers 1",
    "--activations-checkpoint-granularity": "today --recompute-granularity",
    "--activations-checkpoint-num-layers": "today --recompute-num-layers",
    "--checkpoint-num-layers": "today --recompute-num-layers",
    "--distribute-checkpointed-activations": "today --distribute-saved-activations",
    "--DDP-impl": "there is one implementation now",
    "--use-contiguous-buffers-in-local-ddp": "always so now",
    "--no-async-tensor-model-parallel-allreduce": "always overlapped now",
}
"""Arguments of older versions, and what says them today."""
_REFUSED = ("--batch-size", "--warmup", "--model-parallel-size", "--checkpoint-activations")
_OLD = tuple(
    Row(name, text, None, does, "", *(("refuse", "none") if name in _REFUSED else ("same", "none")))
    for name, does in GONE.items()
)
_FORMER = {
    "--batch-size": whole, "--warmup": number, "--model-parallel-size": whole, "--checkpoint-activations": switch,
    "--distribute-checkpointed-activations": switch, "--use-contiguous-buffers-in-local-ddp": switch,
    "--no-async-tensor-model-parallel-allreduce": switch,
}  # fmt: skip
_ENVIRONMENT = (
    Row("WORLD_SIZE", whole, 1, "the world", "--ranks", "same", "all"),
    Row("CUDA_DEVICE_MAX_CONNECTIONS", whole, None, "must be 1 with tp or cp below compute capability 10, and must not "
        "be 1 for FSDP", "", "ignored", "seconds"),
)  # fmt: skip
TABLE: tuple[Row, ...] = (
    *RANKS, *BATCH, *MODEL, *OF_SWIFT, *EXPERTS, *_PRECISION, *_STATES, *_RATES, *_ACTIVATIONS,
    *(row._replace(kind=_FORMER.get(row.key, text)) for row in _OLD), *_ENVIRONMENT,
)  # fmt: skip
