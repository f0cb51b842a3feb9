"""The Unit, the element of a model's list: layers that are gathered, used and freed together.

(FSDP calls it a wrapping unit.) The autograd graph is cut at its boundary and stored per microbatch (`slot`), so that
other microbatches may run between one microbatch's forward and backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from zerosim.device.device import Buffer
from zerosim.nn.aside import Aside
from zerosim.placement.block import BOTH, WAYS
from zerosim.tensor.autograd import Node, Sink, backward
from zerosim.tensor.flat import Flat
from zerosim.tensor.tensor import Leaf, Tensor


class Declared(Protocol):
    """The flat buffers, and leaf modules with their own buffers, that a unit's layers have declared."""

    @property
    def flats(self) -> Sequence[Flat]: ...
    @property
    def leaves(self) -> Sequence[Unit]: ...


class Unit:
    """A function over one flat buffer, gathered, used and freed as one.

    By leaf module (`leaf.py`) there are several buffers: a unit has one for each of its tensors, and a block has only
    those of its `leaves`, which are units themselves.

    `makes` are the asides that it makes, `reads` those to whose gradient its backward adds.

    `reduces` is False for the later of two units that share a flat (a tied head): backward comes
    through it first, and the shared gradient is complete only after the earlier one.
    """

    def __init__(
        self, name: str, flat: Flat | Declared, function: Callable[[Tensor], Tensor], *, reduces: bool = True,
        makes: Sequence[Aside] = (), reads: Sequence[Aside] = (),
    ) -> None:  # fmt: skip
        self.name = name
        self.flats: Sequence[Flat] = [flat] if isinstance(flat, Flat) else flat.flats
        self.leaves: Sequence[Unit] = () if isinstance(flat, Flat) else flat.leaves
        self.function = function
        self.reduces = reduces
        self.ends = True  # no other unit's backward reaches a flat that it shares
        self.goes_back = self.sends_back = True  # backward runs through it; its input's gradient is needed
        self.branches: Sequence[int] = BOTH  # of a block, those that a leaf's backward comes from
        self.makes, self.reads = makes, reads
        self.defers = True  # a pipeline's schedule may compute its weights' gradients separately from its input's
        self._in_flight: dict[int, tuple[Leaf | None, Node | Sink | None]] = {}
        self._later: dict[int, deque[Callable[[], None]]] = {}

    @property
    def flat(self) -> Flat:
        """Its flat buffer, if it has exactly one."""
        assert len(self.flats) == 1, f"{self.name} has {len(self.flats)} flat buffers of its own: see `flats`"
        return self.flats[0]

    def reach(self, sends_back: bool, trained: Collection[str]) -> None:
        """Set how far backward goes: whether the input's gradient is needed, and the names of trained flat buffers."""
        self.sends_back = sends_back
        self.goes_back = sends_back or any(flat.name in trained for flat in self.all_flats)
        flows = dict.fromkeys(WAYS, sends_back)
        for leaf in self.leaves:
            leaf.reach(any(flows[branch] for branch in leaf.branches), trained)
            flows |= dict.fromkeys(leaf.branches, leaf.goes_back)

    @property
    def completes(self) -> Sequence[Flat]:
        """The flats whose gradient of a microbatch is complete when this unit's backward ends."""
        return [flat for flat in self.flats if flat.spec.is_trained] if self.reduces else ()

    @property
    def all_flats(self) -> Sequence[Flat]:
        """Its own flats and its leaves'."""
        return [*self.flats, *(flat for leaf in self.leaves for flat in leaf.flats)]

    def turns(self) -> Sequence[Unit]:
        """Return the units gathered and freed in its forward, in order: itself, or its leaves."""
        return self.leaves or (self,)

    def turns_back(self) -> Sequence[Unit]:
        """Return the units gathered and freed in its backward, in order."""
        return tuple(turn for turn in reversed(self.turns()) if turn.goes_back)

    def forward(self, x: Tensor, slot: int = 0, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the unit's output, cut from its graph. The graph is stored under `slot`, without the output's bytes.

        `function` replaces the unit's own for this call.
        """
        leaf = Leaf() if self.sends_back and x.dtype.name != "int64" else None
        y = (function or self.function)(Tensor(x.buffer, leaf))
        if x.device.grad_enabled and self.goes_back:
            assert y.node is not None or self.makes or not self.sends_back
            self._in_flight[slot] = (leaf, y.node)
        return Tensor(y.buffer)

    def backward(self, grads: list[Buffer], slot: int = 0, *, defers: bool = False) -> None:
        """Collect the parameters' gradients, and replace the output's gradient in `grads` by the input's.

        (`autograd.backward` says why it is a list. Token ids have no gradient: it ends up empty.) `defers`: leave
        parameters' gradients to `backward_weights`.
        """
        self.open_asides()
        leaf, node = self._in_flight.pop(slot)
        if node is None:  # a frozen table: what is trained in its buffer belongs to the head
            grads.clear()
        else:
            self.walk(node, grads, slot, defers=defers)
        for one in self.makes:
            if one.node is not None and one.leaf is not None:
                self.walk(one.node, [one.leaf.take()], slot, defers=defers)
            one.forget()
        if leaf is not None:
            grads.append(leaf.take())

    def open_asides(self) -> None:
        """Allocate the gradients of what it reads beside the stream, in the first backward of a reader."""
        for one in self.reads:
            one.open()

    def walk(self, node: Node | Sink, grads: list[Buffer], slot: int, *, defers: bool) -> None:
        """Traverse a graph of this unit's layers backward."""
        if defers:
            self._later[slot] = deque()
        for flat in self.flats:
            flat.collector.later = self._later[slot] if defers else None
        backward(node, grads)
        for flat in self.flats:
            flat.collector.later = None

    def backward_weights(self, slot: int = 0) -> None:
        """Compute and collect the parameters' gradients that backward deferred; each frees its inputs."""
        later = self._later.pop(slot)
        while later:
            later.popleft()()

    def close(self) -> None:
        """End a microbatch's backward."""

    def forget(self) -> None:
        """Drop graphs that no backward will use."""
        self._in_flight.clear()
