"""Attention to keys and values that lie on all ranks of a context: ring attention, and gathered keys and values.

Each of c ranks has T/c tokens of every row. Its queries meet the keys and values of one rank after the other, and a
running result is merged by log-sum-exp, in fp32 (Liu et al., arXiv 2310.01889). No T x T scores exist: this is
FlashAttention's arithmetic. What no query reads is not computed. In zig-zag order (`placement/context.py`) all ranks
then compute as much.

    forward     k and v of every other rank, 2 (c-1) b (T/c) k d elements: in c-1 steps round the ring, or in one gather
    backward    the same again; dk and dv in fp32, c steps round and home, or one reduce-scatter
    saved       q, k, v, the result and its log-sum-exp, of the own tokens

The ring's messages are launched before a step's kernel and waited for after it. Where keys and values are gathered
(Llama 3, arXiv 2407.21783, section 3.3.2; PyTorch's default) a rank holds those of all tokens for one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerosim.backends.kernels import Array, Dropout, Met
from zerosim.comm.collectives import Comm
from zerosim.comm.group import Work
from zerosim.device.device import Buffer, Kind
from zerosim.device.work import Block, KernelWork, flash_block
from zerosim.dtypes import compute_dtype
from zerosim.functional.attention import Attended, Core
from zerosim.functional.common import Grads, like
from zerosim.placement.context import ContextCut
from zerosim.tensor.tensor import Saved, Tensor

PURPOSE = "activations"
Moving = tuple[Work[None], Work[Buffer]]
"""What is on its way to the next rank, and from the one before."""


@dataclass(frozen=True, slots=True)
class OtherKeys:
    """Place `place` of the ring of a context, and how it gets all keys and values. Without a `comm` it describes a
    model, and runs nothing."""

    cut: ContextCut
    place: int
    comm: Comm | None

    def __call__(self, qkv: Tensor, core: Core) -> Attended:
        """Run the core on q|k|v of the own tokens, (B, T/c, (H + 2K) d)."""
        device, (batch, own, _), wide = qkv.device, qkv.shape, compute_dtype(qkv.dtype)
        total = like(qkv, *core.result_shape(qkv), dtype=wide)
        lse = like(qkv, batch, core.heads.queries, own, dtype=wide)
        device.kernel(0, device.backend.fill, total.array, 0.0)
        device.kernel(0, device.backend.fill, lse.array, -float("inf"))
        rule = AllKeys(self, qkv, core, total, lse)
        for sources, kv in self.arriving(rule.own_keys()):
            met = self.met(own, sources)
            if met.pairs(core.heads.form):
                arrays = rule.queries, kv.array, core.heads, met, rule.dropout, total.array, lse.array
                device.kernels(rule.work("flash_attention", 2, met), device.backend.attention_block, *arrays)
            del kv
        if wide == qkv.dtype:
            return Attended(total, rule)
        out = core.result(qkv)
        device.kernel(0, device.backend.copy, total.array, out.array)
        return Attended(out, AllKeys(self, qkv, core, out, lse))

    def met(self, own: int, sources: tuple[int, ...]) -> Met:
        """Return where this place's `own` tokens lie in a row, and those of the sources."""
        tokens = own * self.cut.around
        keys = tuple(run for source in sources for run in self.cut.at(tokens, source))
        return Met(self.cut.at(tokens, self.place), keys, tokens)

    def arriving(self, kv: Buffer) -> Iterator[tuple[tuple[int, ...], Buffer]]:
        """Yield keys and values (B, U, 2K d), one buffer after the other, with the places whose tokens they are. `kv`:
        this place's."""
        raise NotImplementedError

    def reduced(self, parts: Iterator[Buffer], shape: tuple[int, ...]) -> Buffer:
        """Return the gradient of this place's keys and values, of this `shape`: the sum of every place's part. `parts`
        are this place's of all, in the order of `arriving`."""
        raise NotImplementedError

    @property
    def ring(self) -> Comm:
        assert self.comm is not None, "a model that was built for its layout alone does not run"
        return self.comm


@dataclass(frozen=True, slots=True)
class AllKeys:
    """Saves q|k|v, the result and the log-sum-exp of each query's scores, as flash does."""

    keys: OtherKeys
    qkv: Tensor
    core: Core
    out: Buffer
    lse: Buffer

    def saved(self) -> Saved:
        return {"q, k, v": self.qkv, "output": self.out, "log-sum-exp": self.lse}

    def log_sum_exp(self) -> Buffer:
        return self.lse

    def backward(self, grad: Buffer) -> Grads:
        device, wide, (batch, own, columns) = grad.device, self.lse.dtype, self.qkv.shape
        k, heads, width = device.backend, self.core.heads, grad.shape[2]
        delta, dq = (device.alloc(shape, wide, Kind.TEMP) for shape in (self.lse.shape, grad.shape))
        device.kernel(2 * grad.numel, k.attention_delta, grad.array, self.out.array, heads, delta.array)
        device.kernel(0, k.fill, dq.array, 0.0)

        def parts() -> Iterator[Buffer]:
            for sources, kv in self.keys.arriving(self.own_keys()):
                dkv, met = device.alloc(kv.shape, wide, Kind.TEMP), self.keys.met(own, sources)
                device.kernel(0, k.fill, dkv.array, 0.0)
                if met.pairs(heads.form):
                    arrays = grad.array, self.queries, kv.array, heads, met, self.dropout
                    results = self.lse.array, delta.array, dq.array, dkv.array
                    work = self.work("flash_attention_backward", 5, met)
                    device.kernels(work, k.attention_block_backward, *arrays, *results)
                del kv
                yield dkv

        dkv = self.keys.reduced(parts(), (batch, own, columns - width))
        dqkv = self.qkv.new_grad()
        device.kernel(0, k.copy, dq.array, dqkv.array[:, :, :width])
        device.kernel(0, k.copy, dkv.array, dqkv.array[:, :, width:])
        return (dqkv,)

    @property
    def queries(self) -> Array:
        return self.qkv.array[:, :, : self.out.shape[2]]

    @property
    def dropout(self) -> Dropout:
        return Dropout(self.core.key, self.core.dropout)

    def own_keys(self) -> Buffer:
        """Return the own keys and values in a buffer of their own: what is sent is contiguous."""
        source, device = self.qkv.array[:, :, self.out.shape[2] :], self.qkv.device
        kv = device.alloc(tuple(source.shape), self.qkv.dtype, Kind.TEMP)
        device.kernel(0, device.backend.copy, source, kv.array)
        return kv

    def work(self, name: str, products: int, met: Met) -> tuple[KernelWork, ...]:
        """Return the work of a kernel over what these tokens read: all arrays are read and written once. Flops count
        the scores that one kernel over the whole row would (`Met.counted`)."""
        heads, form = self.core.heads, self.core.heads.form
        sizes = self.qkv.shape[0], heads.queries, heads.keys, self.qkv.shape[1], sum(map(len, met.keys))
        of = Block(*sizes, self.core.width(self.qkv), met.pairs(form), met.counted(form))
        return flash_block(name, products, of, self.qkv.dtype.itemsize, self.lse.dtype.itemsize)


class Ring(OtherKeys):
    """Keys and values go round: a rank sends what it has to the next one while it computes with it."""

    __slots__ = ()

    def arriving(self, kv: Buffer) -> Iterator[tuple[tuple[int, ...], Buffer]]:
        size = self.cut.around
        for step in range(size):
            moving = self._pass(kv) if step < size - 1 else None
            yield ((self.place - step) % size,), kv
            if moving is not None:
                kv = _arrived(moving)

    def reduced(self, parts: Iterator[Buffer], shape: tuple[int, ...]) -> Buffer:
        moving: Moving | None = None
        for dkv in parts:
            if moving is not None:
                before, device = _arrived(moving), dkv.device
                device.kernel(dkv.numel, device.backend.add, dkv.array, before.array, dkv.array)
                del before
            moving = self._pass(dkv)
            del dkv
        assert moving is not None
        return _arrived(moving)

    def _pass(self, buffer: Buffer) -> Moving:
        after, before = (self.place + 1) % self.cut.around, (self.place - 1) % self.cut.around
        sent = self.ring.launch_send(buffer, after, PURPOSE)
        return sent, self.ring.launch_recv(buffer.shape, buffer.dtype, before, Kind.TEMP, PURPOSE)


class GatheredKeys(OtherKeys):
    """All keys and values are gathered at once, and their gradients reduced at once."""

    __slots__ = ()

    def arriving(self, kv: Buffer) -> Iterator[tuple[tuple[int, ...], Buffer]]:
        size, (batch, own, columns) = self.cut.around, kv.shape
        gathered = self.ring.all_gather(kv.reshape(-1), kind=Kind.TEMP, purpose=PURPOSE)
        del kv
        if batch == 1:
            yield tuple(range(size)), gathered.reshape(batch, size * own, columns)
            return
        rows, device = gathered.device.alloc((batch, size * own, columns), gathered.dtype, Kind.TEMP), gathered.device
        by_rank = gathered.array.reshape(size, batch, own, columns).transpose(1, 0, 2, 3)
        device.kernel(0, device.backend.copy, by_rank, rows.array.reshape(batch, size, own, columns))
        del gathered, by_rank
        yield tuple(range(size)), rows

    def reduced(self, parts: Iterator[Buffer], shape: tuple[int, ...]) -> Buffer:
        (whole,), (batch, own, columns), size = parts, shape, self.cut.around
        if batch > 1:
            device = whole.device
            by_rank = device.alloc((size, batch, own, columns), whole.dtype, Kind.TEMP)
            source = whole.array.reshape(batch, size, own, columns).transpose(1, 0, 2, 3)
            device.kernel(0, device.backend.copy, source, by_rank.array)
            whole = by_rank
            del source, by_rank
        kept = self.ring.reduce_scatter(whole.reshape(-1), kind=Kind.TEMP, op="sum", purpose=PURPOSE)
        return kept.reshape(*shape)


def _arrived(moving: Moving) -> Buffer:
    sent, coming = moving
    buffer = coming.wait()
    sent.wait()
    return buffer
