"""Llama's layers: RMS norms, rotary grouped-query attention, SwiGLU, no biases.

Parameters bear the names and the layouts of Hugging Face's Llama, (out, in), so that released weights
fit as they are; q|k|v and gate|up are separate parameters whose results lie packed in one buffer.
"""

from __future__ import annotations

from operator import add

from zerosim import functional as F
from zerosim.functional.policy import ActivationPolicy
from zerosim.nn.group import ALONE, Alone
from zerosim.tensor.flat import Flat
from zerosim.tensor.tensor import Tensor


class RMSNorm:
    """`functional.rms_norm` of the last dim; weight (D) starts at 1."""

    def __init__(
        self, flat: Flat, name: str, width: int, eps: float, policy: ActivationPolicy, *, summed: bool = False
    ) -> None:
        self.weight = flat.declare(f"{name}.weight", (width,), fill=1.0, summed=summed)
        self.eps = eps
        self.policy = policy

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight, self.eps, policy=self.policy)


class LlamaAttention:
    """q_proj (D, D), k_proj and v_proj (D K/H, D), rotary positions, causal attention, o_proj (D, D).

    H query heads share K key and value heads, H/K neighbours each. A tensor-parallel group divides both; where it has
    more members than K, neighbours hold copies of one key-value head. Shapes: x and y (B, T, D).
    """

    def __init__(
        self,
        flat: Flat,
        name: str,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        rope_base: float,
        std: tuple[float, float],
        policy: ActivationPolicy,
        group: Alone = ALONE,
    ) -> None:
        narrow, pieces = width // num_heads * num_kv_heads, min(num_kv_heads, group.size)
        self.qkv_proj = [
            flat.declare(
                f"{name}.{part}_proj.weight", (wide, width), std=std[0], split=group.split((wide, width), 0, pieces=n)
            )
            for part, wide, n in (("q", width, group.size), ("k", narrow, pieces), ("v", narrow, pieces))
        ]
        self.o_proj = flat.declare(
            f"{name}.o_proj.weight", (width, width), std=std[1], split=group.split((width, width), 1)
        )
        self.group = group
        self.num_heads = num_heads // group.size
        self.num_kv_heads = num_kv_heads // pieces
        self.rope_base = rope_base
        self.policy = policy

    def __call__(self, x: Tensor) -> Tensor:
        qkv = self.group.packed_linear(x, self.qkv_proj)
        qkv = F.rotary(qkv, self.num_heads, self.num_kv_heads, base=self.rope_base)
        y = F.attention(qkv, self.num_heads, num_kv_heads=self.num_kv_heads, policy=self.policy)
        return self.policy.run("attn_proj", self._out, y)

    def _out(self, y: Tensor) -> Tensor:
        return self.group.row_linear(y, self.o_proj, transposed=True)


class LlamaFeedForward:
    """down_proj (D, F) of silu(gate_proj x) * up_proj x, both (F, D). Shapes: x and y (..., D); F is `wide`."""

    def __init__(
        self,
        flat: Flat,
        name: str,
        width: int,
        wide: int,
        std: tuple[float, float],
        policy: ActivationPolicy,
        group: Alone = ALONE,
    ) -> None:
        split = group.split((wide, width), 0)
        self.gate_up_proj = [
            flat.declare(f"{name}.{part}_proj.weight", (wide, width), std=std[0], split=split)
            for part in ("gate", "up")
        ]
        self.down_proj = flat.declare(
            f"{name}.down_proj.weight", (width, wide), std=std[1], split=group.split((width, wide), 1)
        )
        self.policy = policy
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        run = self.policy.run
        y = run("mlp_act", F.swiglu, run("fc1", self._gate_up, x))
        return self.group.row_linear(y, self.down_proj, transposed=True)

    def _gate_up(self, x: Tensor) -> Tensor:
        return self.group.packed_linear(x, self.gate_up_proj)


class LlamaBlock:
    """x + self_attn(input_layernorm(x)), then x + mlp(post_attention_layernorm(x)). Shapes: x and y (B, T, D)."""

    def __init__(
        self,
        flat: Flat,
        name: str,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        ffn: int,
        norm_eps: float,
        rope_base: float,
        std: tuple[float, float],
        policy: ActivationPolicy,
        group: Alone = ALONE,
    ) -> None:
        summed = group.cuts_rows
        self.input_layernorm = RMSNorm(flat, f"{name}.input_layernorm", width, norm_eps, policy, summed=summed)
        self.self_attn = LlamaAttention(
            flat, f"{name}.self_attn", width, num_heads, num_kv_heads, rope_base, std, policy, group
        )
        self.post_attention_layernorm = RMSNorm(
            flat, f"{name}.post_attention_layernorm", width, norm_eps, policy, summed=summed
        )
        self.mlp = LlamaFeedForward(flat, f"{name}.mlp", width, ffn, std, policy, group)
        self.policy = policy

    def __call__(self, x: Tensor) -> Tensor:
        run = self.policy.run
        x = run("attn_proj", add, x, self.self_attn(run("layernorm", self.input_layernorm, x)))
        return x + self.mlp(run("layernorm", self.post_attention_layernorm, x))
