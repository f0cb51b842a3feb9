"""Discarded results: a rule that reads one in backward recomputes it.

(2205.05198, section 5; Megatron's output-discarding checkpoints; PyTorch's selective checkpoints keep expensive results
and discard the rest.) An op runs as usual. Its readers then save a `Discarded`, which knows the function and its
inputs. The first to ask for its values runs the function again, without a graph; those bytes live until the last rule
that holds it has run its backward. An input may be discarded itself: then it is recomputed first.

    y = discard("layernorm", norm, x)     x is kept by norm's rule, y's bytes go when its reader has run
    z = linear(y, w)                      linear's rule holds y as Discarded(norm, x)

Functions give the same bits twice: dropout's masks depend only on where they are used.
"""

from __future__ import annotations

from collections.abc import Callable

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import DType
from zerosim.tensor.tensor import Remade, Tensor, record_saved


class Discarded:
    """A rule's reference to a recomputed tensor: the function, and no bytes until they are asked for."""

    __slots__ = ("_buffer", "_inputs", "_run", "_unit", "device", "dtype", "part", "requires_grad", "shape")

    def __init__(self, part: str, of: Tensor, run: Callable[..., Tensor], inputs: tuple[Readable, ...]) -> None:
        self.part = part
        self.device: Device = of.device
        self.shape: tuple[int, ...] = of.shape
        self.dtype: DType = of.dtype
        self.requires_grad: bool = of.requires_grad
        self._run = run
        self._inputs = inputs
        self._unit = of.device.where.unit
        self._buffer: Buffer | None = None

    @property
    def buffer(self) -> Buffer:
        """Its bytes, recomputed if they are missing."""
        return self._buffer or self.recompute()

    def recompute(self) -> Buffer:
        """Recompute its bytes if they are missing, and keep them for all rules that hold it."""
        if self._buffer is None:
            with self.device.no_grad(), self.device.scope(unit=self._unit):  # a module after it may have asked
                self._buffer = self._run(*(Tensor(x.buffer) for x in self._inputs)).buffer
            self._inputs = ()  # frees what was recomputed for this alone
            if self.device.recorder.enabled:
                record_saved(self.device, self.part, {"made again": self._buffer})
        return self._buffer

    @property
    def array(self) -> Array:
        return self.buffer.array

    def new_grad(self) -> Buffer:
        """Return a buffer for its gradient, contents undefined."""
        return self.device.alloc(self.shape, self.dtype, Kind.ACTIVATION_GRAD)


Readable = Tensor | Remade
"""A rule's reference to a tensor whose values it reads."""


def held(x: Tensor) -> Readable:
    """Return what a rule saves of x."""
    return x.discarded or x


def discard(part: str, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return run(*inputs); readers of the result save how to recompute it. `part` names it in the record."""
    y = run(*inputs)
    if y.device.grad_enabled and not any(y is x for x in inputs):
        y.discarded = Discarded(part, y, run, tuple(map(held, inputs)))
    return y
