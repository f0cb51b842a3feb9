"""DeepSpeed-Ulysses: around attention, ranks exchange tokens of all heads for all tokens of some heads.

(Jacobs et al., arXiv 2309.14509, section 3.1.) Between attentions each of u ranks has T/u tokens of every row. An
all-to-all makes q|k|v of T tokens and H/u heads out of them, on which any attention runs; a second one brings the
result back. In backward each runs the other way.

    per layer and way       2 all-to-alls: q, k and v packed into one, the result (DeepSpeed: one each, 4 in all)
    volume of both          (u-1)/u of b (T/u) (2 H + 2 K) d elements
    fewer than u heads of keys and values are copied to u before the exchange (as in arXiv 2506.13996, section 3.2.1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zerosim import functional as F
from zerosim.backends.kernels import Heads
from zerosim.comm.collectives import Comm
from zerosim.device.device import Buffer, Kind
from zerosim.functional.common import Grads
from zerosim.parallel.ring_attention import PURPOSE
from zerosim.tensor.tensor import Tensor, apply


@dataclass(frozen=True, slots=True)
class Ulysses:
    """Rank `index` of the `ranks` that exchange tokens for heads around an `inner` attention. Without a `comm` it
    describes a model, and runs nothing."""

    ranks: int
    index: int
    comm: Comm | None
    inner: Callable[..., Tensor]

    def __call__(
        self,
        qkv: Tensor,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        first_head: int = 0,
        whole_heads: int = 0,
        value: int = 0,
        **how: Any,
    ) -> Tensor:
        """Run `functional.attention`'s arguments, and return its result for the own tokens."""
        size, keys = self.ranks, num_kv_heads or num_heads
        if keys < size:
            qkv = F.repeat_kv(qkv, num_heads, keys, size // keys)
            keys = size
        q, k = Heads(num_heads, keys, value=value).cuts(qkv.shape[2])
        own = num_heads // size
        y = self.inner(
            self._exchanged(qkv, (q, k, qkv.shape[2] - q - k), gathers=True),
            own,
            num_kv_heads=keys // size,
            first_head=first_head + self.index * own,
            whole_heads=whole_heads or num_heads,
            value=value,
            **how,
        )
        return self._exchanged(y, (y.shape[2] * size,), gathers=False)

    def _exchanged(self, x: Tensor, columns: Sequence[int], *, gathers: bool) -> Tensor:
        out = self.exchange(x.buffer, columns, Kind.ACTIVATION, gathers=gathers)
        return apply(Exchange(self, columns, gathers), out, x, op="exchange", saved={})

    def exchange(self, x: Buffer, columns: Sequence[int], kind: Kind, *, gathers: bool) -> Buffer:
        """Return all tokens of some columns, from some tokens of all; or the reverse. `columns`: how many there are of
        q, of k and of v, of all heads. Each is cut over the ranks."""
        assert self.comm is not None, "a model that was built for its layout alone does not run"
        size, device, copy, narrow = self.ranks, x.device, x.device.backend.copy, sum(columns) // self.ranks
        batch, own = x.shape[0], x.shape[1] if gathers else x.shape[1] // size
        sent = device.alloc((size, batch, own, narrow), x.dtype, Kind.TEMP)
        if gathers:
            for of_all, of_each in self._parts(x, sent, columns):
                device.kernel(0, copy, of_all, of_each)
        else:
            device.kernel(0, copy, _by_rank(x, size), sent.array)
        got = self.comm.all_to_all(sent.reshape(-1), kind=Kind.TEMP, purpose=PURPOSE).reshape(*sent.shape)
        del sent
        out = device.alloc((batch, own * size, narrow) if gathers else (batch, own, narrow * size), x.dtype, kind)
        if gathers:
            device.kernel(0, copy, got.array, _by_rank(out, size))
        else:
            for of_all, of_each in self._parts(out, got, columns):
                device.kernel(0, copy, of_each, of_all)
        return out

    def _parts(self, of_all: Buffer, of_each: Buffer, columns: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return views of q, of k and of v by rank, (ranks, B, T, columns), of both."""
        size, start, at, found = self.ranks, 0, 0, []
        for width in columns:
            each, (batch, own, _) = width // size, of_all.shape
            whole = of_all.array[:, :, start : start + width].reshape(batch, own, size, each).transpose(2, 0, 1, 3)
            found.append((whole, of_each.array[:, :, :, at : at + each]))
            start, at = start + width, at + each
        return found


@dataclass(frozen=True, slots=True)
class Exchange:
    """Saves nothing: backward is the other exchange."""

    group: Ulysses
    columns: Sequence[int]
    gathers: bool

    def backward(self, grad: Buffer) -> Grads:
        return (self.group.exchange(grad, self.columns, Kind.ACTIVATION_GRAD, gathers=not self.gathers),)


def _by_rank(x: Buffer, ranks: int) -> Any:
    """View (B, T, C) as (ranks, B, T / ranks, C): the tokens of each rank."""
    batch, tokens, columns = x.shape
    return x.array.reshape(batch, ranks, tokens // ranks, columns).transpose(1, 0, 2, 3)
