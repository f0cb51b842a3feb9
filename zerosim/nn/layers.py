"""GPT-2's layers: each declares its parameters in a flat buffer (`tensor/flat.py`) under GPT-2's names, and is then a
function of tensors: of x (..., D), D its width, which gives y of the same shape where nothing else is said.
"""

from __future__ import annotations

from zerosim import functional as F
from zerosim.functional.policy import DEFAULT, ActivationPolicy
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import DropoutKeys
from zerosim.tensor.tensor import Tensor


class Linear:
    """y = x @ weight + bias. Shapes: x (..., I), weight (I, O), bias (O), y (..., O); I is `width`, O is `wide`.

    `std` is that of the weight's initial normals; the bias starts at 0.
    """

    def __init__(self, flat: Flat, name: str, width: int, wide: int, *, std: float) -> None:
        self.weight = flat.declare(f"{name}.weight", (width, wide), std=std)
        self.bias = flat.declare(f"{name}.bias", (wide,))

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class LayerNorm:
    """`functional.layer_norm` of the last dim; weight (D) starts at 1, bias (D) at 0."""

    def __init__(
        self, flat: Flat, name: str, width: int, *, eps: float = 1e-5, policy: ActivationPolicy = DEFAULT
    ) -> None:
        self.weight = flat.declare(f"{name}.weight", (width,), fill=1.0)
        self.bias = flat.declare(f"{name}.bias", (width,))
        self.eps = eps
        self.policy = policy

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight, self.bias, self.eps, policy=self.policy)


class Dropout:
    """Drops by `probability` in training, and nothing elsewhere; `op` names its random numbers within the unit."""

    def __init__(self, op: str, probability: float, keys: DropoutKeys) -> None:
        self.op = op
        self.probability = probability
        self.keys = keys

    def __call__(self, x: Tensor) -> Tensor:
        if self.probability == 0.0 or not x.device.is_training:
            return x
        return F.dropout(x, self.probability, self.keys(self.op), op=self.op)


class Attention:
    """Causal self-attention between two linear maps: c_attn (D, 3D), columns q|k|v, and c_proj (D, D).

    Shapes: x and y (B, T, D). `std`: of c_attn's and of c_proj's initial normals.
    """

    def __init__(
        self,
        flat: Flat,
        name: str,
        width: int,
        num_heads: int,
        std: tuple[float, float],
        dropout: float,
        keys: DropoutKeys,
        *,
        policy: ActivationPolicy = DEFAULT,
    ) -> None:
        self.c_attn = Linear(flat, f"{name}.c_attn", width, 3 * width, std=std[0])
        self.c_proj = Linear(flat, f"{name}.c_proj", width, width, std=std[1])
        self.num_heads = num_heads
        self.dropout = dropout
        self.keys = keys
        self.policy = policy

    def __call__(self, x: Tensor) -> Tensor:
        dropout = self.dropout if x.device.is_training else 0.0
        key = self.keys("attn") if dropout else (0, 0)
        core = F.attention(self.c_attn(x), self.num_heads, dropout=dropout, key=key, policy=self.policy)
        return self.c_proj(core)


class FeedForward:
    """c_fc (D, F), GELU, c_proj (F, D); F is 4D in GPT-2."""

    def __init__(self, flat: Flat, name: str, width: int, inner: int, std: tuple[float, float]) -> None:
        self.c_fc = Linear(flat, f"{name}.c_fc", width, inner, std=std[0])
        self.c_proj = Linear(flat, f"{name}.c_proj", inner, width, std=std[1])

    def __call__(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block:
    """GPT-2's pre-LN block: x + attn(ln_1(x)), then x + mlp(ln_2(x)), dropout on both branches.

    Shapes: x and y (B, T, D). `inner` is the feed-forward's width; `std`: of the first and of the last maps' initial
    normals.
    """

    def __init__(
        self,
        flat: Flat,
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
    ) -> None:
        self.ln_1 = LayerNorm(flat, f"{name}.ln_1", width, eps=eps, policy=policy)
        self.attn = Attention(flat, f"{name}.attn", width, num_heads, std, dropout, keys, policy=policy)
        self.ln_2 = LayerNorm(flat, f"{name}.ln_2", width, eps=eps, policy=policy)
        self.mlp = FeedForward(flat, f"{name}.mlp", width, inner, std)
        self.drop_1 = Dropout("resid_1", dropout, keys)
        self.drop_2 = Dropout("resid_2", dropout, keys)

    def __call__(self, x: Tensor) -> Tensor:
        x = x + self.drop_1(self.attn(self.ln_1(x)))
        return x + self.drop_2(self.mlp(self.ln_2(x)))
