"""Casts: gradients are sent in a half type; before and after, they have their own dtype.

    encode    each gradient into a buffer of the half type, which lives until the call is over
    reduce    stage 0: all_reduce; 1 to 3: reduce_scatter, of the mean. A direct collective adds the ranks' parts in
              fp32, divides and rounds once; a ring rounds at each hop
    decode    what has arrived, into the own slice, in the gradients' own dtype

A cast halves the bytes of fp32 gradients. ZeRO compresses no gradients: this is not in the paper. Source: PyTorch's DDP
hooks fp16_compress_hook and bf16_compress_hook, which divide by N, cast, and add in the half type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from zerosim.comm.group import Work
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType, bf16, fp16
from zerosim.parallel.exchange import Slices
from zerosim.tensor.flat import Flat


class Cast(Slices):
    """Cast gradients to `sent_dtype` to reduce them; parameters are exchanged as without compression."""

    sent_dtype: ClassVar[DType | None] = fp16

    def launch_reduce(self, flats: Sequence[Flat], grads: list[Buffer]) -> Work[Any]:
        comm, sent = self.group_of(flats[0]), [self._cast(flat, grads.pop(0)) for flat in flats]
        if flats[0].held.rows["optim"].is_whole:  # stage 0: the local shard is the whole flat
            return comm.launch_all_reduce(sent)
        return comm.launch_reduce_scatter(sent, kind=Kind.COMM)

    launch_in_place = launch_reduce

    def own_part(self, flat: Flat, reduced: Any) -> Buffer:
        return _decoded(flat, reduced, flat.new_grad_shard())

    def own_window(self, flat: Flat, grad: Buffer, reduced: Any) -> Buffer:
        return _decoded(flat, reduced, flat.own_window(grad))

    def _cast(self, flat: Flat, grad: Buffer) -> Buffer:
        if grad.dtype == self.sent_dtype:  # as backward has computed it
            return grad
        with flat.device.scope(unit=flat.spec.module):
            sent = flat.device.alloc((grad.numel,), self.sent_dtype or grad.dtype, Kind.COMM)
            flat.device.kernel(0, flat.device.backend.copy, grad.array, sent.array)
        return sent


def _decoded(flat: Flat, reduced: Buffer, own: Buffer) -> Buffer:
    flat.device.kernel(0, flat.device.backend.copy, reduced.array, own.array)
    return own


class CastToBf16(Cast):
    sent_dtype = bf16
