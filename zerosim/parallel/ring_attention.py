"""Attention to keys and values that lie on all ranks of a context: ring attention, and gathered keys and values. And
attention within the documents of a row, on one rank too.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerosim.backends.kernels import Array, Dropout, Heads, Met
from zerosim.comm.collectives import Comm
from zerosim.comm.group import Work
from zerosim.device.device import Buffer, Kind
from zerosim.device.work import Block, KernelWork, flash_block
from zerosim.dtypes import compute_dtype
from zerosim.functional.attention import Attended, Core
from zerosim.functional.common import Grads, like
from zerosim.nn.documents import Documents
from zerosim.placement.context import ContextCut
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Saved, Tensor

PURPOSE = "activations"
Moving = tuple[Work[None], Work[Buffer]]
"""What is on its way to the next rank, and from the one before."""


def met(cut: ContextCut, place: int, sources: tuple[int, ...], tokens: int, starts: Sequence[int] = ()) -> Met:
    """Return where the tokens of a place and of some sources lie in a row, whose documents begin at `starts`."""
    keys = tuple(run for source in sources for run in cut.at(tokens, source))
    return Met(cut.at(tokens, place), keys, tokens, starts)


@dataclass(frozen=True, slots=True)
class OtherKeys:
    """Place `place` of the ring of a context, and how it gets all keys and values. Without a `comm` it describes a
    model, and runs nothing. Rows may hold several `documents`."""

    cut: ContextCut
    place: int
    comm: Comm | None
    documents: Documents | None = None

    def __call__(self, qkv: Tensor, core: Core) -> Attended:
        """Run the core on q|k|v of the own tokens, (B, T/c, (H + 2K) d)."""
        device, (batch, own, _), wide = qkv.device, qkv.shape, compute_dtype(qkv.dtype)
        total = like(qkv, *core.result_shape(qkv), dtype=wide)
        lse = like(qkv, batch, core.heads.queries, own, dtype=wide)
        device.kernel(0, device.backend.fill, total.array, 0.0)
        device.kernel(0, device.backend.fill, lse.array, -float("inf"))
        rule = AllKeys(self, held(qkv), core, total, lse)
        for sources, kv in self.arriving(rule.own_keys()):
            for rows, heads, where in self.meetings(qkv, core, sources):
                into = total.array[rows], lse.array[rows]
                arrays = rule.queries[rows], kv.array[rows], heads, where, rule.dropout, *into
                device.kernels(
                    rule.work("flash_attention", (1, 1), where, rows), device.backend.attention_block, *arrays
                )
            del kv
        if core.sinks is not None:
            device.kernel(2 * total.numel, device.backend.add_sinks, total.array, lse.array, core.sinks.array)
        if wide == qkv.dtype:
            return Attended(total, rule)
        out = core.result(qkv)
        device.kernel(0, device.backend.copy, total.array, out.array)
        return Attended(out, AllKeys(self, held(qkv), core, out, lse))

    def meetings(self, qkv: Readable, core: Core, sources: tuple[int, ...]) -> Iterator[tuple[slice, Heads, Met]]:
        """Yield runs of rows with the same documents whose queries read keys of the sources: their heads, and where
        the tokens of both lie in a row."""
        heads, tokens, rows = core.heads, qkv.shape[1] * self.cut.around, slice(0, qkv.shape[0])
        for some, starts in [(rows, ())] if self.documents is None else self.documents.alike(rows.stop, tokens):
            where = met(self.cut, self.place, sources, tokens, starts)
            if where.pairs(heads.form):  # dropout's numbers go on from row to row
                first = heads.number(some.start, 0) if core.dropout else heads.first
                yield some, heads._replace(first=first, whole=heads.whole or heads.queries), where

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
    qkv: Readable
    core: Core
    out: Buffer
    lse: Buffer

    def saved(self) -> Saved:
        return {"q, k, v": self.qkv, "output": self.out, "log-sum-exp": self.lse}

    def log_sum_exp(self) -> Buffer:
        return self.lse

    def backward(self, grad: Buffer) -> Grads:
        device, wide, (batch, own, columns) = grad.device, self.lse.dtype, self.qkv.shape
        k, heads, width = device.backend, self.core.heads, self.core.heads.cuts(columns)[0]
        delta, dq = (device.alloc(shape, wide, Kind.TEMP) for shape in (self.lse.shape, (batch, own, width)))
        device.kernel(2 * grad.numel, k.attention_delta, grad.array, self.out.array, heads, delta.array)
        device.kernel(0, k.fill, dq.array, 0.0)

        def parts() -> Iterator[Buffer]:
            for sources, kv in self.keys.arriving(self.own_keys()):
                dkv = device.alloc(kv.shape, wide, Kind.TEMP)
                device.kernel(0, k.fill, dkv.array, 0.0)
                for rows, own_heads, where in self.keys.meetings(self.qkv, self.core, sources):
                    arrays = grad.array[rows], self.queries[rows], kv.array[rows], own_heads, where, self.dropout
                    results = self.lse.array[rows], delta.array[rows], dq.array[rows], dkv.array[rows]
                    work = self.work("flash_attention_backward", (3, 2), where, rows)
                    device.kernels(work, k.attention_block_backward, *arrays, *results)
                del kv
                yield dkv

        dkv = self.keys.reduced(parts(), (batch, own, columns - width))
        dqkv = self.qkv.new_grad()
        device.kernel(0, k.copy, dq.array, dqkv.array[:, :, :width])
        device.kernel(0, k.copy, dkv.array, dqkv.array[:, :, width:])
        return dqkv, *self.core.sink_grads(self.lse, delta)

    @property
    def queries(self) -> Array:
        return self.qkv.array[:, :, : self.core.heads.cuts(self.qkv.shape[2])[0]]

    @property
    def dropout(self) -> Dropout:
        return Dropout(self.core.key, self.core.dropout)

    def own_keys(self) -> Buffer:
        """Return the own keys and values in a buffer of their own: what is sent is contiguous."""
        source, device = self.qkv.array[:, :, self.queries.shape[2] :], self.qkv.device
        kv = device.alloc(tuple(source.shape), self.qkv.dtype, Kind.TEMP)
        device.kernel(0, device.backend.copy, source, kv.array)
        return kv

    def work(self, name: str, products: tuple[int, int], where: Met, rows: slice) -> tuple[KernelWork, ...]:
        """Return the work of a kernel over what these tokens of some rows read: all arrays are read and written once.
        Flops count the scores that one kernel over the whole row would, or over each document (`Met.counted`)."""
        heads, form = self.core.heads, self.core.heads.form
        sizes = rows.stop - rows.start, heads.queries, heads.keys, self.qkv.shape[1], sum(map(len, where.keys))
        widths = self.core.width(self.qkv), self.core.value(self.qkv)
        of = Block(*sizes, *widths, where.pairs(form), where.counted(form))
        return flash_block(name, products, of, self.qkv.dtype.itemsize, self.lse.dtype.itemsize)


class OwnKeys(OtherKeys):
    """This rank has all keys and values of its rows, or all of some heads: only documents keep tokens apart."""

    __slots__ = ()

    def arriving(self, kv: Buffer) -> Iterator[tuple[tuple[int, ...], Buffer]]:
        yield (0,), kv

    def reduced(self, parts: Iterator[Buffer], shape: tuple[int, ...]) -> Buffer:
        (own,) = parts
        return own


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
