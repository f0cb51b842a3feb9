"""The autograd engine: a graph of nodes, traversed backwards. It knows no op and no rule.

A node remembers the op that made a tensor and the origin of each of that op's inputs: another node, a `Sink` (a leaf
that collects its gradient), or None (no gradient wanted). The traversal visits nodes from the deepest to the
shallowest, so a node runs once all its gradients have arrived. Each node is emptied when it is visited, so an op's
saved buffers are freed as backward goes.

No rule writes into a gradient that another may hold: an op may hand one buffer to two inputs (`add` does).
`Gradient.owned` says that a buffer has no other holder, and can be added into.
"""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple, Protocol

from zerosim.device.device import Buffer, Kind


class Sink(Protocol):
    """Where gradients end: a leaf tensor or a parameter."""

    depth: int

    def accumulate(self, grad: Gradient) -> None: ...


class Rule(Protocol):
    """An op in the graph: its saved buffers, and its backward rule."""

    def backward(self, grad: Buffer) -> tuple[Buffer | None, ...]:
        """Return one gradient per input, None if it is not wanted: new buffers, or `grad` itself handed on."""
        ...


class Gradient(NamedTuple):
    """A gradient on its way; `owned` means that nothing else holds its bytes."""

    buffer: Buffer
    owned: bool


class Node:
    """One op's place in the graph; `depth` is its distance from the leaves."""

    __slots__ = ("depth", "edges", "rule")

    def __init__(self, rule: Rule, edges: tuple[Node | Sink | None, ...]) -> None:
        self.rule: Rule | None = rule
        self.edges = edges
        self.depth: int = 1 + max((edge.depth for edge in edges if edge is not None), default=0)


def add_gradients(first: Gradient, second: Gradient) -> Gradient:
    """Return the sum of two gradients: in one that is owned, or in a new buffer."""
    if second.owned and not first.owned:
        first, second = second, first
    a, b = first.buffer, second.buffer
    out = a if first.owned else a.device.alloc(a.shape, a.dtype, Kind.ACTIVATION_GRAD)
    out.device.kernel(out.numel, out.device.backend.add, a.array, b.array, out.array)
    return Gradient(out, True)


def backward(root: Node | Sink, grads: list[Buffer]) -> None:
    """Traverse the graph under `root` with the one gradient in `grads`, that of `root`'s result; sinks collect.

    It is taken out of the list: as an argument, the callers would keep its bytes alive for the whole traversal. A graph
    can be used once: its nodes are empty afterwards.
    """
    arriving: dict[Node, Gradient] = {}
    queue: list[tuple[int, int, Node]] = []  # deepest first; at equal depth, first come first served
    arrivals = itertools.count()

    def deliver(edge: Node | Sink, gradient: Gradient) -> None:
        if not isinstance(edge, Node):
            edge.accumulate(gradient)
        elif edge in arriving:
            arriving[edge] = add_gradients(arriving[edge], gradient)
        else:
            arriving[edge] = gradient
            heapq.heappush(queue, (-edge.depth, next(arrivals), edge))

    deliver(root, Gradient(grads.pop(), False))
    while queue:
        node = heapq.heappop(queue)[2]
        _visit(node, arriving.pop(node).buffer, deliver)


def _visit(node: Node, grad: Buffer, deliver: _Deliver) -> None:
    """Run one node's rule and hand out its results. Its locals, and the bytes, are freed on return."""
    rule, edges = node.rule, node.edges
    if rule is None:
        raise RuntimeError("this graph was already used: run forward again before another backward")
    node.rule, node.edges = None, ()
    results = rule.backward(grad)
    del rule
    held = [grad.storage, *(result.storage for result in results if result is not None)]
    for edge, result in zip(edges, results, strict=True):
        if edge is not None and result is not None:
            deliver(edge, Gradient(result, held.count(result.storage) == 1))


class _Deliver(Protocol):
    def __call__(self, edge: Node | Sink, gradient: Gradient, /) -> None: ...
