"""The order in which backward visits branches that lie side by side.

It goes from the deepest op to the shallowest, so that of two branches it would do an op of one, then an op of the
other. PyTorch visits the op first that ran last: all of the second branch, then all of the first.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.device.device import Buffer
from zerosim.tensor.autograd import Node
from zerosim.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Passed:
    """Saves nothing; hands the gradient on."""

    def backward(self, grad: Buffer) -> tuple[Buffer]:
        return (grad,)


def ran_after(x: Tensor, other: Tensor) -> Tensor:
    """Return x, such that backward visits what is computed from it before the op of `other`."""
    if x.node is None or other.node is None:
        return x
    node = Node(Passed(), (x.node,))
    node.depth = max(node.depth, other.node.depth + 1)
    after = Tensor(x.buffer, node)
    after.discarded = x.discarded
    return after
