"""What a linear map in 8 bits keeps from step to step: its operands' amax histories, and its weights' codes.

The first use of all allocates it, and the first use of each step brings it up to date. Later uses read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Device, Kind
from zerosim.functional.fp8 import Coded, Seen, Wanted, cast
from zerosim.functional.fp8_recipes import Products
from zerosim.tensor.float8 import Casting


class Kept:
    """A map's histories by operand, and its weights' codes with the step of each. `share` makes an amax that of all
    ranks that hold a part of the map's input."""

    def __init__(self, products: Products, share: Callable[[Buffer], None]) -> None:
        self.products, self.share = products, share
        self.seen = dict[str, Seen]()
        self.weights = dict[int, Sequence[Coded]]()
        self.copies = dict[int, Buffer]()
        self.steps = dict[int, int]()

    def begin(self, device: Device, weights: int) -> None:
        """Allocate all histories in the first use."""
        if self.products.history is None or self.seen:
            return
        for name in ("x", *(f"{of} {at}" for of in ("weight", "grad") for at in range(weights))):
            self.seen[name] = Seen.new(device, self.products.history.length)

    def of(self, device: Device, name: str, casting: Casting, *, shared: bool = False) -> Seen | None:
        """Return an operand's history, ready for this step; None without delayed scaling."""
        if self.products.history is None:
            return None
        self.seen[name].roll(device, casting, self.products.history, self.share if shared else None)
        return self.seen[name]

    def weight(self, device: Device, at: int, values: Array, ways: Sequence[Wanted]) -> Sequence[Coded]:
        """Return a weight's codes of this step."""
        if self.steps.get(at) != device.where.step:
            seen, before = self.of(device, f"weight {at}", ways[0].casting), self.weights.get(at, [None] * len(ways))
            ways = [way._replace(into=old) for way, old in zip(ways, before, strict=True)]
            self.weights[at] = cast(device, values, ways, seen)
            self.steps[at] = device.where.step
        return self.weights[at]

    def copy(self, device: Device, at: int, codes: Buffer) -> Buffer:
        """Return a copy of a stored weight's codes of this step."""
        if at not in self.copies:
            self.copies[at] = device.alloc(codes.shape, codes.dtype, Kind.PARAM)
        if self.steps.get(at) != device.where.step:
            device.kernel(0, device.backend.copy, codes.array, self.copies[at].array)
            self.steps[at] = device.where.step
        return self.copies[at]
