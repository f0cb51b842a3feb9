"""The picture of the autograd graph in notebook 01. The graph is `autograd.Node`'s; nothing is computed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerosim.errors import InputError
from zerosim.lessons.sheet import THEME, Sheet
from zerosim.report.plots.page import Picture
from zerosim.report.plots.panel import Place
from zerosim.report.plots.style import LINE_PAINTS
from zerosim.tensor.autograd import Node, Sink
from zerosim.tensor.tensor import Tensor

Names = Mapping[str, Tensor]
"""The reader's own names for tensors of a graph."""


def tape(root: Tensor) -> list[Node | Sink]:
    """Return nodes and leaves under a tensor, deepest first, in the order in which backward visits nodes.

    Raises: InputError for a tensor without a graph, or whose graph has already been used.
    """
    if root.node is None:
        raise InputError(f"{root} has no graph: create one of its inputs with requires_grad=True")
    found: dict[int, Node | Sink] = {}
    waiting: list[Node | Sink] = [root.node]
    while waiting:
        node = waiting.pop(0)
        if id(node) in found:
            continue
        found[id(node)] = node
        if isinstance(node, Node) and node.rule is None:
            raise InputError(f"the graph of {root} was already used: run forward again and look before backward")
        waiting += _edges(node)
    return sorted(found.values(), key=lambda node: -node.depth)


def tape_figure(root: Tensor, names: Names) -> Picture:
    """Draw the graph as backward sees it: `root` on the right, an arrow for each edge, in the direction of the
    gradient."""
    nodes = tape(root)
    places = _places(nodes)
    deepest = nodes[0].depth
    lowest, highest = min(y for _, y in places.values()), max(y for _, y in places.values())
    size = (max(6.5, min(10.0, 1.1 * (deepest + 1))), max(3.0, 1.2 + 0.7 * (highest - lowest + 1)))
    sheet = Sheet(
        size,
        "The graph that forward left behind",
        "Arrows are edges: the way that gradients will take. Green are leaves, where gradients end.",
        across=(-0.4, deepest + 0.4),
        up=(lowest - 0.5, highest + 0.5),
        notes=["Each op is drawn at its depth, the longest path to a leaf. Inputs without a gradient have no edge."],
    )
    boxes = {}
    for node in nodes:
        fill = THEME.band if isinstance(node, Node) else LINE_PAINTS[5].light
        boxes[id(node)] = sheet.box(places[id(node)], _label(node, names), fill=fill)
    for node in nodes:
        edges = _edges(node)
        for number, edge in enumerate(edges):
            twice = edges.count(edge) > 1  # one tensor used twice by one op: two edges that must not hide each other
            bend = (0.3 if number % 2 else -0.3) if twice else 0.0
            ends = boxes[id(node)], boxes[id(edge)]
            sheet.arrow(places[id(node)], places[id(edge)], color=THEME.muted, bend=bend, boxes=ends)
    return sheet.picture()


def _edges(node: Node | Sink) -> list[Node | Sink]:
    """Return where gradients go from here."""
    return [edge for edge in node.edges if edge is not None] if isinstance(node, Node) else []


def _name(node: Node | Sink, names: Names) -> str:
    return next((name for name, tensor in names.items() if tensor.node is node), "")


def _label(node: Node | Sink, names: Names) -> str:
    """Return the op that made a tensor and the tensor's name; for a leaf its name."""
    name = _name(node, names)
    if not isinstance(node, Node):
        return name or "leaf"
    return f"{type(node.rule).__name__}\n{name}".strip()


def _places(nodes: Sequence[Node | Sink]) -> dict[int, Place]:
    """Return places by id: ops at x = depth, from y = 0 upwards; leaves from y = -1 downwards, left of the first op to
    read them."""
    columns = {id(node): node.depth if isinstance(node, Node) else 0 for node in nodes}
    for node in nodes:  # deepest first: the last to write is the first to read
        columns |= {id(edge): node.depth - 1 for edge in _edges(node) if not isinstance(edge, Node)}
    taken: dict[tuple[int, bool], int] = {}
    places = {}
    for node in nodes:
        is_op, column = isinstance(node, Node), columns[id(node)]
        row = taken.get((column, is_op), 0)
        taken[column, is_op] = row + 1
        places[id(node)] = float(column), float(row if is_op else -1 - row)
    return places
