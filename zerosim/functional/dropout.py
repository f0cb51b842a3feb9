"""Dropout, and its masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerosim.backends.kernels import Window
from zerosim.device.device import Buffer, Kind
from zerosim.device.work import work_of
from zerosim.dtypes import uint8
from zerosim.errors import InputError
from zerosim.functional.common import Grads, grad_like, like
from zerosim.tensor.tensor import Tensor, apply


@dataclass(frozen=True, slots=True)
class Dropout:
    """Saves its 1-byte mask."""

    mask: Buffer
    keep: float

    def backward(self, grad: Buffer) -> Grads:
        dx = grad_like(grad)
        arrays = grad.array, self.mask.array, self.keep, dx.array
        grad.device.kernel(2 * grad.numel, grad.device.backend.dropout, *arrays)
        return (dx,)


@dataclass(frozen=True, slots=True)
class RecomputedMask:
    """Saves nothing: the mask is a function of its key, and backward recomputes it."""

    probability: float
    key: tuple[int, int]
    windows: Sequence[Window]

    def backward(self, grad: Buffer) -> Grads:
        mask = dropout_mask(Tensor(grad), grad.shape, self.probability, self.key, self.windows)
        assert mask is not None
        return Dropout(mask, 1.0 - self.probability).backward(grad)


def check_chance(probability: float) -> None:
    """Check the probability to drop. Raises: InputError for a number that is no such probability."""
    if not 0.0 <= probability < 1.0:
        raise InputError(f"dropout {probability}: expected a chance in [0, 1)")


def dropout_mask(
    x: Tensor, shape: tuple[int, ...], probability: float, key: tuple[int, int], windows: Sequence[Window] = ()
) -> Buffer | None:
    """Return a mask of this shape on x's device, uint8, 1 where an element is kept; None if nothing is dropped.

    `windows`: those of a whole's mask, one after the other; of several each is one run.

    Raises: InputError for a number that is no such probability.
    """
    check_chance(probability)
    if probability == 0.0:
        return None
    mask = x.device.alloc(shape, uint8, Kind.ACTIVATION)
    draw = x.device.backend.dropout_mask
    if len(windows) < 2:
        x.device.kernel(0, draw, key, probability, mask.array, *(windows or (None,)))
        return mask

    def draw_each() -> None:
        flat, at = mask.array.reshape(-1), 0
        for window in windows:
            draw(key, probability, flat[at : at + window.run], window)
            at += window.run

    x.device.kernels((work_of(draw.__name__, 0, (key, probability, mask.array)),), draw_each)
    return mask


def dropout(
    x: Tensor,
    probability: float,
    key: tuple[int, int],
    *,
    op: str = "dropout",
    windows: Sequence[Window] = (),
    keep_mask: bool = True,
) -> Tensor:
    """Drop each element of x with chance `probability`, and divide the rest by 1 - probability.

    The dropped elements depend on `key` and the position alone (`tensor/rng.py`). Probability 0 returns x itself.
    `op` is its name within the unit. If x is a part of a whole, `windows` say which. Without
    `keep_mask` backward recomputes the mask. Shapes: x and result any, the same.

    Raises: InputError for a number that is no such probability.
    """
    mask = dropout_mask(x, x.shape, probability, key, windows)
    if mask is None:
        return x
    out = like(x)
    keep = 1.0 - probability
    x.device.kernel(2 * out.numel, x.device.backend.dropout, x.array, mask.array, keep, out.array)
    if not keep_mask:
        return apply(RecomputedMask(probability, key, windows), out, x, op=op)
    return apply(Dropout(mask, keep), out, x, op=op, saved={"mask": mask})
