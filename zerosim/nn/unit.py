"""The Unit that a model is a list of: layers that are gathered, used and freed together.

(What FSDP calls a wrapping unit.) The autograd graph is cut at its border and kept per slot, so that
one micro-batch's forward and backward may lie apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from zerosim.device.device import Buffer
from zerosim.tensor.autograd import Node, Sink, backward
from zerosim.tensor.flat import Flat
from zerosim.tensor.tensor import Leaf, Tensor


class Declared(Protocol):
    """Flat buffers, and leaf modules with buffers of their own, that a unit's layers have declared."""

    @property
    def flats(self) -> Sequence[Flat]: ...
    @property
    def leaves(self) -> Sequence[Unit]: ...


class Unit:
    """A function over one flat buffer, gathered, used and freed as one.

    By leaf module (`leaf.py`) there are several: a unit has a buffer for each of its tensors, and a block none but
    those of its `leaves`, which are units themselves.

    `reduces` is False for the later of two units that share a flat (a tied head): backward comes
    through it first, and the shared gradient is complete only after the earlier one.
    """

    def __init__(
        self, name: str, flat: Flat | Declared, function: Callable[[Tensor], Tensor], *, reduces: bool = True
    ) -> None:
        self.name = name
        self.flats: Sequence[Flat] = [flat] if isinstance(flat, Flat) else flat.flats
        self.leaves: Sequence[Unit] = () if isinstance(flat, Flat) else flat.leaves
        self.function = function
        self.reduces = reduces
        self.goes_back = self.sends_back = True  # backward comes through it; its input's gradient is wanted
        self.defers = True  # a pipeline's schedule may make its weights' gradients apart from its input's
        self._under_way: dict[int, tuple[Leaf | None, Node | Sink]] = {}
        self._later: dict[int, deque[Callable[[], None]]] = {}

    @property
    def flat(self) -> Flat:
        """Its flat buffer, where it has one."""
        assert len(self.flats) == 1, f"{self.name} has {len(self.flats)} flat buffers of its own: see `flats`"
        return self.flats[0]

    def reach(self, sends_back: bool, trained: Collection[str]) -> None:
        """How far back gradients go: whether its input's is wanted, and which flat buffers are trained, by name."""
        self.sends_back = sends_back
        self.goes_back = sends_back or any(flat.name in trained for flat in self.all_flats)
        for leaf in self.leaves:
            leaf.reach(sends_back, trained)
            sends_back = leaf.goes_back

    @property
    def completes(self) -> Sequence[Flat]:
        """Flats whose gradient of a micro-batch is complete when this unit's backward is over."""
        return [flat for flat in self.flats if flat.is_trained] if self.reduces else ()

    @property
    def all_flats(self) -> Sequence[Flat]:
        """Its own and its leaves'."""
        return [*self.flats, *(flat for leaf in self.leaves for flat in leaf.flats)]

    def turns(self) -> Sequence[Unit]:
        """What is gathered and freed in its forward, in that order: itself, or its leaves."""
        return self.leaves or (self,)

    def turns_back(self) -> Sequence[Unit]:
        """The same in its backward."""
        return tuple(turn for turn in reversed(self.turns()) if turn.goes_back)

    def forward(self, x: Tensor, slot: int = 0, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The unit's output, cut from its graph; the graph is kept under `slot`, without the output's bytes.

        `function`: this once, in place of the unit's own.
        """
        leaf = Leaf() if self.sends_back and x.dtype.name != "int64" else None
        y = (function or self.function)(Tensor(x.buffer, leaf))
        if x.device.grad_enabled and self.goes_back:
            assert y.node is not None
            self._under_way[slot] = (leaf, y.node)
        return Tensor(y.buffer)

    def backward(self, grads: list[Buffer], slot: int = 0, *, defers: bool = False) -> None:
        """Collect the parameters' gradients; the output's gradient in `grads` gives way to the input's.

        (`autograd.backward` says why it is a list. Token ids have no gradient: it ends up empty.) `defers`: parameters'
        gradients are left for `backward_weights`.
        """
        leaf, node = self._under_way.pop(slot)
        self.walk(node, grads, slot, defers=defers)
        if leaf is not None:
            grads.append(leaf.take())

    def walk(self, node: Node | Sink, grads: list[Buffer], slot: int, *, defers: bool) -> None:
        """Go back through a graph of this unit's layers."""
        if defers:
            self._later[slot] = deque()
        for flat in self.flats:
            flat.later = self._later[slot] if defers else None
        backward(node, grads)
        for flat in self.flats:
            flat.later = None

    def backward_weights(self, slot: int = 0) -> None:
        """Make and collect the parameters' gradients that backward has left; each lets go of what it has read."""
        later = self._later.pop(slot)
        while later:
            later.popleft()()

    def forget(self) -> None:
        """Drop graphs that no backward will walk."""
        self._under_way.clear()
