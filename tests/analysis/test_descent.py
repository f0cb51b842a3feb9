"""Descents on a surface of two weights: each step's point worked by hand."""

from __future__ import annotations

from zerosim.analysis.descent import descend
from zerosim.analysis.surfaces import Surface
from zerosim.config import RunConfig

SGD = RunConfig(optimizer="sgd", lr=0.25)


def test_each_step_goes_on_from_the_last_point() -> None:
    """x loses a quarter and y a half of itself: gradients x and 2y at a rate of 1/4."""
    bowl = Surface("", "", lambda x, y: x * x / 2 + y * y, lambda x, y: (x, 2 * y), (4, 8), (), (-9, -9), (9, 9))
    path = descend(bowl, SGD, steps=3)
    assert path.points == ((4, 8), (3, 4), (2.25, 2), (1.6875, 1))
    assert path.losses[:3] == (72, 20.5, 6.53125)
    assert path.stays


def test_a_path_ends_where_it_leaves_the_picture() -> None:
    slope = Surface("", "", lambda x, y: -4 * x, lambda x, y: (-4.0, 0.0), (0, 0), (), (0, 0), (2, 1))
    path = descend(slope, SGD, steps=9)
    assert path.points == ((0, 0), (1, 0), (2, 0), (3, 0))
    assert not path.stays
