"""The autograd graph looked at: its nodes as a list, as a picture, and one by one as backward visits them.

Owns nothing that computes: the graph is that of `autograd.Node`, the walk that of `autograd.backward`.
The pictures belong to notebook 01.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerosim.device.device import Buffer
from zerosim.errors import InputError
from zerosim.lessons.sheet import arrow, box, open_sheet, picture
from zerosim.report.plots.page import Picture
from zerosim.report.plots.style import LINE_PAINTS
from zerosim.tensor.autograd import Node, Rule, Sink
from zerosim.tensor.tensor import Tensor

Names = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TapeNode:
    """One node of a graph: the op that made a tensor ('leaf' where none did), and the indices of its parents.

    `edges` has one entry per input of the op, None for one that wants no gradient. `name` is the
    reader's own name for the tensor, or ''.
    """

    op: str
    name: str
    depth: int
    edges: tuple[int | None, ...]

    @property
    def label(self) -> str:
        if self.op == "leaf":
            return self.name or "leaf"
        return f"{self.op}\n{self.name}" if self.name else self.op


@dataclass(frozen=True, slots=True)
class Visit:
    """What happened at one node on the way back: the gradient that had come in, and what its rule handed to each input.

    Values are copies on the host; None where an input wants no gradient.
    """

    op: str
    name: str
    arriving: Any
    handed: tuple[Any | None, ...]

    def __str__(self) -> str:
        handed = ", ".join("nothing" if values is None else _short(values) for values in self.handed)
        return f"{self.name or '(unnamed)':<10} made by {self.op:<9} has {_short(self.arriving)}, hands on {handed}"


def tape(root: Tensor, names: Names) -> tuple[TapeNode, ...]:
    """Every node under `root`, deepest first: that is the order in which backward will visit those that are ops.

    Raises: InputError for a tensor without a graph, or whose graph has been walked.
    """
    found = _nodes(root)
    index = {id(node): at for at, node in enumerate(found)}
    return tuple(
        TapeNode(
            op=_op(node),
            name=_name(node, names),
            depth=node.depth,
            edges=tuple(None if edge is None else index[id(edge)] for edge in _edges(node)),
        )
        for node in found
    )


def tape_figure(root: Tensor, names: Names) -> Picture:
    """The graph as backward sees it: `root` on the right, an arrow for each edge, the way a gradient will flow."""
    nodes = tape(root, names)
    places = _places(nodes)
    deepest = nodes[0].depth
    lowest, highest = min(y for _, y in places), max(y for _, y in places)
    sheet = open_sheet(
        "The graph that forward left behind",
        "Arrows are edges: the way that gradients will take. Green are leaves, where gradients end.",
        across=(-0.4, deepest + 0.4),
        up=(lowest - 0.5, highest + 0.5),
        size=(max(6.5, min(10.0, 1.1 * (deepest + 1))), max(3.0, 1.2 + 0.7 * (highest - lowest + 1))),
        notes=["Ops stand at their depth, the longest way to a leaf. Inputs that want no gradient have no edge."],
    )
    theme = sheet.page.theme
    fills = [theme.color(LINE_PAINTS[5]) if node.op == "leaf" else theme.band for node in nodes]
    boxes = [
        box(sheet, place, node.label, fill=fill, scale=0.9)
        for node, place, fill in zip(nodes, places, fills, strict=True)
    ]
    for at, node in enumerate(nodes):
        edges = [edge for edge in node.edges if edge is not None]
        for number, edge in enumerate(edges):
            twice = edges.count(edge) > 1  # one tensor used twice by one op: two edges that must not hide each other
            bend = (0.3 if number % 2 else -0.3) if twice else 0.0
            arrow(sheet, places[at], places[edge], color=theme.muted, bend=bend, boxes=(boxes[at], boxes[edge]))
    return picture(sheet)


def watch_backward(root: Tensor, names: Names) -> tuple[Visit, ...]:
    """Run `root.backward()` and tell each visit, in order. The gradients are the same as unwatched."""
    visits: list[Visit] = []
    for node in _nodes(root):
        if isinstance(node, Node):
            assert node.rule is not None
            node.rule = _Watched(node.rule, _name(node, names), visits)
    root.backward()
    return tuple(visits)


class _Watched:
    """A rule that writes down what goes in and what comes out."""

    def __init__(self, rule: Rule, name: str, visits: list[Visit]) -> None:
        self.rule = rule
        self.name = name
        self.visits = visits

    def backward(self, grad: Buffer) -> tuple[Buffer | None, ...]:
        results = self.rule.backward(grad)
        to_host = grad.device.backend.to_host
        handed = tuple(None if result is None else to_host(result.array).copy() for result in results)
        self.visits.append(Visit(type(self.rule).__name__, self.name, to_host(grad.array).copy(), handed))
        return results


def _nodes(root: Tensor) -> list[Node | Sink]:
    """Nodes and leaves under a tensor, deepest first; of one depth, first found first."""
    if root.node is None:
        raise InputError(f"{root} has no graph: make one of its inputs with requires_grad=True")
    found: list[Node | Sink] = []
    seen: set[int] = set()
    waiting: list[Node | Sink] = [root.node]
    while waiting:
        node = waiting.pop(0)
        if id(node) in seen:
            continue
        seen.add(id(node))
        found.append(node)
        if isinstance(node, Node) and node.rule is None:
            raise InputError(f"the graph of {root} has been walked already: run forward again and look before backward")
        waiting += [edge for edge in _edges(node) if edge is not None]
    return sorted(found, key=lambda node: -node.depth)


def _edges(node: Node | Sink) -> tuple[Node | Sink | None, ...]:
    return node.edges if isinstance(node, Node) else ()


def _op(node: Node | Sink) -> str:
    return type(node.rule).__name__ if isinstance(node, Node) else "leaf"


def _name(node: Node | Sink, names: Names) -> str:
    return next((name for name, tensor in names.items() if tensor.node is node), "")


def _places(nodes: tuple[TapeNode, ...]) -> list[tuple[float, float]]:
    """Ops at x = depth, from y = 0 upwards; leaves from y = -1 downwards, a step before the first op to read them."""
    first_reader: dict[int, int] = {}
    for node in reversed(nodes):  # shallowest first
        for edge in node.edges:
            if edge is not None:
                first_reader.setdefault(edge, node.depth)
    taken: dict[tuple[int, bool], int] = {}
    places = []
    for at, node in enumerate(nodes):
        is_leaf = node.op == "leaf"
        column = first_reader.get(at, 1) - 1 if is_leaf else node.depth
        row = taken.get((column, is_leaf), 0)
        taken[column, is_leaf] = row + 1
        places.append((float(column), float(-1 - row if is_leaf else row)))
    return places


def _short(values: Any) -> str:
    if values.size == 1:
        return f"{float(values.reshape(())):.4g}"
    return f"{'x'.join(map(str, values.shape))} values"
