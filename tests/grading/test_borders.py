"""The exercise on f and g: what is wrong with an answer is found, and said."""

from __future__ import annotations

from typing import Any

import pytest
from grading_here import grade

from zerosim.grading import Borders, Buffer, Comm
from zerosim.parallel.ddp import DDP


def added(comm: Comm, buffer: Buffer, **how: Any) -> Buffer:
    comm.all_reduce(buffer, **{"op": "sum", "purpose": "activations", **how})
    return buffer


class Right(Borders):
    def f_forward(self, comm: Comm, x: Buffer) -> Buffer:
        return x

    def f_backward(self, comm: Comm, dx: Buffer) -> Buffer:
        return added(comm, dx)

    def g_forward(self, comm: Comm, y: Buffer) -> Buffer:
        return added(comm, y)

    def g_backward(self, comm: Comm, dy: Buffer) -> Buffer:
        return dy


class NothingBackward(Right):
    def f_backward(self, comm: Comm, dx: Buffer) -> Buffer:
        return dx


class NothingForward(Right):
    def g_forward(self, comm: Comm, y: Buffer) -> Buffer:
        return y


class BothInF(Right):
    def f_forward(self, comm: Comm, x: Buffer) -> Buffer:
        return added(comm, x)


class BothInG(Right):
    def g_backward(self, comm: Comm, dy: Buffer) -> Buffer:
        return added(comm, dy)


class Mean(Right):
    def f_backward(self, comm: Comm, dx: Buffer) -> Buffer:
        return added(comm, dx, op="avg")


class AsStates(Right):
    def g_forward(self, comm: Comm, y: Buffer) -> Buffer:
        return added(comm, y, purpose="states")


class Forgets(Right):
    def f_backward(self, comm: Comm, dx: Buffer) -> Buffer:
        added(comm, dx)
        return None  # type: ignore[return-value]


@pytest.mark.slow
def test_f_and_g_are_graded_full() -> None:
    found = grade(Right, "borders")
    assert found.passed, str(found)
    assert found["exchanged"].counted == "4,860 B"  # (20 x 5 x 24 + 6 x 5) x 4 / 2


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("answer", "failed", "counted", "hint"),
    [
        (NothingBackward, {"runs"}, "copies of a weight", "and 0 times in backward, where f should"),
        (NothingForward, {"runs"}, "copies of a weight", "exchanges 0 times in forward, where g should twice"),
        (BothInF, {"losses", "gradients", "exchanged"}, "8.0437", "exchanges 4 times in forward"),
        (BothInG, {"gradients", "exchanged"}, "is 2 times one rank's", "and 4 times in backward"),
        (Mean, {"losses", "gradients"}, "6.4111, 5.9967", "(op='sum')?"),
        (AsStates, {"exchanged"}, "2,460 B as activations, 2,400 B as states", "needs purpose='activations'"),
        (Forgets, {"runs"}, "backward did not reach this value", "a backward function returned no gradient"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_is_wrong_with_f_or_g_is_said(answer: Any, failed: set[str], counted: str, hint: str) -> None:
    found = grade(answer, "borders")
    assert {check.name for check in found.failures} == failed
    assert not found.passed
    assert counted in found.failures[0].counted
    assert hint in found.failures[0].hint
    assert (found.points == 0) is (failed != {"exchanged"})


def test_what_is_no_borders_is_refused() -> None:
    assert "hand in the class itself" in grade(DDP, "borders")["answer"].counted
