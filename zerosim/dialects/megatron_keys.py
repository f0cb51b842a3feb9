"""Megatron-LM's arguments at d98e8a6, as argparse takes them; those that change no step are names alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerosim.dialects.rows import Kind, Row, word


def switch(value: Any) -> bool:
    """Return True: a switch has no value. ms-swift's has one."""
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise ValueError("unrecognized arguments: a switch takes no value")


def whole(value: Any) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError("invalid int value") from None


def number(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError("invalid float value") from None


def text(value: Any) -> str:
    return str(value)


def words(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def wholes(value: Any) -> list[int]:
    return [whole(one) for one in words(value)]


def numbers(value: Any) -> list[float]:
    return [number(one) for one in words(value)]


MANY = (words, wholes, numbers)
"""The kinds of several values."""
KINDS_OF_BLOCK: Mapping[str, tuple[str, bool, str, bool, bool, bool, bool]] = {
    # norm, gated, positions, biases, those of q, k and v, norms of q and k, whether heads may share keys
    "gpt": ("LayerNorm", False, "learned_absolute", True, True, False, False),
    "gpt_bigcode": ("LayerNorm", False, "learned_absolute", True, True, False, True),
    "starcoder2": ("LayerNorm", False, "rope", True, True, False, True),
    "llama": ("RMSNorm", True, "rope", False, False, False, True),
    "qwen2": ("RMSNorm", True, "rope", False, True, False, True),
    "qwen3": ("RMSNorm", True, "rope", False, False, True, True),
}
"""The families that Megatron's arguments describe; the first that fits is meant."""
PARTS: Mapping[str, str] = {
    "core_attn": "core_attn", "mlp": "mlp", "layernorm": "layernorm", "mlp_act": "moe_act",
    "mla_up_proj": "mla_up_proj",
}  # fmt: skip
"""Parts of a block that --recompute names, and Megatron's names."""
_DTYPE = word("fp32", "bf16", "fp16", "fp8")


def _off(names: str, does: str, here: str, says: str, changes: str, myth: str = "") -> Row:
    """Return the row of switches that are off by default."""
    return Row(names, switch, False, does, here, says, changes, "", myth)


def _of(names: str, kind: Kind, default: Any, does: str, here: str = "", says: str = "same", changes: str = "",
        option: str = "", myth: str = "") -> Row:  # fmt: skip
    return Row(names, kind, default, does, here, says, changes, option, myth)


_RANKS = (
    _of("--tensor-model-parallel-size", whole, 1, "ranks that share each map; world % (tp pp cp) must be 0",
        "--tp", "same", "bytes traffic", "tp"),
    _of("--pipeline-model-parallel-size", whole, 1, "pipeline stages; they must divide the layers, unless uneven",
        "--pp", "same", "bytes", "pp"),
    _of("--context-parallel-size", whole, 1, "ranks that share a row's tokens; 2 cp must divide the length",
        "--cp", "same", "bytes traffic", "cp"),
    _of("--cp-comm-type", words, ["p2p"], "how they read each other's tokens: p2p, a2a, allgather, a2a+p2p",
        "--context ring, ulysses, allgather, ulysses+ring", "same", "bytes traffic"),
    _of("--hierarchical-context-parallel-sizes", wholes, None, "a2a+p2p: ranks of each level, the inner first",
        "--ranks-per-node", "same", "bytes traffic"),
    _off("--sequence-parallel", "divides rows of norms and dropout over tp; switched off with a warning at tp 1",
         "--sequence-parallel", "same", "bytes traffic"),
    _of("--expert-model-parallel-size", whole, 1, "ranks that share the experts; they must divide --num-experts",
        "--ep", "same", "bytes traffic"),
    _of("--expert-tensor-parallel-size", whole, None, "ranks that share each expert's maps; tp if absent",
        "--etp", "same", "bytes traffic"),
    _of("--num-layers-per-virtual-pipeline-stage", whole, None, "layers of a chunk: interleaved; one of three ways",
        "--pipeline interleaved --virtual-stages", "same", "bytes"),
    _of("--num-virtual-stages-per-pipeline-rank", whole, None, "chunks on each rank: interleaved",
        "--virtual-stages", "same", "bytes"),
    _of("--pipeline-model-parallel-layout", text, None, "each stage's layers: E table, t layer, L loss, | next stage",
        "--stage-layers", "same", "bytes"),
    _of("--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers", whole, None,
        "layers of the first or last pipeline stage; the others share the rest", "--stage-layers", "same", "bytes"),
    _off("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
         "count the table or the loss as one layer", "--balance-ends for both", "same", "bytes"),
    _of("--microbatch-group-size-per-virtual-pipeline-stage", whole, None, "microbatches that pass a chunk in turn; pp",
        "--micro-batch-group", "same", "bytes"),
    _off("--no-overlap-p2p-communication", "interleaved: sends wait; needs pp above 2", "", "missing", "seconds"),
    _off("--overlap-p2p-communication-warmup-flush --defer-embedding-wgrad-compute --delay-wgrad-compute",
         "overlap or delay work of a pipeline", "", "missing", "seconds bytes"),
    _off("--use-tp-pp-dp-mapping", "pipeline stages are neighbouring ranks", "", "missing", "seconds"),
    _off("--overlap-moe-expert-parallel-comm --moe-shared-expert-overlap --use-ring-exchange-p2p",
         "overlap of experts' exchange", "", "missing", "seconds"),
)  # fmt: skip
_BATCH = (
    _of("--micro-batch-size", whole, None, "rows of a rank and microbatch; required", "--micro-batch", "same", "bytes",
        "micro_batch"),
    _of("--global-batch-size", whole, None, "rows of a step, a multiple of micro x dp; micro x dp if absent",
        "--accumulate", "same", "traffic"),
    _of("--step-batch-size-schedule", text, None, "a batch that grows at token counts; not with --global-batch-size",
        "--accumulate, one plan for the first and one for the last", "missing", "traffic"),
    _of("--rampup-batch-size", words, None, "a batch that grows: start, increment, samples",
        "--accumulate, one plan for the first and one for the last", "missing", "traffic"),
    _of("--seq-length", whole, None, "tokens per row; required", "--seq", "same", "bytes", "seq"),
    _of("--train-iters --train-samples", whole, None, "how long to train: steps or rows, not both", "--steps", "same",
        "none"),
)  # fmt: skip
_MODEL = (
    _of("--max-position-embeddings", whole, None, "rows of a position table, and the longest row; required",
        "--positions", "same", "bytes"),
    _of("--num-layers --hidden-size --num-attention-heads", whole, None, "sizes of the model; required",
        "--layers, --hidden, --heads", "same", "all"),
    _of("--vocab-size --padded-vocab-size", whole, None, "tokens before padding; padded, as said", "--vocab", "same",
        "all"),
    _of("--ffn-hidden-size", whole, None, "4h; with --swiglu int(4h x 2/3 / 64) x 64", "--ffn", "same", "all",
        myth="a gated model keeps 4h"),
    _of("--kv-channels", whole, None, "columns of a head; h / heads", "--head-dim", "same", "all"),
    _off("--group-query-attention", "several heads share keys and values", "--kv-heads", "same", "all"),
    _of("--num-query-groups", whole, 1, "heads of keys and values, with --group-query-attention alone", "--kv-heads",
        "same", "all", myth="it is enough by itself: without --group-query-attention it is ignored without a word"),
    _off("--swiglu", "a gated feed-forward with SiLU", "--model llama", "near", "bytes"),
    _off("--squared-relu --quick-geglu", "another function in the feed-forward", "", "near", "bytes"),
    _of("--normalization", word("LayerNorm", "RMSNorm"), "LayerNorm", "the norm", "--model gpt or llama", "same",
        "bytes"),
    _of("--position-embedding-type", word("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
        "learned_absolute", "positions", "--model gpt or llama", "near", "none"),
    _of("--rotary-base", whole, 10000, "base of the rotary angles", "--rope-base", "near", "none"),
    _of("--rotary-percent", number, 1.0, "share of a head that is rotated", "", "near", "none"),
    _off("--disable-bias-linear", "maps without biases", "--model llama", "near", "bytes"),
    _off("--add-qkv-bias", "biases of q, k and v", "--model qwen2", "near", "bytes"),
    _off("--qk-layernorm", "norms of q and k", "--model qwen3", "near", "bytes"),
    _off("--untie-embeddings-and-output-weights", "a head of its own", "--no-tie-embeddings", "same", "bytes"),
    _of("--make-vocab-size-divisible-by", whole, 128, "the vocabulary is padded to a multiple of this x tp",
        "--pad-vocab; at tp 1 --vocab", "same", "bytes", myth="nothing is padded without tensor parallelism"),
    _of("--hidden-dropout --attention-dropout", number, 0.1, "dropout, on unless a command says 0", "--dropout",
        "same", "bytes", myth="off by default"),
    _of("--norm-epsilon", number, 1e-5, "number added to a norm's variance", "--norm-eps", "same", "none", "norm_eps"),
    _of("--tokenizer-type", text, None, "where the vocabulary comes from, without --vocab-size", "--vocab", "ignored",
        "none"),
    _of("--window-size --window-attn-skip-freq --softmax-type", text, None, "attention in windows, or with sinks", "",
        "missing", "bytes seconds"),
    _off("--multi-latent-attention", "DeepSeek's latent attention", "--model deepseek_v3", "missing", "all"),
    _of("--mtp-num-layers", whole, None, "blocks that predict further tokens", "", "missing", "all"),
    _of("--spec --heterogeneous-layers-config-path --hybrid-override-pattern --experimental-attention-variant",
        words, None, "a model of other blocks", "--model FOLDER/config.json", "missing", "all"),
    _off("--is-hybrid-model --sft --fp32-residual-connection", "another model or data", "", "missing", "bytes"),
)  # fmt: skip
_EXPERTS = (
    _of("--num-experts", whole, None, "experts of each feed-forward; 0: none", "--experts", "same", "all"),
    _of("--moe-router-topk", whole, 2, "experts of a token", "--top-k", "same", "all"),
    _of("--moe-ffn-hidden-size", whole, None, "width of an expert; --ffn-hidden-size", "--expert-ffn", "same", "all"),
    _of("--moe-shared-expert-intermediate-size", whole, None, "width of all shared experts", "--shared-ffn", "same",
        "all"),
    _of("--moe-layer-freq", text, "1", "which layers have experts", "--model FOLDER/config.json", "missing", "all"),
    _of("--moe-token-dispatcher-type", word("allgather", "alltoall", "flex"), "allgather", "how tokens reach experts",
        "--dispatcher", "same", "bytes traffic", myth="all-to-all by default"),
    _off("--moe-enable-deepep", "with flex: DeepEP's exchange", "--dispatcher deepep", "same", "seconds"),
    _of("--moe-flex-dispatcher-backend", word("deepep", "hybridep", "ncclep"), "deepep", "with flex: whose exchange",
        "--dispatcher deepep", "near", "seconds"),
    _of("--moe-router-load-balancing-type", words, ["aux_loss"], "what balances experts",
        "--aux-loss, --aux-loss-over", "same", "none"),
    _of("--moe-aux-loss-coeff", numbers, [0.0], "factor of that loss", "--aux-loss", "same", "none"),
    _of("--moe-z-loss-coeff", number, None, "factor of the router's z-loss", "--z-loss", "same", "none"),
    _off("--moe-router-enable-expert-bias", "biases that balance experts without a loss", "--bias-rate", "same", "none"),
    _of("--moe-router-bias-update-rate", number, 1e-3, "step of those biases", "--bias-rate", "same", "none"),
    _of("--moe-router-dtype", word("fp32", "fp64"), None, "the router's dtype; the model's", "--router-dtype", "same",
        "bytes"),
    _of("--moe-expert-capacity-factor", number, None, "most tokens of an expert; none: none is dropped",
        "--capacity-factor", "same", "bytes traffic"),
    _off("--moe-pad-expert-input-to-capacity", "every expert computes as many rows", "--pad-to-capacity", "same",
         "bytes traffic"),
    _of("--moe-token-drop-policy", word("probs", "position"), "probs", "which tokens are dropped", "--token-drop",
        "same", "none"),
    _off("--moe-grouped-gemm", "one grouped product for a rank's experts; without, one expert after the other",
         "--experts-kernel grouped", "near", "seconds"),
    _off("--moe-layer-recompute --moe-extended-tp --moe-use-legacy-grouped-gemm --moe-apply-probs-on-input",
         "older or other forms of experts", "", "missing", "bytes"),
    _of("--moe-router-num-groups --moe-router-group-topk", whole, None, "choose groups of experts first",
        "--model FOLDER/config.json", "missing", "traffic"),
)  # fmt: skip
_PRECISION = (
    _off("--fp16 --bf16", "half-type parameters with fp32 masters; fp32 without", "--precision", "same", "bytes"),
    _off("--grad-reduce-in-bf16", "with --bf16: gradients in bf16", "--grad-dtype bf16", "same", "bytes traffic"),
    _off("--accumulate-allreduce-grads-in-fp32", "gradients in fp32; on with --bf16", "--grad-dtype fp32", "same",
         "bytes"),
    _of("--loss-scale", number, None, "a fixed loss scale; dynamic in fp16", "--loss-scale", "same", "none",
        "loss_scale"),
    _of("--initial-loss-scale", number, 2.0**32, "where a dynamic scale starts", "--initial-scale-power", "same",
        "none"),
    _of("--min-loss-scale", number, 1.0, "the least scale", "--min-loss-scale", "same", "none", "min_loss_scale"),
    _of("--loss-scale-window", number, 1000.0, "steps until it doubles", "--loss-scale-window", "same", "none"),
    _of("--hysteresis", whole, 2, "overflows until it halves", "--hysteresis", "same", "none", "hysteresis"),
    _off("--attention-softmax-in-fp32 --apply-query-key-layer-scaling", "eager softmax in fp32, without its fusion",
         "--fp32-softmax", "same", "bytes"),
    _of("--fp8-format", word("e4m3", "hybrid"), None, "products in 8 bits", "", "missing", "bytes traffic seconds"),
    _of("--fp4-format", word("e2m1"), None, "products in 4 bits", "", "missing", "bytes traffic seconds"),
    _of("--fp8-recipe", text, "delayed", "how 8-bit scales are chosen", "", "missing", "bytes traffic seconds"),
    _off("--fp8-param-gather --fp4-param-gather", "parameters are gathered in 8 or 4 bits", "", "missing",
         "bytes traffic seconds"),
)  # fmt: skip
_STATES = (
    _off("--use-distributed-optimizer", "ZeRO stage 1", "--stage 1", "same", "bytes traffic"),
    _of("--num-distributed-optimizer-instances", whole, 1, "states are divided in dp / this many ranks",
        "--dp-replicate", "same", "bytes traffic"),
    _off("--overlap-grad-reduce", "reduce beside backward", "--overlap-reduction", "same", "seconds"),
    _off("--overlap-param-gather", "gather in the next forward; needs --overlap-grad-reduce and divided states",
         "--overlap-param-gather", "same", "seconds"),
    _off("--overlap-param-gather-with-optimizer-step", "the first gather beside the step; interleaved alone", "",
         "missing", "seconds"),
    _of("--ddp-bucket-size", whole, None, "elements of a bucket; max(4e7, 1e6 dp). One bucket without overlap",
        "--bucket-bytes", "same", "traffic seconds"),
    _of("--ddp-num-buckets", whole, None, "how many buckets", "--bucket-bytes", "same", "traffic seconds"),
    _off("--ddp-average-in-collective --ddp-pad-buckets-for-high-nccl-busbw --use-nccl-ub --no-align-param-gather",
         "details of collectives", "", "missing", "seconds"),
    _off("--use-megatron-fsdp", "ZeRO by --data-parallel-sharding-strategy; needs --ckpt-format fsdp_dtensor",
         "--stage", "same", "bytes traffic"),
    _of("--data-parallel-sharding-strategy", word("no_shard", "optim", "optim_grads", "optim_grads_params"),
        "optim_grads_params", "ZeRO stage 0 to 3, with --use-megatron-fsdp", "--stage", "same", "bytes traffic",
        myth="it divides states by itself: without --use-megatron-fsdp it does nothing"),
    _of("--outer-dp-sharding-strategy", word("no_shard", "optim"), "no_shard", "divide states over replicas too", "",
        "near", "bytes"),
    _off("--fsdp-double-buffer --keep-fp8-transpose-cache", "more buffers of Megatron-FSDP", "", "near", "bytes"),
    _of("--suggested-communication-unit-size", whole, None, "elements that FSDP sends at once", "", "near", "bytes"),
    _off("--use-torch-fsdp2", "PyTorch's fully_shard, without pp, ep and the distributed optimizer",
         "--stage 3 --recipe fsdp2", "same", "bytes"),
    _off("--torch-fsdp2-no-reshard-after-forward", "parameters stay gathered", "--stage 2 --recipe fsdp2", "same",
         "bytes"),
    _off("--optimizer-cpu-offload", "optimizer states in host memory; needs --use-precision-aware-optimizer",
         "--offload optimizer=host, from stage 1 on", "near", "bytes traffic"),
    _of("--optimizer-offload-fraction", number, 1.0, "share of them", "", "near", "bytes traffic"),
    _off("--overlap-cpu-optimizer-d2h-h2d", "copies beside the CPU's step", "", "near", "bytes traffic"),
    _off("--use-precision-aware-optimizer", "states may have fewer bits", "", "missing", "bytes"),
    _of("--main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype", _DTYPE, "fp32",
        "bits of states, with the precision-aware optimizer", "", "missing", "bytes"),
    _of("--optimizer", text, "adam", "adam is AdamW; sgd, muon, lion", "--optimizer", "same", "bytes"),
    _of("--sgd-momentum --muon-momentum", number, 0.9, "momentum of that optimizer", "--momentum", "same", "none"),
)  # fmt: skip
_RATES = (
    _of("--lr", number, None, "learning rate", "--lr", "same", "none", "lr"),
    _of("--min-lr", number, 0.0, "rate at the end, at most --lr", "--min-lr", "same", "none", "min_lr"),
    _of("--lr-decay-style", word("constant", "linear", "cosine", "inverse-square-root", "WSD"), "linear",
        "how the rate falls", "--schedule cosine or constant", "same", "none"),
    _of("--lr-warmup-iters --lr-warmup-samples", whole, 0, "linear warm-up", "--warmup", "same", "none"),
    _of("--lr-warmup-fraction", number, None, "warm-up, as a share of the decay", "--warmup", "same", "none"),
    _of("--lr-decay-iters --lr-decay-samples", whole, None, "length of the decay", "", "ignored", "none"),
    _of("--weight-decay", number, 0.01, "of matrices: biases and norms do not decay", "--weight-decay", "same", "none",
        "weight_decay"),
    _of("--adam-beta1", number, 0.9, "decay rates of the averages", "--betas", "same", "none"),
    _of("--adam-beta2", number, 0.999, "decay rates of the averages", "--betas", "same", "none"),
    _of("--adam-eps", number, 1e-8, "epsilon", "--eps", "same", "none", "eps"),
    _of("--clip-grad", number, 1.0, "clip to this norm; 0: no clipping", "--clip-norm", "same", "none", "clip_norm"),
    _of("--decoupled-lr --decoupled-min-lr --start-weight-decay --end-weight-decay", number, None,
        "other rates for some parameters, or at other times", "", "ignored", "none"),
)  # fmt: skip
_ACTIVATIONS = (
    _off("--recompute-activations", "--recompute-granularity selective", "--recompute selective", "same", "bytes"),
    _of("--recompute-granularity", word("full", "selective"), None, "what backward recomputes; full needs a method",
        "--recompute", "same", "bytes seconds"),
    _of("--recompute-method", word("uniform", "block"), None, "groups of N layers, or N layers of a stage",
        "--recompute full", "near", "bytes seconds"),
    _of("--recompute-num-layers", whole, None, "that N; nothing by itself", "--recompute full", "near",
        "bytes seconds"),
    _of("--recompute-modules", words, ["core_attn"], "with selective: parts of a block", "--recompute selective:PARTS",
        "same", "bytes"),
    _off("--distribute-saved-activations", "tp's ranks share checkpointed inputs", "--partition-activations", "same",
         "bytes traffic"),
    _off("--fine-grained-activation-offloading", "saved inputs of parts wait in host memory",
         "--offload-activations is near", "near", "bytes traffic"),
    _of("--offload-modules", words, None, "which parts", "--offload-activations is near", "near", "bytes traffic"),
    _off("--cpu-offloading", "activations and weights of some layers in host memory", "", "missing", "bytes traffic"),
    _of("--cpu-offloading-num-layers", whole, 0, "how many layers", "", "missing", "bytes traffic"),
    _of("--attention-backend", word("auto", "flash", "fused", "unfused", "local"), "auto", "whose attention kernel",
        "--attention, --flash-kernel", "same", "bytes seconds"),
    _off("--use-flash-attn", "flash attention of the local blocks; --attention-backend stays auto", "--attention flash",
         "same", "bytes seconds"),
    _of("--transformer-impl", word("transformer_engine", "local", "inference_optimized"), "transformer_engine",
        "whose blocks", "--transformer-engine", "same", "bytes"),
    _off("--no-gradient-accumulation-fusion", "products do not add to the gradient buffer",
         "--no-gradient-accumulation-fusion", "same", "bytes seconds"),
    _off("--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
         "--no-rope-fusion --no-persist-layer-norm", "kernels that are not fused", "--fp32-softmax; --kernels is near",
         "near", "bytes seconds"),
    _off("--cross-entropy-loss-fusion", "a fused loss, which keeps fewer logits", "--loss megatron-fused", "same",
         "bytes"),
    _of("--cross-entropy-fusion-impl", word("native", "te"), "native", "whose", "--loss megatron-fused", "same", "bytes"),
    _off("--tp-comm-overlap", "tp's collectives beside products; needs sequence parallelism", "--tp-comm-overlap",
         "same", "seconds"),
    _of("--cuda-graph-impl", word("none", "local", "transformer_engine"), "none", "one launch for many kernels",
        "--cuda-graphs", "same", "seconds bytes"),
    _of("--cuda-graph-modules --cuda-graph-scope", words, None, "which parts", "--cuda-graphs", "same",
        "seconds bytes"),
    _off("--enable-cuda-graph --external-cuda-graph", "deprecated: --cuda-graph-impl", "--cuda-graphs", "same",
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
    *_RANKS, *_BATCH, *_MODEL, *_EXPERTS, *_PRECISION, *_STATES, *_RATES, *_ACTIVATIONS,
    *(row._replace(kind=_FORMER.get(row.key, text)) for row in _OLD), *_ENVIRONMENT,
)  # fmt: skip
