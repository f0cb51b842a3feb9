"""Leaf modules: the linear maps and norms of a block, each gathered, used and freed on its own (`--gather module`).

As DeepSpeed's stage 3 does (edaa722, runtime/zero/parameter_offload.py, partition_parameters.py): a module's own
parameters are fetched before its forward and again before its backward, and released after each; every tensor is cut
in N slices of its own. So at most one map is gathered, 4 h^2 elements, while a block has 12 h^2. Each tensor has
its own flat buffer here, because tensors are cut one by one and may stay gathered permanently.

A block's forward calls its leaves. A leaf runs in its own graph, cut from the block's graph at its boundary. In the
block's graph one node stands for it, whose rule traverses the leaf's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from zerosim.config.parts.tuning import TuningConfig
from zerosim.device.device import Buffer, Device, Phase
from zerosim.nn.halves import MakeFlat, kind_of
from zerosim.nn.unit import Unit
from zerosim.placement.mesh import STATES
from zerosim.placement.spec import unit_of
from zerosim.placement.split import own_suffix
from zerosim.tensor.autograd import Node, Sink
from zerosim.tensor.flat import Flat
from zerosim.tensor.tensor import Leaf, Parameter, Tensor


class Turns(Protocol):
    """A counter of a step's gathers, in order."""

    def enter(self) -> None: ...
    @property
    def defers(self) -> bool: ...


class Hooks(Protocol):
    """The hooks that a leaf calls: a strategy's hooks (`parallel/base.py`)."""

    @property
    def timetable(self) -> Turns: ...
    def pre_forward(self, unit: Unit) -> None: ...
    def post_forward(self, unit: Unit) -> None: ...
    def pre_backward(self, unit: Unit) -> None: ...
    def post_input_grad(self, unit: Unit) -> None: ...
    def post_backward(self, unit: Unit) -> None: ...


class Tensors:
    """Takes a flat buffer's place where layers declare parameters: a buffer for each tensor, a leaf for each layer."""

    def __init__(self, name: str, make: MakeFlat, tuning: TuningConfig) -> None:
        self.name = name
        self.make = make
        self.tuning = tuning
        self.is_leaf = False
        self.flats: list[Flat] = []
        self.leaves: list[LeafModule] = []

    def declare(self, name: str, shape: tuple[int, ...], *, axes: tuple[str, ...] = STATES, **how: Any) -> Parameter:
        """Declare a parameter as `Flat.declare`, in a new buffer with the parameter's name from the unit's name on."""
        own = self._own(name) + own_suffix(how.get("splits", ()), how.get("tile"))
        self.flats.append(self.make(own, self.name, kind_of(self.tuning, name, shape, how.get("role")), axes))
        return self.flats[-1].declare(name, shape, **how)

    def leaf(
        self, name: str, make: Callable[[Tensors], Callable[[Tensor], Tensor]], branches: Sequence[int]
    ) -> LeafModule:
        """Return the layer that `make` declares in its own buffers, as a leaf with its name from the unit's name on."""
        own = Tensors(self._own(name), self.make, self.tuning)
        own.is_leaf = True
        self.leaves.append(LeafModule(own.name, own, make(own)))
        self.leaves[-1].branches = branches
        return self.leaves[-1]

    def _own(self, name: str) -> str:
        return name[max(0, name.find(unit_of(self.name))) :]


class LeafModule(Unit):
    """A layer in a block that is gathered separately. `hooks` is set while the block's forward or backward runs."""

    hooks: Hooks | None = None

    def __call__(self, x: Tensor) -> Tensor:
        device, sink = x.device, Leaf() if x.requires_grad else None
        inner = Tensor(x.buffer, sink)
        inner.discarded = x.discarded
        with device.scope(unit=self.name):
            if self.hooks is not None:
                if not _is_made_again(device):
                    self.hooks.timetable.enter()
                self.hooks.pre_forward(self)
            y = self.function(inner)
            if self.hooks is not None:
                self.hooks.post_forward(self)
        if y.node is None:
            return Tensor(y.buffer)
        return Tensor(y.buffer, Node(LeafRule(self, sink, y.node), (x.node,)))


def _is_made_again(device: Device) -> bool:
    """Return whether backward recomputes a part of a block (`tensor/discarded.py`), which the timetable does not
    list."""
    return device.where.phase in (Phase.BACKWARD, Phase.CURVATURE_BACKWARD) and not device.grad_enabled


class LeafRule:
    """A leaf's node in the graph of its block. Saves the leaf's own graph."""

    def __init__(self, module: LeafModule, sink: Leaf | None, node: Node | Sink) -> None:
        self.module = module
        self.sink = sink
        self.node = node

    def backward(self, grad: Buffer) -> tuple[Buffer | None]:
        module, hooks = self.module, self.module.hooks
        with grad.device.scope(unit=module.name):
            if hooks is not None:
                hooks.timetable.enter()
                hooks.pre_backward(module)
            defers = hooks is not None and hooks.timetable.defers
            module.walk(self.node, [grad], grad.device.where.slot, defers=defers)
            dx = None if self.sink is None else self.sink.take()
            if hooks is not None:
                (hooks.post_input_grad if defers else hooks.post_backward)(module)
        return (dx,)


def led_by(hooks: Hooks, leaves: Sequence[Unit]) -> AbstractContextManager[None]:
    """Let these leaves call `hooks` inside the block. No leaf keeps `hooks` longer, because it holds their buffers."""
    modules = [module for module in leaves if isinstance(module, LeafModule)]
    return _led(hooks, modules) if modules else nullcontext()


@contextmanager
def _led(hooks: Hooks, modules: Sequence[LeafModule]) -> Iterator[None]:
    for module in modules:
        module.hooks = hooks
    try:
        yield
    finally:
        for module in modules:
            module.hooks = None
