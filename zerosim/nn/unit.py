"""The Unit that a model is a list of: layers that are gathered, used and freed together.

(What FSDP calls a wrapping unit.) The autograd graph is cut at its border and kept per slot, so that
one micro-batch's forward and backward may lie apart.
"""

from __future__ import annotations

from collections.abc import Callable

from zerosim.device.device import Buffer
from zerosim.tensor.autograd import Node, Sink, backward
from zerosim.tensor.flat import Flat
from zerosim.tensor.tensor import Leaf, Tensor


class Unit:
    """A function over one flat buffer, gathered, used and freed as one.

    `reduces` is False for the later of two units that share a flat (a tied head): backward comes
    through it first, and the shared gradient is complete only after the earlier one.
    """

    def __init__(self, name: str, flat: Flat, function: Callable[[Tensor], Tensor], *, reduces: bool = True) -> None:
        self.name = name
        self.flat = flat
        self.function = function
        self.reduces = reduces
        self._under_way: dict[int, tuple[Leaf | None, Node | Sink]] = {}

    def forward(self, x: Tensor, slot: int = 0, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The unit's output, cut from its graph; the graph is kept under `slot`, without the output's bytes.

        `function`: this once, in place of the unit's own.
        """
        leaf = None if x.dtype.name == "int64" else Leaf()
        y = (function or self.function)(Tensor(x.buffer, leaf))
        if x.device.grad_enabled:
            assert y.node is not None
            self._under_way[slot] = (leaf, y.node)
        return Tensor(y.buffer)

    def backward(self, grads: list[Buffer], slot: int = 0) -> None:
        """Collect the parameters' gradients; the output's gradient in `grads` gives way to the input's.

        (`autograd.backward` says why it is a list. Token ids have no gradient: it ends up empty.)
        """
        leaf, node = self._under_way.pop(slot)
        backward(node, grads)
        if leaf is not None:
            grads.append(leaf.take())

    def forget(self) -> None:
        """Drop graphs that no backward will walk."""
        self._under_way.clear()
