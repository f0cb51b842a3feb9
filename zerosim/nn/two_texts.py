"""The layers around the blocks of an encoder and its decoder: rows of both texts, T5's bias, the norms after blocks."""

from __future__ import annotations

from zerosim import functional as F
from zerosim.device.device import Buffer
from zerosim.nn.aside import Aside
from zerosim.nn.context import LayerContext
from zerosim.nn.decoder import DroppedNorm
from zerosim.nn.layers import Dropout
from zerosim.nn.maps import Layer
from zerosim.tensor.tensor import Tensor


class ScoreBias:
    """T5's bias of scores, which stands `beside` the stream. Shapes: x and y (B, T, D), the bias (H, T, T)."""

    def __init__(self, here: LayerContext, name: str, beside: Aside) -> None:
        numbers, heads = here.sizes.numbers, here.sizes.heads
        self.beside, self.largest, self.causal = beside, numbers.bias_largest, here.block.causal
        shape = numbers.bias_buckets, heads
        splits = here.group.maps.split(shape, 1)
        self.weight = here.named(name).declare("weight", shape, std=here.std, splits=splits, embedding=True)

    def __call__(self, x: Tensor) -> Tensor:
        self.beside.put(F.relative_bias(self.weight, x.shape[1], largest=self.largest, causal=self.causal))
        return x


class Turn:
    """The norm after an encoder. Its result stands beside the stream from here on, and the decoder's rows come in."""

    def __init__(self, here: LayerContext, rows: Aside, memory: Aside) -> None:
        self.norm, self.rows, self.memory = DroppedNorm(here, "last"), rows, memory

    def __call__(self, x: Tensor) -> Tensor:
        self.memory.put(self.norm(x))
        return self.rows.take()


class TwoTexts:
    """The rows of an encoder's tokens and of its decoder's, which stand `beside` them. Shapes: ids (B, T + S), of which
    S are the decoder's, y (B, T, D)."""

    def __init__(self, here: LayerContext, table: Layer, beside: Aside) -> None:
        self.table, self.beside, self.own = table, beside, here.sizes.decoder_tokens
        self.dropouts = Dropout(here, "embd"), Dropout(here, "embd_2")

    def __call__(self, ids: Tensor) -> Tensor:
        first, second = (self._of(ids, part) for part in (slice(None, -self.own), slice(-self.own, None)))
        one, two = self.dropouts
        self.beside.put(two(self.table(second)))
        return one(self.table(first))

    @staticmethod
    def _of(ids: Tensor, columns: slice) -> Tensor:
        return Tensor(Buffer(ids.buffer.storage, ids.array[:, columns], ids.dtype))
