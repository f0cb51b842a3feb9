"""Muon (Keller Jordan, kellerjordan.github.io/posts/muon): momentum, orthogonalised; AdamW beside it.

    m = m + (1 - momentum) (g - m)          u = g + momentum (m - g)          Nesterov's
    X = u / (|u| + 1e-7), then five times   A = X X',  B = b A + c A A,  X = a X + B X
    w = w (1 - lr * weight_decay);          w = w - lr * sqrt(max(1, rows/columns)) X

Newton and Schulz's steps bring the singular values of u near 1, which takes the whole matrix. They run in bf16, with
products added in fp32 and rounded, as in the author's code, operation by operation; `dtype` fp32 is for
comparisons. A matrix with more rows than columns is transposed first. `match_rms` scales by
0.2 sqrt(max(rows, columns)) instead (Moonshot, 2502.16982). PyTorch's torch.optim.Muon divides by max(|u|, 1e-7), and
rounds u before it computes the norm.

Muon updates the matrices in blocks, each as it is stored. Llama's q, k, v, gate and up are separate matrices. GPT-2's
q|k|v is one, which the author's code and Megatron may split. GPT-2's and the MLP's are stored (in, out), the others
(out, in): `rows` are those of the array, as for PyTorch. The table, positions, the head, norms and biases use AdamW at
`aux_lr` times the learning rate. The author's MuonWithAuxAdam does the same; torch.optim.Muon needs a second optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar

from zerosim.backends.kernels import Array, Rule
from zerosim.device.device import Buffer, Kind
from zerosim.device.work import VECTOR, KernelWork
from zerosim.dtypes import DType, bf16, fp64
from zerosim.optim.adam import Adam
from zerosim.optim.optimizer import Add, Step
from zerosim.optim.states import StateArray, by_weight, sized
from zerosim.placement.partition import Slice
from zerosim.placement.spec import FlatSpec, WeightSpec
from zerosim.tensor.flat import Flat

STEPS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
EPS = 1e-7


@dataclass(frozen=True)
class Muon:
    """One state for a matrix in a block, 4 bytes per weight in fp32; AdamW's two for the rest."""

    momentum: float = 0.95
    weight_decay: float = 0.0
    aux: Adam = Adam(0.9, 0.95, 1e-10, decoupled=True)  # noqa: RUF009  frozen
    aux_lr: float = 0.15
    match_rms: bool = False
    dtype: DType = bf16
    cut: ClassVar[str] = "matrices"
    foreach_temporaries: ClassVar[int] = 0

    def arrays(self, spec: FlatSpec, own: Slice, dtype: DType) -> Sequence[StateArray]:
        return [array for array in sized(self._states(dtype), spec, own) if array.numel]

    def _states(self, dtype: DType) -> list[StateArray]:
        momentum = StateArray("momentum_buffer", 0, dtype, of=takes_muon)
        return [momentum, *[StateArray(name, 0, dtype, of=takes_adamw) for name in self.aux.states]]

    def step(self, flat: Flat, now: Step, add: Add) -> None:
        weights, grad = flat.weights(), flat.grad_shard
        assert grad is not None, f"{flat.name} has no gradient"
        for mine, places in by_weight(self._states(weights.dtype), flat.spec, flat.own):
            assert mine.stop - mine.start == mine.weight.numel, f"{mine.weight.name} is cut"
            here, decays = slice(mine.at, mine.at + mine.weight.numel), now.decays(mine.weight)
            w, g = weights[here], grad[here]
            if "momentum_buffer" in places:
                momentum_buffer = flat.states["momentum_buffer"][places["momentum_buffer"]]
                *experts, rows, columns = mine.weight.shape  # each expert of a stack is a matrix
                for first in range(0, mine.weight.numel, rows * columns) if experts else (0,):
                    one = slice(first, first + rows * columns)
                    self.update(w[one], g[one], momentum_buffer[one], (rows, columns), now, decays=decays)
                continue
            states = {name: flat.states[name][at] for name, at in places.items()}
            self.aux.update(w, g, states, now._replace(lr=now.lr * self.aux_lr), decays=decays)

    def update(
        self, weights: Buffer, grad: Buffer, momentum_buffer: Buffer, shape: Sequence[int], now: Step, *, decays: bool
    ) -> None:
        """Move one matrix of this shape, in place; the arrays are flat."""
        device, (rows, columns) = weights.device, shape
        update = device.alloc((rows, columns), weights.dtype, Kind.TEMP)
        states = (update.reshape(-1), momentum_buffer)
        _elementwise("muon_momentum", 6, Rule(_average, (1.0 - self.momentum,), now.grad_scale), grad, *states)
        x = _normalized(update, self.dtype)
        del update, states
        x = orthogonalized(x)
        factor = 0.2 * sqrt(max(rows, columns)) if self.match_rms else sqrt(max(1.0, rows / columns))
        kept = 1.0 - now.lr * self.weight_decay * decays
        _elementwise("muon_update", 3, Rule(_move, (kept, now.lr * factor), 1.0), x.reshape(-1), weights)


def takes_muon(weight: WeightSpec) -> bool:
    """Return whether a weight is one of a block's matrices, or a stack of them. The others use AdamW."""
    is_map = weight.role is None or weight.role.is_map or weight.role.place == "router"  # norms may have rows too
    return weight.in_block and is_map and len(weight.shape) > 1


def takes_adamw(weight: WeightSpec) -> bool:
    """Return whether a weight is one of the others."""
    return not takes_muon(weight)


# -- Newton and Schulz -------------------------------------------------------------------------------
def _normalized(u: Buffer, dtype: DType) -> Buffer:
    """Return u / (|u| + eps), rounded to `dtype` once, in place if it is u's own dtype."""
    device, k = u.device, u.device.backend
    total = device.alloc((1,), fp64, Kind.TEMP)
    norm = device.alloc((1,), u.dtype, Kind.TEMP)
    device.kernel(2 * u.numel, k.sum_squares, u.reshape(-1).array, u.numel, total.array)
    device.kernel(1, k.sqrt, total.array, norm.array)
    device.kernel(1, k.add, norm.array, EPS, norm.array)
    x = u if dtype is u.dtype else device.alloc(u.shape, dtype, Kind.TEMP)
    device.kernel(u.numel, k.divide, u.array, norm.array, x.array)
    return x


def orthogonalized(x: Buffer) -> Buffer:
    """Run five steps on x (rows, columns), of Frobenius norm at most 1, in its dtype; x's bytes hold the result.

    Temporaries: one more of x's size, and two of the shorter side squared.
    """
    device, k, (rows, columns), (a, b, c) = x.device, x.device.backend, x.shape, COEFFICIENTS
    short, tall = min(rows, columns), rows > columns
    gram, poly = (device.alloc((short, short), x.dtype, Kind.TEMP) for _ in range(2))
    product = device.alloc(x.shape, x.dtype, Kind.TEMP)
    of_gram, of_product = 2 * short * x.numel, 2 * short**3
    for _ in range(STEPS):
        left, right = (x.array.T, x.array) if tall else (x.array, x.array.T)
        device.kernel(of_gram, k.matmul, left, right, gram.array)
        device.kernel(of_product, k.matmul, gram.array, gram.array, poly.array)
        device.kernel(poly.numel, k.multiply, poly.array, c, poly.array)
        device.kernel(gram.numel, k.multiply, gram.array, b, gram.array)
        device.kernel(poly.numel, k.add, gram.array, poly.array, poly.array)
        left, right = (x.array, poly.array) if tall else (poly.array, x.array)  # the transpose of poly X'
        device.kernel(of_gram, k.matmul, left, right, product.array)
        device.kernel(x.numel, k.multiply, x.array, a, x.array)
        device.kernel(x.numel, k.add, x.array, product.array, x.array)
    return x


# -- element-wise updates --------------------------------------------------------------------
def _average(xp: Any, u: Array, g: Array, now: tuple[float], *states: Array) -> None:
    """Run PyTorch's two lerps: update the momentum, and fill u, the gradient moved towards it."""
    (m,) = states
    (rest,) = now
    m += rest * (g - m)
    u[...] = m - rest * (m - g)


def _move(xp: Any, w: Array, x: Array, now: tuple[float, float], *states: Array) -> None:
    kept, rate = now
    w *= kept
    w -= rate * x


def _elementwise(name: str, flops: int, rule: Rule, grad: Buffer, *changed: Buffer) -> None:
    """Run a rule as one kernel, which reads the gradient and the last of the arrays that it changes."""
    read, written = grad.nbytes + changed[-1].nbytes, sum(buffer.nbytes for buffer in changed)
    work = KernelWork(name, VECTOR, flops * grad.numel, read, written)
    arrays = [buffer.array for buffer in (grad, *changed)]
    grad.device.kernels([work], grad.device.backend.elementwise, rule, *arrays)
