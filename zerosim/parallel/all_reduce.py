"""ZeRO-1 and ZeRO-2 whose gradients are all-reduced, though a rank keeps a slice: DeepSpeed's default schedule.

    bytes per rank     as zero1 and zero2
    volume per step    3 Psi (N-1)/N elements     all_reduce of gradients (2 Psi), all_gather of parameters

Every rank receives all of the sum and drops all but its slice: the price is Psi (N-1)/N more traffic than
a reduce_scatter's, 1.5 times the paper's. The sums are the same, so weights are the same to the bit.
Source: DeepSpeed, stage_1_and_2.py, where use_multi_rank_bucket_allreduce is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zerosim.comm.group import Work
from zerosim.device.device import Buffer
from zerosim.parallel.base import Strategy
from zerosim.parallel.zero1 import Zero1
from zerosim.parallel.zero2 import Zero2
from zerosim.tensor.flat import Flat


class AllReduced(Strategy):
    """What stands in the place of a reduce_scatter out of buffers of constant size."""

    def launch_reduce(self, flats: Sequence[Flat], grads: list[Buffer]) -> tuple[Work[Any], Callable[[Any], None]]:
        def keep(_: Any) -> None:
            for flat, grad in zip(flats, grads, strict=True):
                with self.device.scope(unit=flat.module):
                    self.keep_shard(flat, self.own_part(flat, grad))

        return self.comm.launch_all_reduce(grads), keep

    def own_part(self, flat: Flat, grad: Buffer) -> Buffer:
        """A copy of the own slice."""
        shard = flat.new_grad_shard()
        own = grad[flat.own.start : flat.own.stop]
        self.device.kernel(0, self.device.backend.copy, own.array, shard.array)
        return shard


class AllReduceZero1(AllReduced, Zero1):
    """ZeRO-1 with an all_reduce in the place of its reduce_scatter."""

    def launch_in_place(self, grads: list[Buffer], own: list[Buffer]) -> Work[Any]:
        return self.comm.launch_all_reduce(grads)


class AllReduceZero2(AllReduced, Zero2):
    """ZeRO-2 with an all_reduce in the place of its reduce_scatter."""

    def reduce(self, flat: Flat, grad: Buffer) -> Buffer | None:
        self.comm.all_reduce(grad)
        return self.own_part(flat, grad)
