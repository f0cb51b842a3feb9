"""The temporaries of a step by PyTorch's optimizers: of all tensors together (foreach), or of one after the other (a
loop over tensors). A fused optimizer has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from zerosim.device.device import Kind
from zerosim.dtypes import DType
from zerosim.optim.elementwise import Elementwise
from zerosim.optim.optimizer import Optimizer
from zerosim.tensor.flat import Flat, in_turn


class Temporaries:
    """An optimizer's temporaries, in the states' format of each flat (`stored`), contents undefined."""

    def __init__(self, optimizer: Optimizer, *, foreach: bool = False, for_loop: bool = False) -> None:
        self._of_loop = optimizer.loop_temporaries if for_loop and isinstance(optimizer, Elementwise) else 0
        self._of_all = optimizer.foreach_temporaries if foreach else 0

    @contextmanager
    def of_flats(self, flats: Sequence[Flat], stored: Callable[[Flat], DType], *, is_one: bool) -> Iterator[None]:
        """Allocate those of flats that are stepped together inside the block. `is_one`: they are one tensor, so a loop
        over tensors has all of them at once."""
        held = [
            flat.device.alloc((flat.own.size,), stored(flat), Kind.TEMP, padding=flat.own_padding)
            for flat in in_turn(flats)
            if not flat.held.is_idle
            for _ in range(self._of_all or (self._of_loop if is_one else 0))
        ]
        yield
        del held

    @contextmanager
    def of_tensor(self, flat: Flat, stored: Callable[[Flat], DType], *, is_one: bool) -> Iterator[None]:
        """Allocate those of a loop over a flat's tensors inside the block: of the largest. `is_one`: they are there."""
        count = 0 if is_one else self._of_loop
        most = max((mine.numel for mine in flat.spec.within(flat.own)), default=0) if count else 0
        held = [flat.device.alloc((most,), stored(flat), Kind.TEMP) for _ in range(count if most else 0)]
        yield
        del held
