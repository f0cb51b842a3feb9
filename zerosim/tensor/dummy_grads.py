"""Transformer Engine's result in place of a weight's gradient: one buffer for each shape of weight.

With gradient accumulation fused, a linear map's product adds to the gradient buffer itself. PyTorch's engine still
wants a gradient of the weight's shape, so that its hooks run: a dummy, which Transformer Engine caches by shape and
dtype for the whole run (transformer_engine/pytorch/module/base.py, get_dummy_wgrad). Packed maps, q|k|v and gate|up,
have one weight there. Megatron's own maps, the table and the head, have no permanent dummy; later versions of Megatron
(core/tensor_parallel/layers.py) take the head's from the same cache, but the version measured on B200 did not.

Here a product writes into the dummy, and the dummy is added to the gradient buffer: the bytes are the same, and the
sums round as they do without fusion.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import DType


class DummyGrads:
    """One rank's dummies, allocated at a map's first forward (there at its first backward), so that the first step
    holds as much as later ones."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._held: dict[tuple[tuple[int, ...], DType], Buffer] = {}

    def holds(self, shapes: Sequence[tuple[int, ...]], dtype: DType) -> bool:
        """Return whether there is a dummy for weights of these shapes, side by side."""
        return (_packed(shapes), dtype) in self._held

    @property
    def shapes(self) -> tuple[tuple[tuple[int, ...], DType], ...]:
        """The shapes and dtypes of its dummies."""
        return tuple(self._held)

    def window(self, shapes: Sequence[tuple[int, ...]], index: int, dtype: DType) -> Buffer:
        """Return the part for weight `index` of those that are packed side by side, by rows; contents undefined."""
        packed = _packed(shapes)
        if (packed, dtype) not in self._held:
            with self._device.scope(unit="dummy gradients"):
                self._held[packed, dtype] = self._device.alloc(packed, dtype, Kind.TEMP)
        start = sum(shape[0] for shape in shapes[:index])
        return self._held[packed, dtype][start : start + shapes[index][0]]


def _packed(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return sum(shape[0] for shape in shapes), *shapes[0][1:]
