"""The rows of the families that zerosim trains, by the `model_type` of their config.json; GPT-2's is gpt.

A row says what transformers 5.24 computes (`modeling_*.py`), with the names of released weights. A further family whose
parts are there is one more row.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from zerosim.placement.block import (
    BALANCE,
    Between,
    Block,
    Branch,
    Decoder,
    Experts,
    Latent,
    Map,
    Masked,
    Out,
    Second,
    Width,
)

Layout = Literal["in_out", "out_in"]


def _qkv(q: str, k: str, v: str) -> tuple[Out, ...]:
    return Out(q, "heads", ("q",)), Out(k, "kv_heads", ("k",)), Out(v, "kv_heads", ("v",))


def _back(name: str, *, bias: bool = True, layout: Layout = "out_in") -> Map:
    """Return attention's map back to the width."""
    return Map(name, layout=layout, bias=bias, words=("o",), part="attn_proj")


def _fully(
    into: str, back: str, before: str, name: str = "mlp", *, bias: bool = True, layout: Layout = "out_in"
) -> Branch:
    """Return a feed-forward that is not gated."""
    columns = Map(into, (Out("", "ffn", ("fc", "up")),), layout=layout, bias=bias, part="fc1")
    return Branch(name, columns, Map(back, layout=layout, bias=bias, words=("down",)), before)


GPT = Decoder(
    Block(
        Branch(
            "attn",
            Map("c_attn", _qkv("q", "k", "v"), layout="in_out", bias=True),
            _back("c_proj", layout="in_out"),
            before="ln_1",
        ),
        _fully("c_fc", "c_proj", "ln_2", layout="in_out"),
        norm="layer",
        between="gelu_tanh",
        dropout=True,
    ),
    positions="learned",
    table="wte",
    blocks="h",
    last_norm="ln_f",
    tied=True,
    shares_keys=False,
)
LLAMA = Decoder(
    Block(
        Branch(
            "self_attn",
            Map("qkv_proj", _qkv("q_proj", "k_proj", "v_proj"), fused=False),
            _back("o_proj", bias=False),
            before="input_layernorm",
        ),
        Branch(
            "mlp",
            Map(
                "gate_up_proj",
                (Out("gate_proj", "ffn", ("gate",)), Out("up_proj", "ffn", ("up",))),
                fused=False,
                part="fc1",
            ),
            Map("down_proj", words=("down",)),
            before="post_attention_layernorm",
        ),
        norm="rms",
        between="swiglu",
    ),
    positions="rotary",
    table="embed_tokens",
    blocks="layers",
    last_norm="norm",
    prefix="model.",
)


def biased(row: Decoder, *, columns: bool = True, rows: bool = True, mlp: bool = False) -> Decoder:
    """Return the row with biases in attention's maps, and in the feed-forward's."""

    def of(branch: Branch, columns: bool, rows: bool) -> Branch:
        into, back = branch.columns, branch.rows
        return branch._replace(columns=into._replace(bias=columns), rows=back._replace(bias=rows))

    block = row.block
    return row._replace(block=block._replace(attention=of(block.attention, columns, rows), mlp=of(block.mlp, mlp, mlp)))


def _blocks(row: Decoder, **changes: Any) -> Decoder:
    return row._replace(block=row.block._replace(**changes))


_ATTENTION, _MLP = LLAMA.block.branches
_NORMS_AROUND = {
    "attention": _ATTENTION._replace(after="post_attention_layernorm"),
    "mlp": _MLP._replace(before="pre_feedforward_layernorm", after="post_feedforward_layernorm"),
}
_NORMS_AFTER = {
    "attention": _ATTENTION._replace(before="", after="post_attention_layernorm"),
    "mlp": _MLP._replace(before="", after="post_feedforward_layernorm"),
}

QWEN2 = biased(LLAMA, rows=False)
QWEN3 = _blocks(LLAMA, qk_norm="head")
GEMMA = _blocks(LLAMA, norm="rms + 1", between="geglu")._replace(scaled=True, tied=True)
GEMMA2 = _blocks(GEMMA, **_NORMS_AROUND)
GEMMA3 = _blocks(GEMMA2, qk_norm="head")
OLMO2 = _blocks(LLAMA, **_NORMS_AFTER, qk_norm="all", rounds_last=True)
PHI3 = _blocks(
    LLAMA,
    attention=_ATTENTION._replace(columns=Map("qkv_proj", _qkv("q", "k", "v"))),
    mlp=_MLP._replace(
        columns=Map("gate_up_proj", (Out("gate", "ffn", ("gate",)), Out("up", "ffn", ("up",))), part="fc1")
    ),
)
GLM4 = _blocks(
    LLAMA,
    attention=_ATTENTION._replace(after="post_self_attn_layernorm"),
    mlp=PHI3.block.mlp._replace(after="post_mlp_layernorm"),
)._replace(interleaved=True)
SMOLLM3 = LLAMA._replace(tied=True)
COHERE = _blocks(LLAMA, norm="layer without bias", parallel=True, mlp=_MLP._replace(before=_ATTENTION.before))._replace(
    interleaved=True, tied=True
)


def latent(*, low_rank: bool = True, bias: bool = False) -> Branch:
    """Return DeepSeek's attention; `low_rank`: queries are made of a latent too."""

    def columns(name: str, wide: Width, *words: str, inner: Width | None = None, bias: bool = False) -> Map:
        return Map(name, (Out("", wide, words),), bias=bias, inner=inner, part="mla_up" if inner else "")

    kv_a, kv_b = (
        columns("kv_a_proj_with_mqa", "kv_latent", "k", "v", bias=bias),
        columns("kv_b_proj", "pairs", "k", "v", inner="latent"),
    )
    maps = Latent(kv_a, kv_b, "kv_a_layernorm")
    first = columns("q_proj", "heads", "q")._replace(part="mla_up")
    if low_rank:
        first = columns("q_a_proj", "q_latent", "q", bias=bias)
        maps = maps._replace(q=columns("q_b_proj", "heads", "q", inner="q_latent"), q_norm="q_a_layernorm")
    return _ATTENTION._replace(columns=first, rows=_back("o_proj", bias=bias)._replace(inner="values"), latent=maps)


def _experts(row: Decoder, experts: Experts, *, renames: bool = True) -> Decoder:
    """Return the row with experts in its feed-forward."""
    return _blocks(row, mlp=row.block.mlp._replace(experts=experts), renames=renames)


_W123 = Experts(stored=("experts.{}.w1", "experts.{}.w3", "experts.{}.w2"), in_files=((".mlp.", ".block_sparse_moe."),))
MIXTRAL = _experts(LLAMA, _W123)
MINIMAX_M2 = _experts(
    _blocks(LLAMA, qk_norm="all"),
    _W123._replace(
        router="sigmoid",
        biased=True,
        in_files=((f".mlp.gate.{BALANCE}", f".block_sparse_moe.{BALANCE}"), *_W123.in_files),
    ),
)
QWEN2_MOE = _experts(
    QWEN2, Experts(normed=False, shared="shared_expert", shared_gate="shared_expert_gate"), renames=False
)
QWEN3_MOE = _experts(QWEN3, Experts(normed=False))
OLMOE = _experts(_blocks(LLAMA, qk_norm="all"), Experts(normed=False))
_BALANCED = Experts("sigmoid", ranks="two", shared="shared_experts", biased=True, is_wide=True)
GLM4_MOE = _experts(biased(LLAMA, rows=False), _BALANCED)
DOTS1 = _experts(QWEN3, _BALANCED)
EXAONE_MOE = _experts(QWEN3, _BALANCED._replace(in_files=((f".mlp.gate.{BALANCE}", f".mlp.{BALANCE}"),)))
_DEEPSEEK = _blocks(LLAMA, attention=latent(), core="latent")._replace(interleaved=True, shares_keys=False)
DEEPSEEK_V2 = _experts(_DEEPSEEK, Experts(normed=False, shared="shared_experts", is_wide=True))
DEEPSEEK_V3 = _experts(_DEEPSEEK, _BALANCED)
GPT_OSS = _experts(
    _blocks(biased(LLAMA), sinks=True, between="clamped_swiglu", rounds_last=True),
    Experts("softmax of chosen", normed=False, gate="router", gate_bias=True, layout="in_out", bias=True, stored=()),
    renames=False,
)
LLAMA4 = _experts(
    _blocks(LLAMA, qk_norm="plain", mlp=_MLP._replace(name="feed_forward")),
    Experts(
        "sigmoid", normed=False, applied="inputs", gate="router", layout="in_out", shared="shared_expert", stored=()
    ),
    renames=False,
)._replace(interleaved=True)
ERNIE4_5_MOE = _experts(
    LLAMA,
    Experts(
        shared="shared_experts",
        biased=True,
        is_wide=True,
        in_files=((f".gate.{BALANCE}", f".moe_statics.{BALANCE}"),),
        row_of_biases=True,
    ),
)._replace(interleaved=True, tied=True)
HUNYUAN_V1_MOE = _experts(
    _blocks(LLAMA, qk_norm="head", qk_names=("query_layernorm", "key_layernorm"), rotates_first=True),
    Experts(gate="gate.wg", is_wide=True, shared="shared_mlp"),
)
GRANITEMOE = _experts(
    _blocks(LLAMA, mlp=_MLP._replace(name="block_sparse_moe")),
    Experts(
        "softmax of chosen",
        normed=False,
        gate="router",
        stored=(),
        in_files=(
            (".experts.gate_up_proj", ".input_linear.weight"),
            (".experts.down_proj", ".output_linear.weight"),
            (".router.weight", ".router.layer.weight"),
        ),
    ),
    renames=False,
)
WITH_EXPERTS: Mapping[str, Experts] = MappingProxyType(
    {
        "gpt": Experts(stacks=("experts.c_fc", "experts.c_proj"), layout="in_out", shared="shared_experts"),
        "llama": Experts(shared="shared_experts"),
    }
)
"""The experts of families that are dense without them."""
STARCODER2 = _blocks(
    biased(LLAMA), norm="layer", between="gelu_tanh", mlp=_fully("c_fc", "c_proj", "post_attention_layernorm")
)._replace(tied=True)
PHI = _blocks(
    biased(LLAMA),
    attention=_ATTENTION._replace(columns=_ATTENTION.columns._replace(bias=True), rows=_back("dense")),
    mlp=_fully("fc1", "fc2", _ATTENTION.before),
    norm="layer",
    between="gelu_tanh",
    parallel=True,
)._replace(last_norm="final_layernorm", head_bias=True)
GPTJ = Decoder(
    Block(
        Branch(
            "attn",
            Map("qkv_proj", _qkv("q_proj", "k_proj", "v_proj"), fused=False),
            _back("out_proj", bias=False),
            before="ln_1",
        ),
        _fully("fc_in", "fc_out", "ln_1"),
        norm="layer",
        between="gelu_tanh",
        parallel=True,
        dropout=True,
    ),
    positions="rotary",
    table="wte",
    blocks="h",
    last_norm="ln_f",
    prefix="transformer.",
    interleaved=True,
    head_bias=True,
    shares_keys=False,
)
NEOX = Decoder(
    Block(
        Branch(
            "attention",
            Map("query_key_value", _qkv("query", "key", "value"), bias=True, stored="heads"),
            _back("dense"),
            before="input_layernorm",
        ),
        _fully("dense_h_to_4h", "dense_4h_to_h", "post_attention_layernorm"),
        norm="layer",
        between="gelu",
        parallel=True,
        dropout=True,
    ),
    positions="rotary",
    table="embed_in",
    blocks="layers",
    last_norm="final_layer_norm",
    prefix="gpt_neox.",
    head="embed_out",
    shares_keys=False,
)
BLOOM = _blocks(
    NEOX, attention=NEOX.block.attention._replace(name="self_attention"), between="gelu_tanh", parallel=False
)._replace(
    positions="alibi",
    table="word_embeddings",
    table_norm="word_embeddings_layernorm",
    blocks="h",
    last_norm="ln_f",
    prefix="transformer.",
    head="lm_head",
    tied=True,
)
_GROUPED = Map("query_key_value", _qkv("query", "key", "value"), stored="groups")
FALCON = BLOOM._replace(
    block=Block(
        Branch("self_attention", _GROUPED, _back("dense", bias=False), before="input_layernorm"),
        _fully("dense_h_to_4h", "dense_4h_to_h", "input_layernorm", bias=False),
        norm="layer",
        between="gelu",
        parallel=True,
    ),
    positions="rotary",
    table_norm="",
    shares_keys=True,
)
OPT = Decoder(
    Block(
        Branch(
            "self_attn",
            Map("qkv_proj", _qkv("q_proj", "k_proj", "v_proj"), fused=False, bias=True),
            _back("out_proj"),
            before="self_attn_layer_norm",
        ),
        _fully("fc1", "fc2", "final_layer_norm", name=""),
        norm="layer",
        between="relu",
        dropout=True,
    ),
    positions="learned",
    table="embed_tokens",
    blocks="layers",
    last_norm="final_layer_norm",
    prefix="model.decoder.",
    position_table="embed_positions",
    first_position=2,
    tied=True,
    shares_keys=False,
)
BIGCODE = _blocks(
    GPT,
    attention=GPT.block.attention._replace(
        columns=Map("c_attn", _qkv("q", "k", "v"), bias=True, stored="groups"),
        rows=_back("c_proj"),
    ),
    mlp=_fully("c_fc", "c_proj", "ln_2"),
)._replace(prefix="transformer.", shares_keys=True)
BERT = Decoder(
    Block(
        Branch(
            "attention",
            Map("qkv_proj", _qkv("self.query", "self.key", "self.value"), fused=False, bias=True),
            _back("output.dense"),
            after="attention.output.LayerNorm",
        ),
        _fully("intermediate.dense", "output.dense", "", name="")._replace(after="output.LayerNorm"),
        norm="layer",
        between="gelu",
        dropout=True,
        norms_sum=True,
        causal=False,
    ),
    positions="learned",
    table="embeddings.word_embeddings",
    table_norm="embeddings.LayerNorm",
    blocks="encoder.layer",
    last_norm="",
    prefix="bert.",
    position_table="embeddings.position_embeddings",
    head="cls.predictions",
    head_bias=True,
    tied=True,
    shares_keys=False,
    masked=Masked("token_type_embeddings", "lm_head.transform", "LayerNorm"),
)
ROBERTA = BERT._replace(
    prefix="roberta.",
    first_position=2,
    head="lm_head",
    masked=Masked("token_type_embeddings", "lm_head", "layer_norm"),
)


def _t5(branch: Branch, number: int, name: str, **changes: Any) -> Branch:
    """Return a branch of T5's block, with the norm before it: both are in layer `number`."""
    return branch._replace(name=f"layer.{number}.{name}", before=f"layer.{number}.layer_norm", **changes)


_T5_ATTENTION = Branch("", Map("qkv", _qkv("q", "k", "v"), fused=False), Map("o", words=("o",), part="attn_proj"))


def t5(between: Between = "relu") -> Decoder:
    """Return T5's row, with this function in its feed-forwards: gated ones have two maps into it."""
    into = Map("wi", (Out("", "ffn", ("fc", "up")),), part="fc1")
    if between == "geglu":
        into = Map("wi", (Out("wi_0", "ffn", ("gate",)), Out("wi_1", "ffn", ("up",))), fused=False, part="fc1")
    mlp = Branch("", into, Map("wo", words=("down",)))
    encoder = Block(
        _t5(_T5_ATTENTION, 0, "SelfAttention"),
        _t5(mlp, 1, "DenseReluDense"),
        norm="rms",
        between=between,
        dropout=True,
        causal=False,
        biases="layer.0.SelfAttention.relative_attention_bias",
        query_scale=1.0,
        inner_dropout=True,
    )
    q, k, v = _qkv("q", "k", "v")
    maps = {"columns": Map("q", (q,), fused=False), "memory": Map("kv", (k, v), fused=False)}
    decoder = encoder._replace(
        causal=True,
        cross=_t5(_T5_ATTENTION, 1, "EncDecAttention", **maps),
        mlp=_t5(mlp, 2, "DenseReluDense"),
    )
    return Decoder(
        encoder,
        positions="none",
        table="shared",
        blocks="encoder.block",
        last_norm="encoder.final_layer_norm",
        tied=True,
        shares_keys=False,
        scales_head=True,
        second=Second(decoder, "decoder.block", "decoder.final_layer_norm"),
    )


DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {
        "gpt": GPT,
        "llama": LLAMA,
        "mistral": LLAMA,
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "gemma": GEMMA,
        "gemma2": GEMMA2,
        "gemma3_text": GEMMA3,
        "olmo2": OLMO2,
        "granite": LLAMA,
        "seed_oss": QWEN2,
        "glm4": GLM4,
        "phi3": PHI3,
        "smollm3": SMOLLM3,
        "gpt_oss": GPT_OSS,
        "llama4_text": LLAMA4,
        "deepseek_v2": DEEPSEEK_V2,
        "deepseek_v3": DEEPSEEK_V3,
        "cohere": COHERE,
        "starcoder2": STARCODER2,
        "phi": PHI,
        "gptj": GPTJ,
        "gpt_neox": NEOX,
        "bloom": BLOOM,
        "falcon": FALCON,
        "opt": OPT,
        "gpt_bigcode": BIGCODE,
        "bert": BERT,
        "roberta": ROBERTA,
        "t5": t5(),
        "mixtral": MIXTRAL,
        "qwen2_moe": QWEN2_MOE,
        "qwen3_moe": QWEN3_MOE,
        "olmoe": OLMOE,
        "glm4_moe": GLM4_MOE,
        "dots1": DOTS1,
        "exaone_moe": EXAONE_MOE,
        "minimax_m2": MINIMAX_M2,
        "ernie4_5_moe": ERNIE4_5_MOE,
        "hunyuan_v1_moe": HUNYUAN_V1_MOE,
        "granitemoe": GRANITEMOE,
    }
)
"""Every family with blocks."""
