"""Llama's layers: RMS norms, rotary grouped-query attention, SwiGLU, no biases.

Parameters have the names and the layouts of Hugging Face's Llama, (out, in), so released weights
fit unchanged; q|k|v and gate|up are separate parameters with results packed in one buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import add

from zerosim import functional as F
from zerosim.functional.linear import PackedLinear, packed_linear_result
from zerosim.nn.context import LayerContext
from zerosim.nn.lora import Adapters, Target
from zerosim.tensor.tensor import Tensor


class RMSNorm:
    """`functional.rms_norm` of the last dim; weight (D) starts at 1."""

    def __init__(self, here: LayerContext) -> None:
        self.weight = here.declare("weight", (here.sizes.hidden,), fill=1.0, summed=here.group.rows.is_cut)
        self.eps = here.sizes.norm_eps
        self.policy = here.policy

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight, self.eps, policy=self.policy)


class PackedMaps:
    """Maps (wide, D) of one x (..., D), by name: (wide, pieces that it is cut into). Their results are side by side."""

    def __init__(self, here: LayerContext, maps: Mapping[str, tuple[int, int]]) -> None:
        self.maps = here.group.maps
        self.weights, targets, first, rank = [], list[Target](), 0, here.tuning.lora_rank
        for name, (wide, pieces) in maps.items():
            shape = wide, here.sizes.hidden
            split, at = self.maps.split(shape, 0, pieces=pieces), here.beside(name)
            self.weights.append(at.declare("weight", shape, outputs=0, std=here.std, split=split))
            split_b = self.maps.split((wide, rank), 0, pieces=pieces)
            targets.append(Target(at.name, shape[1], wide, first, split_b=split_b))
            first += wide // pieces
        self.adapters = Adapters(here, targets)

    def __call__(self, x: Tensor) -> Tensor:
        weights = self.weights
        if not self.adapters:
            return self.maps.packed_linear(x, weights)
        run, rule = partial(packed_linear_result, weights=weights), partial(PackedLinear, weights=weights)
        return self.adapters.columns(x, weights, run, rule)


class RowMap:
    """A map (D, I) back to the width, cut by its `inner` inputs. Shapes: x (..., I), y (..., D)."""

    def __init__(self, here: LayerContext, inner: int) -> None:
        self.maps = here.group.maps
        shape = here.sizes.hidden, inner
        self.weight = here.declare("weight", shape, outputs=0, std=here.std_out, split=self.maps.split(shape, 1))
        split = self.maps.split((here.tuning.lora_rank, inner), 1)
        self.adapters = Adapters(here, [Target(here.name, inner, shape[0], split_a=split)], by_rows=True)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.adapters:
            return self.maps.row_linear(x, self.weight, transposed=True)
        return self.adapters.rows(x, self.weight, transposed=True)


class LlamaAttention:
    """q_proj (D, D), k_proj and v_proj (D K/H, D), rotary positions, causal attention, o_proj (D, D).

    H query heads share K key and value heads, H/K neighbours each. A group divides both; if it has more members
    than K, neighbours hold copies of one key-value head. Shapes: x and y (B, T, D).
    """

    def __init__(self, here: LayerContext) -> None:
        sizes, ranks = here.sizes, here.group.maps.size
        narrow, pieces = sizes.hidden // sizes.heads * sizes.kv_heads, min(sizes.kv_heads, ranks)
        maps = {"q_proj": (sizes.hidden, ranks), "k_proj": (narrow, pieces), "v_proj": (narrow, pieces)}
        self.qkv_proj = here.map("qkv_proj", PackedMaps, maps)
        self.o_proj = here.map("o_proj", RowMap, sizes.hidden)
        self.rows = here.group.rows
        self.core = here.group.attention
        self.num_heads = sizes.heads // ranks
        self.num_kv_heads = sizes.kv_heads // pieces
        self.rope_base = sizes.rope_base
        self.policy = here.policy

    def __call__(self, x: Tensor) -> Tensor:
        qkv = self.rows.rotary(self.qkv_proj(x), self.num_heads, self.num_kv_heads, base=self.rope_base)
        y = self.core(qkv, self.num_heads, num_kv_heads=self.num_kv_heads, policy=self.policy)
        return self.policy.run("attn_proj", self.o_proj, y)


class LlamaFeedForward:
    """down_proj (D, F) of silu(gate_proj x) * up_proj x, both (F, D). Shapes: x and y (..., D); F is the `ffn`."""

    def __init__(self, here: LayerContext) -> None:
        each = here.sizes.ffn, here.group.maps.size
        self.gate_up_proj = here.map("gate_up_proj", PackedMaps, {"gate_proj": each, "up_proj": each})
        self.down_proj = here.map("down_proj", RowMap, here.sizes.ffn)
        self.policy = here.policy

    def __call__(self, x: Tensor) -> Tensor:
        run = self.policy.run
        return self.down_proj(run("mlp_act", F.swiglu, run("fc1", self.gate_up_proj, x)))


class LlamaBlock:
    """x + self_attn(input_layernorm(x)), then x + mlp(post_attention_layernorm(x)). Shapes: x and y (B, T, D)."""

    def __init__(self, here: LayerContext) -> None:
        self.input_layernorm = here.leaf("input_layernorm", RMSNorm)
        self.self_attn = LlamaAttention(here / "self_attn")
        self.post_attention_layernorm = here.leaf("post_attention_layernorm", RMSNorm)
        self.mlp = LlamaFeedForward(here / "mlp")
        self.policy = here.policy

    def __call__(self, x: Tensor) -> Tensor:
        run = self.policy.run
        x = run("attn_proj", add, x, self.self_attn(run("layernorm", self.input_layernorm, x)))
        return x + self.mlp(run("layernorm", self.post_attention_layernorm, x))
