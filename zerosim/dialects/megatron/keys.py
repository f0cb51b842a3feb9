"""Megatron-LM's arguments at d98e8a6, as argparse takes them: ranks, the batch, the model and its experts."""

from __future__ import annotations

import math
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
        found = float(value)
    except ValueError:
        raise ValueError("invalid float value") from None
    if not math.isfinite(found):
        raise ValueError("expected a finite number")
    return found


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


def off(names: str, does: str, here: str, says: str, changes: str, myth: str = "") -> Row:
    """Return the row of switches that are off by default."""
    return Row(names, switch, False, does, here, says, changes, "", myth)


def of(names: str, kind: Kind, default: Any, does: str, here: str = "", says: str = "same", changes: str = "",
        option: str = "", myth: str = "") -> Row:  # fmt: skip
    return Row(names, kind, default, does, here, says, changes, option, myth)


RANKS = (
    of("--tensor-model-parallel-size", whole, 1, "ranks that share each map; world % (tp pp cp) must be 0",
        "--tp", "same", "bytes traffic", "tp"),
    of("--pipeline-model-parallel-size", whole, 1, "pipeline stages; they must divide the layers, unless uneven",
        "--pp", "same", "bytes", "pp"),
    of("--context-parallel-size", whole, 1, "ranks that share a row's tokens; 2 cp must divide the length",
        "--cp", "same", "bytes traffic", "cp"),
    of("--cp-comm-type", words, ["p2p"], "how they read each other's tokens: p2p, a2a, allgather, a2a+p2p",
        "--context ring, ulysses, allgather, ulysses+ring", "same", "bytes traffic"),
    of("--hierarchical-context-parallel-sizes", wholes, None, "a2a+p2p: ranks of each level, the inner first",
        "--ranks-per-node", "same", "bytes traffic"),
    off("--sequence-parallel", "divides rows of norms and dropout over tp; switched off with a warning at tp 1",
         "--sequence-parallel", "same", "bytes traffic"),
    of("--expert-model-parallel-size", whole, 1, "ranks that share the experts; they must divide --num-experts",
        "--ep", "same", "bytes traffic"),
    of("--expert-tensor-parallel-size", whole, None, "ranks that share each expert's maps; tp if absent",
        "--etp", "same", "bytes traffic"),
    of("--num-layers-per-virtual-pipeline-stage", whole, None, "layers of a chunk: interleaved; one of three ways",
        "--pipeline interleaved --virtual-stages", "same", "bytes"),
    of("--num-virtual-stages-per-pipeline-rank", whole, None, "chunks on each rank: interleaved",
        "--virtual-stages", "same", "bytes"),
    of("--pipeline-model-parallel-layout", text, None, "each stage's layers: E table, t layer, L loss, | next stage",
        "--stage-layers", "same", "bytes"),
    of("--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers", whole, None,
        "layers of the first or last pipeline stage; the others share the rest", "--stage-layers", "same", "bytes"),
    off("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
         "count the table or the loss as one layer", "--balance-ends for both", "same", "bytes"),
    of("--microbatch-group-size-per-virtual-pipeline-stage", whole, None, "microbatches that pass a chunk in turn; pp",
        "--micro-batch-group", "same", "bytes"),
    off("--no-overlap-p2p-communication", "interleaved: sends wait; needs pp above 2", "", "missing", "seconds"),
    off("--overlap-p2p-communication-warmup-flush --defer-embedding-wgrad-compute --delay-wgrad-compute",
         "overlap or delay work of a pipeline", "", "missing", "seconds bytes"),
    off("--use-tp-pp-dp-mapping", "pipeline stages are neighbouring ranks", "", "missing", "seconds"),
    off("--overlap-moe-expert-parallel-comm --use-ring-exchange-p2p",
         "overlap of experts' exchange", "", "missing", "seconds"),
)  # fmt: skip
BATCH = (
    of("--micro-batch-size", whole, None, "rows of a rank and microbatch; required", "--micro-batch", "same", "bytes",
        "micro_batch"),
    of("--global-batch-size", whole, None, "rows of a step, a multiple of micro x dp; micro x dp if absent",
        "--accumulate", "same", "traffic"),
    of("--step-batch-size-schedule", text, None, "a batch that grows at token counts; not with --global-batch-size",
        "--accumulate, one plan for the first and one for the last", "missing", "traffic"),
    of("--rampup-batch-size", words, None, "a batch that grows: start, increment, samples",
        "--accumulate, one plan for the first and one for the last", "missing", "traffic"),
    of("--seq-length", whole, None, "tokens per row; required", "--seq", "same", "bytes", "seq"),
    of("--train-iters --train-samples", whole, None, "how long to train: steps or rows, not both", "--steps", "same",
        "none"),
)  # fmt: skip
MODEL = (
    of("--max-position-embeddings", whole, None, "rows of a position table, and the longest row; required",
        "--positions", "same", "bytes"),
    of("--num-layers --hidden-size --num-attention-heads", whole, None, "sizes of the model; required",
        "--layers, --hidden, --heads", "same", "all"),
    of("--vocab-size --padded-vocab-size", whole, None, "tokens before padding; padded, as said", "--vocab", "same",
        "all"),
    of("--ffn-hidden-size", whole, None, "4h; with --swiglu int(4h x 2/3 / 64) x 64", "--ffn", "same", "all",
        myth="a gated model keeps 4h"),
    of("--kv-channels", whole, None, "columns of a head; h / heads", "--head-dim", "same", "all"),
    off("--group-query-attention", "several heads share keys and values", "--kv-heads", "same", "all"),
    of("--num-query-groups", whole, 1, "heads of keys and values, with --group-query-attention alone", "--kv-heads",
        "same", "all", myth="it is enough by itself: without --group-query-attention it is ignored without a word"),
    off("--swiglu", "a gated feed-forward with SiLU", "--model llama", "near", "bytes"),
    off("--squared-relu --quick-geglu", "another function in the feed-forward", "", "near", "bytes"),
    of("--normalization", word("LayerNorm", "RMSNorm"), "LayerNorm", "the norm", "--model gpt or llama", "same",
        "bytes"),
    of("--position-embedding-type", word("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
        "learned_absolute", "positions", "--model gpt or llama", "near", "none"),
    of("--rotary-base", whole, 10000, "base of the rotary angles", "--rope-base", "near", "none"),
    of("--rotary-percent", number, 1.0, "share of a head that is rotated", "", "near", "none"),
    off("--disable-bias-linear", "maps without biases", "--model llama", "near", "bytes"),
    off("--add-qkv-bias", "biases of q, k and v", "--model qwen2", "near", "bytes"),
    off("--qk-layernorm", "norms of q and k", "--model qwen3", "near", "bytes"),
    off("--untie-embeddings-and-output-weights", "a head of its own", "--no-tie-embeddings", "same", "bytes"),
    of("--make-vocab-size-divisible-by", whole, 128, "the vocabulary is padded to a multiple of this x tp",
        "--pad-vocab; at tp 1 --vocab", "same", "bytes", myth="nothing is padded without tensor parallelism"),
    of("--hidden-dropout --attention-dropout", number, 0.1, "dropout, on unless a command says 0", "--dropout",
        "same", "bytes", myth="off by default"),
    of("--norm-epsilon", number, 1e-5, "number added to a norm's variance", "--norm-eps", "same", "none", "norm_eps"),
    of("--tokenizer-type", text, None, "where the vocabulary comes from, without --vocab-size", "--vocab", "ignored",
        "none"),
    of("--window-size --window-attn-skip-freq --softmax-type", text, None, "attention in windows, or with sinks", "",
        "missing", "bytes seconds"),
    off("--multi-latent-attention", "DeepSeek's latent attention", "--model deepseek_v3", "missing", "all"),
    of("--mtp-num-layers", whole, None, "blocks that predict further tokens", "--mtp-layers", "same", "all"),
    of("--mtp-loss-scaling-factor", number, 0.1, "weight of the mean of their losses", "--mtp-loss", "same", "none"),
    of("--spec --yaml-cfg --heterogeneous-layers-config-path --hybrid-override-pattern "
       "--experimental-attention-variant",
        words, None, "a model of other blocks", "--model FOLDER/config.json", "missing", "all"),
    off("--is-hybrid-model --sft --fp32-residual-connection", "another model or data", "", "missing", "bytes"),
)  # fmt: skip
EXPERTS = (
    of("--num-experts", whole, None, "experts of each feed-forward; 0: none", "--experts", "same", "all"),
    of("--moe-router-topk", whole, 2, "experts of a token", "--top-k", "same", "all"),
    of("--moe-ffn-hidden-size", whole, None, "width of an expert; --ffn-hidden-size", "--expert-ffn", "same", "all"),
    of("--moe-shared-expert-intermediate-size", whole, None, "width of all shared experts", "--shared-ffn", "same",
        "all"),
    off("--moe-shared-expert-overlap", "shared experts run beside the exchange of rows", "--shared-expert-overlap",
        "same", "bytes seconds"),
    of("--moe-layer-freq", text, "1", "which layers have experts", "--model FOLDER/config.json", "missing", "all"),
    of("--moe-token-dispatcher-type", word("allgather", "alltoall", "flex"), "allgather", "how tokens reach experts",
        "--dispatcher", "same", "bytes traffic", myth="all-to-all by default"),
    off("--moe-enable-deepep", "with flex: DeepEP's exchange", "--dispatcher deepep", "same", "seconds"),
    of("--moe-flex-dispatcher-backend", word("deepep", "hybridep", "ncclep"), "deepep", "with flex: whose exchange",
        "--dispatcher deepep", "near", "seconds"),
    of("--moe-router-load-balancing-type", words, ["aux_loss"], "what balances experts",
        "--aux-loss, --aux-loss-over", "same", "none"),
    of("--moe-aux-loss-coeff", numbers, [0.0], "factor of that loss", "--aux-loss", "same", "none"),
    of("--moe-z-loss-coeff", number, None, "factor of the router's z-loss", "--z-loss", "same", "none"),
    off("--moe-router-enable-expert-bias", "biases that balance experts without a loss", "--bias-rate", "same", "none"),
    of("--moe-router-bias-update-rate", number, 1e-3, "step of those biases", "--bias-rate", "same", "none"),
    of("--moe-router-dtype", word("fp32", "fp64"), None, "the router's dtype; the model's", "--router-dtype", "same",
        "bytes"),
    of("--moe-expert-capacity-factor", number, None, "most tokens of an expert; none: none is dropped",
        "--capacity-factor", "same", "bytes traffic"),
    off("--moe-pad-expert-input-to-capacity", "every expert computes as many rows", "--pad-to-capacity", "same",
         "bytes traffic"),
    of("--moe-token-drop-policy", word("probs", "position"), "probs", "which tokens are dropped", "--token-drop",
        "same", "none"),
    off("--moe-grouped-gemm", "one grouped product for a rank's experts; without, one expert after the other",
         "--experts-kernel grouped", "near", "seconds"),
    off("--moe-layer-recompute --moe-extended-tp --moe-use-legacy-grouped-gemm --moe-apply-probs-on-input",
         "older or other forms of experts", "", "missing", "bytes"),
    of("--moe-router-num-groups --moe-router-group-topk", whole, None, "choose groups of experts first",
        "--model FOLDER/config.json", "missing", "traffic"),
)  # fmt: skip
OF_SWIFT = (
    of("--max-length", whole, None, "ms-swift: tokens per row", "--seq", "same", "bytes"),
    of("--train-type --tuner-type", text, "full", "ms-swift: adapters, or all parameters", "--lora-rank", "missing",
       "all"),
)  # fmt: skip
"""Arguments of ms-swift alone that change a step."""
