"""The graph as the lesson shows it is the graph that the engine walks, and watching changes no gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.errors import InputError
from zerosim.lessons.tape import tape, tape_figure
from zerosim.tensor.autograd import Node
from zerosim.tensor.tensor import Tensor, cpu, tensor


def point() -> dict[str, Tensor]:
    """(w x + b - y)^2 at one point, with every tensor's name."""
    device = cpu()
    w, b = (tensor(value, device, requires_grad=True) for value in (2.0, 0.5))
    u = w * tensor(3.0, device)
    v = u + b
    e = v - tensor(5.0, device)
    return {"w": w, "b": b, "u": u, "v": v, "e": e, "L": e * e}


def network(names: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
    device = cpu()
    random = np.random.default_rng(0)
    shapes = {"w1": (3, 4), "b1": (4,), "w2": (4, 1)}
    leaves = {name: tensor(random.standard_normal(shape), device, requires_grad=True) for name, shape in shapes.items()}
    x = tensor(random.standard_normal((5, 3)), device)
    hidden = (x @ leaves["w1"] + leaves["b1"]).tanh()
    return (hidden @ leaves["w2"] * hidden.sum()).mean(), {name: leaves[name] for name in names}


def grads(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: leaf.grad.numpy() for name, leaf in tensors.items() if leaf.grad is not None}


def test_nodes_edges_and_depths_of_a_point() -> None:
    names = point()
    nodes = tape(names["L"])
    by_name = {name: tensor.node for name, tensor in names.items()}
    assert nodes[:4] == [by_name[name] for name in ("L", "e", "v", "u")]
    assert [node.depth for node in nodes] == [4, 3, 2, 1, 0, 0]
    ops = [node for node in nodes if isinstance(node, Node)]
    assert [type(node.rule).__name__ for node in ops] == ["Multiply", "Subtract", "Add", "Multiply"]
    assert ops[0].edges == (by_name["e"], by_name["e"])  # e * e: two edges to one node
    assert ops[1].edges == (by_name["v"], None)  # y wants no gradient
    assert set(ops[2].edges) == {by_name["u"], by_name["b"]}
    assert set(nodes[4:]) == {by_name["w"], by_name["b"]}


def test_visits_are_backwards_own_and_sum_what_arrives(defined: Any, capsys: pytest.CaptureFixture[str]) -> None:
    defined("01", "01", "03", "06")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[1:5]]
    assert lines == [
        "L made by Multiply has 1, hands on 1.5, 1.5",
        "e made by Subtract has 3, hands on 3, nothing",  # 1.5 twice makes 3 at e
        "v made by Add has 3, hands on 3, 3",
        "u made by Multiply has 3, hands on 9, nothing",
    ]


def test_watching_changes_no_gradient(defined: Any) -> None:
    watched_rule = defined("01", "01", "03", "06")["Watched"]
    plain, watched = point(), point()
    plain["L"].backward()
    for node in tape(watched["L"]):
        if isinstance(node, Node):
            node.rule = watched_rule(node.rule, "")
    watched["L"].backward()
    for name in ("w", "b"):
        assert plain[name].grad is not None
        assert np.array_equal(grads(plain)[name], grads(watched)[name])


def test_nodes_come_deepest_first() -> None:
    depths = [node.depth for node in tape(network([])[0]) if isinstance(node, Node)]
    assert depths == sorted(depths, reverse=True)


def test_the_picture_has_a_box_per_node_and_an_arrow_per_edge() -> None:
    loss, names = network(["w1", "b1", "w2"])
    nodes = tape(loss)
    edges = [edge for node in nodes if isinstance(node, Node) for edge in node.edges if edge is not None]
    (axes,) = tape_figure(loss, names).axes
    words = [text.get_text() for text in axes.texts if text.get_text()]
    assert len(words) == len(nodes)
    assert {"w1", "b1", "w2", "Tanh"} <= set(words)
    arrows = [text for text in axes.texts if getattr(text, "arrow_patch", None) is not None]
    assert len(arrows) == len(edges)


def test_a_graph_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="requires_grad=True"):
        tape(tensor(1.0))
    names = point()
    names["L"].backward()
    with pytest.raises(InputError, match="already used"):
        tape_figure(names["L"], names)
