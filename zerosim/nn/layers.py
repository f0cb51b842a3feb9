"""GPT-2's layers: each declares its parameters in a flat buffer (`tensor/flat.py`) under GPT-2's names, and is then a
function of tensors: of x (..., D), D its width, which gives y of the same shape where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add

from zerosim import functional as F
from zerosim.functional.policy import DEFAULT, ActivationPolicy
from zerosim.nn.group import ONE_RANK, Group
from zerosim.nn.leaf import Tensors, leaf
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import DropoutKeys
from zerosim.tensor.tensor import Tensor


class Linear:
    """y = x @ weight + bias. Shapes: x (..., I), weight (I, O), bias (O), y (..., O); I is `width`, O is `wide`.

    `std` is that of the weight's initial normals; the bias starts at 0.
    """

    def __init__(self, flat: Flat | Tensors, name: str, width: int, wide: int, *, std: float) -> None:
        self.weight = flat.declare(f"{name}.weight", (width, wide), std=std)
        self.bias = flat.declare(f"{name}.bias", (wide,))

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ColumnLinear:
    """`Linear` whose outputs are cut over a tensor-parallel group; `parts` of them, such as q|k|v, apart."""

    def __init__(
        self, flat: Flat | Tensors, name: str, width: int, wide: int, *, std: float, group: Group, parts: int = 1
    ) -> None:
        shape = width, wide
        self.weight = flat.declare(f"{name}.weight", shape, std=std, split=group.maps.split(shape, 1, parts=parts))
        self.bias = flat.declare(f"{name}.bias", (wide,), split=group.maps.split((wide,), 0, parts=parts))
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.maps.column_linear(x, self.weight, self.bias)


class RowLinear:
    """`Linear` whose inputs are cut over a tensor-parallel group; the bias is whole."""

    def __init__(self, flat: Flat | Tensors, name: str, width: int, wide: int, *, std: float, group: Group) -> None:
        shape = width, wide
        self.weight = flat.declare(f"{name}.weight", shape, std=std, split=group.maps.split(shape, 0))
        self.bias = flat.declare(f"{name}.bias", (wide,), summed=group.rows.is_cut)
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.maps.row_linear(x, self.weight, self.bias)


class LayerNorm:
    """`functional.layer_norm` of the last dim; weight (D) starts at 1, bias (D) at 0."""

    def __init__(
        self,
        flat: Flat | Tensors,
        name: str,
        width: int,
        *,
        eps: float = 1e-5,
        policy: ActivationPolicy = DEFAULT,
        summed: bool = False,
    ) -> None:
        self.weight = flat.declare(f"{name}.weight", (width,), fill=1.0, summed=summed)
        self.bias = flat.declare(f"{name}.bias", (width,), summed=summed)
        self.eps = eps
        self.policy = policy

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight, self.bias, self.eps, policy=self.policy)


class Dropout:
    """Drops by `probability` in training, and nothing elsewhere; `op` names its random numbers within the unit.

    Without `keep_mask` backward makes the mask again.
    """

    def __init__(
        self, op: str, probability: float, keys: DropoutKeys, group: Group = ONE_RANK, *, keep_mask: bool = True
    ) -> None:
        self.op = op
        self.probability = probability
        self.keys = keys
        self.group = group
        self.keep_mask = keep_mask

    def __call__(self, x: Tensor) -> Tensor:
        if self.probability == 0.0 or not x.device.is_training:
            return x
        return self.group.rows.dropout(x, self.probability, self.keys(self.op), self.op, keep_mask=self.keep_mask)


class Attention:
    """Causal self-attention between two linear maps: c_attn (D, 3D), columns q|k|v, and c_proj (D, D).

    A tensor-parallel group divides the heads. Shapes: x and y (B, T, D). `std`: of c_attn's and of c_proj's initial
    normals.
    """

    def __init__(
        self,
        flat: Flat | Tensors,
        name: str,
        width: int,
        num_heads: int,
        std: tuple[float, float],
        dropout: float,
        keys: DropoutKeys,
        *,
        policy: ActivationPolicy = DEFAULT,
        group: Group = ONE_RANK,
    ) -> None:
        self.c_attn = leaf(
            flat,
            "attn.c_attn",
            lambda own: ColumnLinear(own, f"{name}.c_attn", width, 3 * width, std=std[0], group=group, parts=3),
        )
        self.c_proj = leaf(
            flat, "attn.c_proj", lambda own: RowLinear(own, f"{name}.c_proj", width, width, std=std[1], group=group)
        )
        self.whole_heads = num_heads
        self.num_heads = num_heads // group.maps.size
        self.first_head = group.maps.index * self.num_heads
        self.dropout = dropout
        self.keys = keys
        self.policy = policy
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        dropout = self.dropout if x.device.is_training else 0.0
        core = self.group.attention(
            self.c_attn(x),
            self.num_heads,
            first_head=self.first_head,
            whole_heads=self.whole_heads,
            dropout=dropout,
            key=self.keys("attn") if dropout else (0, 0),
            policy=self.policy,
        )
        return self.policy.run("attn_proj", self.c_proj, core)


class FeedForward:
    """c_fc (D, F), GELU, c_proj (F, D); F is 4D in GPT-2."""

    def __init__(
        self,
        flat: Flat | Tensors,
        name: str,
        width: int,
        inner: int,
        std: tuple[float, float],
        policy: ActivationPolicy = DEFAULT,
        group: Group = ONE_RANK,
    ) -> None:
        self.policy = policy
        self.c_fc = leaf(
            flat, "mlp.c_fc", lambda own: ColumnLinear(own, f"{name}.c_fc", width, inner, std=std[0], group=group)
        )
        self.c_proj = leaf(
            flat, "mlp.c_proj", lambda own: RowLinear(own, f"{name}.c_proj", inner, width, std=std[1], group=group)
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.c_proj(self.policy.run("mlp_act", F.gelu, self.policy.run("fc1", self.c_fc, x)))


class Block:
    """GPT-2's pre-LN block: x + attn(ln_1(x)), then x + mlp(ln_2(x)), dropout on both branches.

    Shapes: x and y (B, T, D). `inner` is the feed-forward's width; `std`: of the first and of the last maps' initial
    normals.
    """

    def __init__(
        self,
        flat: Flat | Tensors,
        name: str,
        width: int,
        num_heads: int,
        std: tuple[float, float],
        dropout: float,
        keys: DropoutKeys,
        *,
        inner: int,
        eps: float = 1e-5,
        policy: ActivationPolicy = DEFAULT,
        group: Group = ONE_RANK,
    ) -> None:
        def norm(which: str) -> Callable[[Tensor], Tensor]:
            summed, whole = group.rows.is_cut, f"{name}.{which}"
            return leaf(flat, which, lambda own: LayerNorm(own, whole, width, eps=eps, policy=policy, summed=summed))

        self.ln_1 = norm("ln_1")
        self.attn = Attention(flat, f"{name}.attn", width, num_heads, std, dropout, keys, policy=policy, group=group)
        self.ln_2 = norm("ln_2")
        self.mlp = FeedForward(flat, f"{name}.mlp", width, inner, std, policy, group)
        keep_mask = "dropout" not in policy.again.parts
        self.drop_1 = Dropout("resid_1", dropout, keys, group, keep_mask=keep_mask)
        self.drop_2 = Dropout("resid_2", dropout, keys, group, keep_mask=keep_mask)
        self.policy = policy

    def __call__(self, x: Tensor) -> Tensor:
        run = self.policy.run  # no name for a branch: it dies when it is added
        x = run("attn_proj", add, x, run("attn_proj", self.drop_1, self.attn(run("layernorm", self.ln_1, x))))
        return x + self.drop_2(self.mlp(run("layernorm", self.ln_2, x)))
