"""Tensors: a buffer, and its place in the graph. Parameters: a handle on a window of a flat buffer.

Ops take either. An op saves the `Parameter`, never its array, because ZeRO-3 frees and gathers the data between uses.

By hand, as in a lesson:

    device = cpu()
    w = tensor([1.0, 2.0], device, requires_grad=True)
    ((3 * w - 1) * w).sum().backward()
    w.grad.numpy()                          # 6 w - 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

from zerosim.backends.kernels import Array, Backend
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.events import Save
from zerosim.device.recorder import Recorder
from zerosim.dtypes import DType
from zerosim.dtypes import dtype as dtype_of
from zerosim.errors import InputError
from zerosim.placement.formats import Format
from zerosim.placement.spec import FlatSpec
from zerosim.tensor.autograd import Gradient, Node, Rule, Sink, add_gradients, backward
from zerosim.tensor.collector import Collector


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

    def take(self) -> Buffer:
        """Hand the gradient over; this sink forgets it."""
        grad, self.grad = self.grad, None
        assert grad is not None, "backward did not reach this value"
        return grad


class Remade(Protocol):
    """What rules save of a tensor whose bytes are discarded: reading them recomputes them (`tensor/discarded.py`)."""

    device: Device
    shape: tuple[int, ...]
    dtype: DType
    requires_grad: bool

    @property
    def buffer(self) -> Buffer: ...
    @property
    def array(self) -> Array: ...
    def new_grad(self) -> Buffer: ...


class Primitives(Protocol):
    """The ops behind a tensor's operators and methods: `tensor/ops.py`, which is built on tensors."""

    add: Op
    subtract: Op
    multiply: Op
    divide: Op
    matmul: Op
    exp: Op
    log: Op
    sqrt: Op
    tanh: Op
    sum: Op
    mean: Op
    reshape: Op
    transpose: Op


class Tensor:
    """An n-dimensional array on a device, and the node that made it (None: no gradient flows).

    `discarded`: what rules save of it if its bytes are discarded.
    """

    __slots__ = ("buffer", "discarded", "node")
    primitives: ClassVar[Primitives]  # set once, in tensor/__init__.py

    def __init__(self, buffer: Buffer, node: Node | Sink | None = None) -> None:
        self.buffer = buffer
        self.node = node
        self.discarded: Remade | None = None

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
    def grad(self) -> Tensor | None:
        """A leaf's collected gradient. It grows with each backward; `x.grad = None` resets it."""
        collected = self.node.grad if isinstance(self.node, Leaf) else None
        return None if collected is None else Tensor(collected)

    @grad.setter
    def grad(self, value: None) -> None:
        if value is not None:
            raise InputError("a gradient is collected by backward: it can be cleared (x.grad = None), not set")
        if isinstance(self.node, Leaf):
            self.node.grad = None

    def new_grad(self) -> Buffer:
        """Return a buffer for this tensor's gradient, contents undefined."""
        return self.device.alloc(self.shape, self.dtype, Kind.ACTIVATION_GRAD)

    def numpy(self) -> Any:
        """Return the values as a NumPy array (half types as float32)."""
        return self.device.backend.to_host(self.array)

    def item(self) -> float:
        """Return the value of a tensor of one element."""
        return float(self.numpy().item())

    def backward(self) -> None:
        """Compute gradients of this one-element tensor with respect to every leaf under it.

        Raises: InputError for any other tensor.
        """
        if self.node is None or self.buffer.numel != 1:
            raise InputError(
                f"backward starts at one element that requires a gradient, not at {self}: "
                "take a sum or a mean, of tensors made with requires_grad=True"
            )
        seed = self.new_grad()
        self.device.kernel(0, self.device.backend.fill, seed.array, 1.0)
        backward(self.node, [seed])

    # Operators and methods are the primitive ops.
    __array_ufunc__ = None  # so that `number * tensor` with a NumPy number is ours

    def __add__(self, other: Operand | float) -> Tensor:
        return self.primitives.add(self, other)

    def __sub__(self, other: Operand | float) -> Tensor:
        return self.primitives.subtract(self, other)

    def __rsub__(self, other: Operand | float) -> Tensor:
        return self.primitives.subtract(other, self)

    def __mul__(self, other: Operand | float) -> Tensor:
        return self.primitives.multiply(self, other)

    def __truediv__(self, other: Operand | float) -> Tensor:
        return self.primitives.divide(self, other)

    def __rtruediv__(self, other: Operand | float) -> Tensor:
        return self.primitives.divide(other, self)

    def __matmul__(self, other: Operand) -> Tensor:
        return self.primitives.matmul(self, other)

    def __neg__(self) -> Tensor:
        return self * -1.0

    __radd__ = __add__
    __rmul__ = __mul__

    def exp(self) -> Tensor:
        return self.primitives.exp(self)

    def log(self) -> Tensor:
        return self.primitives.log(self)

    def sqrt(self) -> Tensor:
        return self.primitives.sqrt(self)

    def tanh(self) -> Tensor:
        return self.primitives.tanh(self)

    def sum(self, *dims: int, keepdims: bool = False) -> Tensor:
        """Sum over `dims`; without any, over all."""
        return self.primitives.sum(self, dims or None, keepdims=keepdims)

    def mean(self, *dims: int, keepdims: bool = False) -> Tensor:
        """Average over `dims`; without any, over all."""
        return self.primitives.mean(self, dims or None, keepdims=keepdims)

    def reshape(self, *shape: int) -> Tensor:
        return self.primitives.reshape(self, *shape)

    def transpose(self, *order: int) -> Tensor:
        """Reorder dims; without an order, reverse them."""
        return self.primitives.transpose(self, *order)

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self.dtype}, requires_grad={self.requires_grad})"


Op = Callable[..., Tensor]


class Holder(Protocol):
    """What a parameter asks of the flat buffer that holds it (`tensor/flat.py`)."""

    device: Device
    collector: Collector
    format: Format | None
    value_dtype: DType
    kept: list[Any]

    @property
    def spec(self) -> FlatSpec: ...
    def param_window(self, index: int) -> Buffer: ...
    def grad_window(self, index: int) -> Buffer: ...
    def map_grad_window(self, index: int, packed: Sequence[tuple[int, ...]], place: int) -> Buffer: ...
    def collect_grad(self, index: int, grad: Buffer) -> None: ...
    def postpone(self, index: int, make: Callable[[], Buffer]) -> None: ...


class Parameter:
    """One named weight: a window of its unit's flat buffer, available only while that buffer is.

    Its gradient goes to the same window of the flat gradient buffer; a parameter of an untrained buffer has none.
    `layer` is its layer within the unit: attn.c_attn in h.0.
    """

    __slots__ = ("depth", "flat", "index", "layer", "name", "shape")

    def __init__(self, flat: Holder, index: int, name: str, layer: str, shape: tuple[int, ...]) -> None:
        self.flat = flat
        self.index = index
        self.name = name
        self.layer = layer
        self.shape = shape
        self.depth = 0

    @property
    def requires_grad(self) -> bool:
        return self.flat.spec.is_trained

    @property
    def node(self) -> Sink | None:
        return self if self.flat.spec.is_trained else None

    @property
    def buffer(self) -> Buffer:
        """Its values: a window of the flat buffer or, for codes, a new buffer, which the op that reads it holds."""
        return self.flat.param_window(self.index)

    @property
    def array(self) -> Array:
        assert self.flat.format is None, f"{self.name} is kept as codes: hold its buffer while it is read"
        return self.buffer.array

    @property
    def dtype(self) -> DType:
        return self.flat.value_dtype

    @property
    def device(self) -> Device:
        return self.flat.device

    def new_grad(self) -> Buffer:
        """Return where to write this parameter's gradient, contents undefined.

        The first use in a microbatch gets the window itself; a later one (a tied weight) gets a buffer of its own,
        which `accumulate` then adds.
        """
        return self.flat.grad_window(self.index)

    def accumulate(self, grad: Gradient) -> None:
        self.flat.collect_grad(self.index, grad.buffer)

    def __repr__(self) -> str:
        return f"Parameter({self.name}, shape={self.shape}, dtype={self.dtype})"


Operand = Tensor | Parameter


@dataclass(frozen=True, slots=True)
class Outline:
    """What a rule saves of a tensor whose gradient it computes without reading its values: no bytes."""

    device: Device
    shape: tuple[int, ...]
    dtype: DType
    requires_grad: bool

    def new_grad(self) -> Buffer:
        return self.device.alloc(self.shape, self.dtype, Kind.ACTIVATION_GRAD)


def outline(x: Tensor) -> Outline:
    """Return `x` without its bytes."""
    return Outline(x.device, x.shape, x.dtype, x.requires_grad)


Saved = Mapping[str, "Operand | Buffer | Remade | Outline | None"]
"""What a rule holds until its backward, by its role in the rule. Parameters are handles and hold no bytes, and neither
does a discarded result."""


def apply(rule: Rule, out: Buffer, *inputs: Operand, op: str = "", saved: Saved | None = None) -> Tensor:
    """Return `out` as a tensor whose gradient `rule` will bring to `inputs`, if any of them wants one.

    Then record the rule's `saved` buffers as held by `op`, its name within the unit.
    """
    check_device(*inputs)
    if out.device.grad_enabled and any(x.requires_grad for x in inputs):
        if saved is not None and out.device.recorder.enabled:
            record_saved(out.device, op, saved)
        if saved is not None and out.device.on_save is not None:
            out.device.on_save(saved.values())
        return Tensor(out, Node(rule, tuple(x.node for x in inputs)))
    return Tensor(out)


def record_saved(device: Device, op: str, saved: Saved) -> None:
    """Record one event for each buffer that `op` holds from here to its backward. All of its storage stays live."""
    for what, held in saved.items():
        if not isinstance(held, Tensor | Buffer):
            continue
        storage = (held.buffer if isinstance(held, Tensor) else held).storage
        device.recorder.add(Save(device.where, op, what, storage.id, int(storage.array.nbytes)))


def layer_of(weight: Operand, otherwise: str) -> str:
    """Return the name of the layer that `weight` belongs to, within its unit; for a tensor made by hand,
    `otherwise`."""
    return weight.layer if isinstance(weight, Parameter) else otherwise


def check_device(first: Operand, *others: Operand) -> None:
    """Check that operands of one op lie on one device. Raises: InputError if they do not."""
    device = first.device
    for other in others:
        if other.device is not device:
            raise InputError(
                f"an op is given tensors of two devices, {first} and {other}: "
                "make one device, device = cpu(), and all tensors on it, tensor(values, device)"
            )


def tensor(
    values: Any, device: Device | None = None, *, dtype: str | DType = "fp32", requires_grad: bool = False
) -> Tensor:
    """Make a tensor with a copy of `values` (anything NumPy takes) on `device`; without one, on a new device."""
    import numpy as np

    host = np.asarray(values)
    device = device or cpu()
    buffer = device.alloc(host.shape, dtype_of(dtype), Kind.ACTIVATION)
    device.backend.from_host(host, buffer.array)
    return Tensor(buffer, Leaf() if requires_grad else None)


def cpu(recorder: Recorder | None = None) -> Device:
    """Make a device to play with, outside any world: NumPy, no memory limit. It records only into a given
    `recorder`."""
    from zerosim.backends.numpy.backend import NumpyBackend

    return Device(0, cast(Backend, NumpyBackend()), recorder=recorder or Recorder(enabled=False))
