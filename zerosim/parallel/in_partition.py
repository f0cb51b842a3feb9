"""Stage 2's gradients as DeepSpeed stores them: a backward's first gradient makes room for all.

    one microbatch    2 Psi/N from the first reduced gradient on, not gradient by gradient
    more              the same again in each later backward, which ends with adding it to the sum

There a slice is one run of all parameters, and its rank makes room at the first gradient of the slice: the last rank
at the beginning of backward, rank 0 near its end. Here every flat has a slice, so every rank is like the last one.

Source: DeepSpeed 0.19.8, stage_1_and_2.py (copy_grads_in_partition; independent_gradient_partition_epilogue).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerosim.comm.group import Work
from zerosim.device.device import Buffer
from zerosim.parallel.exchange import Slices
from zerosim.parallel.reducer import OutOfBuffers
from zerosim.tensor.flat import Flat, in_turn


class InPartition(OutOfBuffers):
    """Out of buffers of constant size into a buffer of the local slice of all gradients."""

    def __init__(self, exchange: Slices, numel: int, **how: Any) -> None:
        super().__init__(exchange, numel, **how)
        self._trained: Sequence[Flat] = ()
        self._room: dict[str, Buffer] = {}  # of gradients that are not reduced yet, by flat
        self._parts: list[tuple[Flat, Buffer | None, bool]] = []

    def open(self, flats: Sequence[Flat]) -> None:
        super().open(flats)
        self._trained = flats

    def close(self) -> None:
        super().close()
        parts, self._parts = self._parts, []
        parts.reverse()
        while parts:
            flat, own, averages = parts.pop()
            with flat.device.scope(unit=flat.spec.module):
                self._averages.append((flat, *super()._keep_part(flat, own, averages)))
                del own

    def _keep(self, flats: Sequence[Flat], averages: bool, reduced: Any) -> None:
        if not self._parts:
            for flat in in_turn(self._trained):
                with flat.device.scope(unit=flat.spec.module):
                    self._room[flat.name] = flat.new_grad_shard()
        for flat in flats:
            del self._room[flat.name]  # each part takes its own room
        super()._keep(flats, averages, reduced)

    def _keep_part(self, flat: Flat, own: Buffer | None, averages: bool) -> tuple[Buffer | None, Work[Any] | None]:
        self._parts.append((flat, own, averages))
        return None, None
