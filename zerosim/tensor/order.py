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
    return _passed(x, max(x.node.depth, other.node.depth) + 1)


def visit_before(x: Tensor, other: Tensor) -> None:
    """Let backward visit the op of x, which ran later, before that of `other`."""
    if isinstance(x.node, Node) and other.node is not None:
        x.node.depth = max(x.node.depth, other.node.depth + 1)


def visit_with(x: Tensor, other: Tensor) -> None:
    """Let backward visit the op of x as late as that of `other`, which x is computed from, and before it."""
    if isinstance(x.node, Node) and other.node is not None:
        x.node.depth = other.node.depth


def visited_last(x: Tensor) -> Tensor:
    """Return x, such that backward visits its op after all else: where x needs nothing that other branches made."""
    return x if x.node is None else _passed(x, 0)


def _passed(x: Tensor, depth: int) -> Tensor:
    """Return x behind a node of this depth."""
    node = Node(Passed(), (x.node,))
    node.depth = depth
    after = Tensor(x.buffer, node)
    after.discarded = x.discarded
    return after
