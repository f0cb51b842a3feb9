"""Deep Gradient Compression: top-k of accumulated gradients, with momentum corrected for the delay (arXiv 1712.01887).

    u = m u + g;  v += u;  send the largest of v;  u = v = 0 for sent elements

The exchange applies the momentum; SGD without momentum then steps by the mean. Warm-up sends more in the first steps:
the ratio falls from 25 % to its value over `warmup` steps, by a constant factor. Memory: u and v, 8 Psi bytes on each
rank. Gradients are not clipped by rank, as the paper does for recurrent networks.
"""

from __future__ import annotations

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer
from zerosim.parallel.compression.codecs import Codec, TopK
from zerosim.parallel.compression.encoded import Encoded, InFlight, code
from zerosim.parallel.gathers import AllGather
from zerosim.placement.partition import Whole
from zerosim.placement.rows import Row
from zerosim.tensor.flat import Flat

FIRST = 0.25
"""The ratio of the first step (section 3.3: a sparsity of 75 %)."""


class DGC(Encoded):
    """Momentum correction and factor masking around `TopK`."""

    def __init__(self, gathers: AllGather, ratio: float, momentum: float, warmup: int) -> None:
        super().__init__(gathers, TopK(ratio))
        self.momentum, self.warmup, self.ratio = momentum, warmup, ratio
        self.states = {"momentum": Row(Whole()), "residual": Row(Whole())}
        self.keeps = dict.fromkeys(self.states, "rank")

    def codec_now(self, flat: Flat) -> Codec:
        return TopK(ratio_at(flat.device.where.step, self.ratio, self.warmup))

    def values(self, flat: Flat, grad: Buffer) -> Buffer:
        u, v = self.kept["momentum", flat.name], self.kept["residual", flat.name]

        def pile_up(xp: object, u: Array, v: Array, g: Array) -> None:
            u *= self.momentum
            u += g
            v += u

        code(flat.device, "dgc", pile_up, 3 * grad.numel, u.array, v.array, grad.array)
        return v

    def send(self, flat: Flat, values: Buffer, codec: Codec) -> InFlight:
        work = super().send(flat, values, codec)
        u = self.kept["momentum", flat.name]

        def mask(xp: object, u: Array, v: Array) -> None:
            u[v == 0] = 0  # sent elements were set to 0

        code(flat.device, "dgc_mask", mask, 0, u.array, values.array)
        return work


def ratio_at(step: int, ratio: float, warmup: int) -> float:
    """Return the share of a gradient that is sent in a step, counted from 0."""
    return float(max(ratio, FIRST * (ratio / FIRST) ** (step / warmup))) if step < warmup else ratio
