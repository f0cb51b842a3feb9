"""A tensor beside the stream of activations: one unit makes it, later units read it.

An encoder's output is one, which each block of the decoder reads, and so is the bias of scores that all blocks of a
stack add. It is a leaf of its readers' graphs, where its gradient adds up, until backward comes to its maker. Values
stay from forward to backward. One microbatch is in flight at a time: no pipeline has asides.
"""

from __future__ import annotations

from zerosim.device.device import Buffer, Device, Kind
from zerosim.tensor.autograd import Node, Sink
from zerosim.tensor.tensor import Leaf, Tensor


class Aside:
    """What one microbatch has of it: the values, the maker's graph, and the leaf of the readers' graphs."""

    def __init__(self) -> None:
        self.buffer: Buffer | None = None
        self.node: Node | Sink | None = None
        self.leaf: Leaf | None = None

    def put(self, x: Tensor) -> None:
        """Take the maker's result out of its graph."""
        self.buffer, self.node = x.buffer, x.node
        self.leaf = None if x.node is None else Leaf()

    def read(self) -> Tensor:
        assert self.buffer is not None, "nobody has made it yet"
        return Tensor(self.buffer, self.leaf)

    def take(self) -> Tensor:
        """Read it for the last time: its values stay where an op saves them."""
        x, self.buffer = self.read(), None
        return x

    def open(self) -> None:
        """Allocate its gradient, to which every reader adds."""
        if self.leaf is not None and self.leaf.grad is None:
            x = self.read()
            self.leaf.grad, self.leaf.owned = x.new_grad(), True
            x.device.kernel(0, x.device.backend.fill, self.leaf.grad.array, 0.0)

    def like(self, other: Aside, device: Device) -> None:
        """Take another one's place on a device: for a rehearsal of its readers (`train/repeated.py`)."""
        x = other.read()
        self.buffer = device.alloc(x.shape, x.dtype, Kind.ACTIVATION)
        self.leaf = None if other.leaf is None else Leaf()

    def forget(self) -> None:
        self.buffer = self.node = self.leaf = None
