"""Llama's layers: RMS norms, rotary grouped-query attention, SwiGLU, no biases.

Parameters bear the names and the layouts of Hugging Face's Llama, (out, in), so that released weights
fit as they are; q|k|v and gate|up are separate parameters whose results lie packed in one buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import add

from zerosim import functional as F
from zerosim.functional.policy import ActivationPolicy
from zerosim.nn.group import ONE_RANK, Group
from zerosim.nn.leaf import Tensors, leaf
from zerosim.tensor.flat import Flat
from zerosim.tensor.tensor import Tensor


class RMSNorm:
    """`functional.rms_norm` of the last dim; weight (D) starts at 1."""

    def __init__(
        self, flat: Flat | Tensors, name: str, width: int, eps: float, policy: ActivationPolicy, *, summed: bool = False
    ) -> None:
        self.weight = flat.declare(f"{name}.weight", (width,), fill=1.0, summed=summed)
        self.eps = eps
        self.policy = policy

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight, self.eps, policy=self.policy)


class PackedMaps:
    """Maps (wide, D) of one x (..., D), by name: (wide, pieces that it is cut into). Their results lie side by side."""

    def __init__(
        self, flat: Flat | Tensors, width: int, maps: Mapping[str, tuple[int, int]], *, std: float, group: Group
    ) -> None:
        self.weights = [
            flat.declare(
                f"{name}.weight", (wide, width), std=std, split=group.maps.split((wide, width), 0, pieces=pieces)
            )
            for name, (wide, pieces) in maps.items()
        ]
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.maps.packed_linear(x, self.weights)


class RowMap:
    """A map (D, I) back to the width, cut by inputs. Shapes: x (..., I), y (..., D)."""

    def __init__(self, flat: Flat | Tensors, name: str, width: int, inner: int, *, std: float, group: Group) -> None:
        shape = width, inner
        self.weight = flat.declare(f"{name}.weight", shape, std=std, split=group.maps.split(shape, 1))
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.maps.row_linear(x, self.weight, transposed=True)


class LlamaAttention:
    """q_proj (D, D), k_proj and v_proj (D K/H, D), rotary positions, causal attention, o_proj (D, D).

    H query heads share K key and value heads, H/K neighbours each. A tensor-parallel group divides both; where it has
    more members than K, neighbours hold copies of one key-value head. Shapes: x and y (B, T, D).
    """

    def __init__(
        self,
        flat: Flat | Tensors,
        name: str,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        rope_base: float,
        std: tuple[float, float],
        policy: ActivationPolicy,
        group: Group = ONE_RANK,
    ) -> None:
        narrow, pieces = width // num_heads * num_kv_heads, min(num_kv_heads, group.maps.size)
        maps = {"q": (width, group.maps.size), "k": (narrow, pieces), "v": (narrow, pieces)}
        named = {f"{name}.{part}_proj": sizes for part, sizes in maps.items()}
        self.qkv_proj = leaf(
            flat, "self_attn.qkv_proj", lambda own: PackedMaps(own, width, named, std=std[0], group=group)
        )
        self.o_proj = leaf(
            flat,
            "self_attn.o_proj",
            lambda own: RowMap(own, f"{name}.o_proj", width, width, std=std[1], group=group),
        )
        self.num_heads = num_heads // group.maps.size
        self.num_kv_heads = num_kv_heads // pieces
        self.rope_base = rope_base
        self.policy = policy
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        qkv = F.rotary(self.qkv_proj(x), self.num_heads, self.num_kv_heads, base=self.rope_base)
        y = self.group.attention(qkv, self.num_heads, num_kv_heads=self.num_kv_heads, policy=self.policy)
        return self.policy.run("attn_proj", self.o_proj, y)


class LlamaFeedForward:
    """down_proj (D, F) of silu(gate_proj x) * up_proj x, both (F, D). Shapes: x and y (..., D); F is `wide`."""

    def __init__(
        self,
        flat: Flat | Tensors,
        name: str,
        width: int,
        wide: int,
        std: tuple[float, float],
        policy: ActivationPolicy,
        group: Group = ONE_RANK,
    ) -> None:
        named = {f"{name}.{part}_proj": (wide, group.maps.size) for part in ("gate", "up")}
        self.gate_up_proj = leaf(
            flat, "mlp.gate_up_proj", lambda own: PackedMaps(own, width, named, std=std[0], group=group)
        )
        self.down_proj = leaf(
            flat, "mlp.down_proj", lambda own: RowMap(own, f"{name}.down_proj", width, wide, std=std[1], group=group)
        )
        self.policy = policy

    def __call__(self, x: Tensor) -> Tensor:
        run = self.policy.run
        return self.down_proj(run("mlp_act", F.swiglu, run("fc1", self.gate_up_proj, x)))


class LlamaBlock:
    """x + self_attn(input_layernorm(x)), then x + mlp(post_attention_layernorm(x)). Shapes: x and y (B, T, D)."""

    def __init__(
        self,
        flat: Flat | Tensors,
        name: str,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        ffn: int,
        norm_eps: float,
        rope_base: float,
        std: tuple[float, float],
        policy: ActivationPolicy,
        group: Group = ONE_RANK,
    ) -> None:

        def norm(which: str) -> Callable[[Tensor], Tensor]:
            summed = group.rows.is_cut
            return leaf(
                flat, which, lambda own: RMSNorm(own, f"{name}.{which}", width, norm_eps, policy, summed=summed)
            )

        self.input_layernorm = norm("input_layernorm")
        self.self_attn = LlamaAttention(
            flat, f"{name}.self_attn", width, num_heads, num_kv_heads, rope_base, std, policy, group
        )
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.mlp = LlamaFeedForward(flat, f"{name}.mlp", width, ffn, std, policy, group)
        self.policy = policy

    def __call__(self, x: Tensor) -> Tensor:
        run = self.policy.run
        x = run("attn_proj", add, x, self.self_attn(run("layernorm", self.input_layernorm, x)))
        return x + self.mlp(run("layernorm", self.post_attention_layernorm, x))
