"""Tensors: a buffer, and its place in the graph. Parameters: a handle on a window of a flat buffer.

Ops take either. An op saves the `Parameter`, never its array, because the data behind it is taken
away and brought back (ZeRO-3 shards it between uses).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerosim.autograd import Gradient, Node, Rule, Sink, add_gradients, backward
from zerosim.backends.kernels import Array
from zerosim.device import Buffer, Device, Kind
from zerosim.dtypes import DType, dtype

if TYPE_CHECKING:
    from zerosim.sharding import Flat


class Leaf:
    """The sink of a tensor that wants its gradient; holds no data of the tensor itself."""

    __slots__ = ("depth", "grad", "owned")

    def __init__(self) -> None:
        self.depth = 0
        self.grad: Buffer | None = None
        self.owned = False

    def accumulate(self, grad: Gradient) -> None:
        if self.grad is not None:
            grad = add_gradients(Gradient(self.grad, self.owned), grad)
        self.grad, self.owned = grad

    def take(self) -> Buffer | None:
        """Hand the gradient over; this sink forgets it."""
        grad, self.grad = self.grad, None
        return grad


class Tensor:
    """An n-dimensional array on a device, and the node that made it (None: no gradient flows)."""

    __slots__ = ("buffer", "node")

    def __init__(self, buffer: Buffer, node: Node | Sink | None = None) -> None:
        self.buffer = buffer
        self.node = node

    @property
    def array(self) -> Array:
        return self.buffer.array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.buffer.shape

    @property
    def dtype(self) -> DType:
        return self.buffer.dtype

    @property
    def device(self) -> Device:
        return self.buffer.storage.device

    @property
    def requires_grad(self) -> bool:
        return self.node is not None

    @property
    def grad(self) -> Buffer | None:
        """A leaf's collected gradient."""
        return self.node.grad if isinstance(self.node, Leaf) else None

    def new_grad(self) -> Buffer:
        """A buffer for this tensor's gradient, contents undefined."""
        return self.device.alloc(self.shape, self.dtype, Kind.ACTIVATION_GRAD)

    def numpy(self) -> Any:
        """The values as a NumPy array (half types as float32)."""
        return self.device.backend.to_host(self.array)

    def backward(self) -> None:
        """Gradients of this one-element tensor with respect to every leaf under it."""
        if self.node is None or self.buffer.numel != 1:
            raise ValueError(f"backward starts at one element that requires a gradient, not at shape {self.shape}")
        seed = self.new_grad()
        self.device.kernel(0, self.device.backend.fill, seed.array, 1.0)
        backward(self.node, seed)

    # Operators are the primitive ops; imported where used, because ops are built on tensors.
    def __add__(self, other: Operand | float) -> Tensor:
        from zerosim import primitives

        return primitives.add(self, other)

    def __sub__(self, other: Operand | float) -> Tensor:
        from zerosim import primitives

        return primitives.subtract(self, other)

    def __mul__(self, other: Operand | float) -> Tensor:
        from zerosim import primitives

        return primitives.multiply(self, other)

    def __truediv__(self, other: Operand | float) -> Tensor:
        from zerosim import primitives

        return primitives.divide(self, other)

    def __matmul__(self, other: Operand) -> Tensor:
        from zerosim import primitives

        return primitives.matmul(self, other)

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self.dtype}, requires_grad={self.requires_grad})"


class Parameter:
    """One named weight: a window of its unit's flat buffer, there only while that buffer is.

    Its gradient goes to the same window of the flat gradient buffer.
    """

    __slots__ = ("depth", "flat", "index", "name", "offset", "shape")

    requires_grad = True

    def __init__(self, flat: Flat, index: int, name: str, shape: tuple[int, ...], offset: int) -> None:
        self.flat = flat
        self.index = index
        self.name = name
        self.shape = shape
        self.offset = offset
        self.depth = 0

    @property
    def node(self) -> Sink:
        return self

    @property
    def array(self) -> Array:
        return self.flat.param_window(self.index).array

    @property
    def dtype(self) -> DType:
        return self.flat.dtype

    @property
    def device(self) -> Device:
        return self.flat.device

    def new_grad(self) -> Buffer:
        """Where this parameter's gradient is to be written, contents undefined.

        The first use in a micro-batch gets the window itself; a later one (a tied weight) gets a
        buffer of its own, which `accumulate` then adds.
        """
        return self.flat.grad_window(self.index)

    def accumulate(self, grad: Gradient) -> None:
        self.flat.collect_grad(self.index, grad.buffer)

    def __repr__(self) -> str:
        return f"Parameter({self.name}, shape={self.shape}, dtype={self.dtype})"


Operand = Tensor | Parameter


def apply(rule: Rule, out: Buffer, *inputs: Operand) -> Tensor:
    """`out` as a tensor whose gradient `rule` will take to `inputs`, where any of them wants one."""
    if out.device.grad_enabled and any(x.requires_grad for x in inputs):
        return Tensor(out, Node(rule, tuple(x.node for x in inputs)))
    return Tensor(out)


def tensor(values: Any, device: Device, *, dtype_name: str | DType = "fp32", requires_grad: bool = False) -> Tensor:
    """A tensor with a copy of `values` (anything NumPy takes) on `device`."""
    import numpy as np

    host = np.asarray(values)
    kind = Kind.ACTIVATION
    buffer = device.alloc(host.shape, dtype(dtype_name), kind)
    device.backend.from_host(host, buffer.array)
    return Tensor(buffer, Leaf() if requires_grad else None)
