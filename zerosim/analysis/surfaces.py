"""Losses of two weights that show how optimizers move: each has a value and an exact gradient.

A surface is drawn within `low` to `high`, and descents on it begin at `start`. Sources: Rosenbrock, The Computer
Journal 3 (1960); Beale, On an iterative method for finding a local minimum (1958).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Point = tuple[float, float]


class Surface(NamedTuple):
    """`loss` and `gradient` take x and y as numbers; `loss` takes arrays too."""

    title: str
    formula: str
    loss: Callable[[Any, Any], Any]
    gradient: Callable[[float, float], Point]
    start: Point
    minima: tuple[Point, ...]
    low: Point
    high: Point

    def holds(self, point: Point) -> bool:
        """Return whether a point is inside the picture. A point that is not finite is outside."""
        return all(low <= at <= high for low, at, high in zip(self.low, point, self.high, strict=True))


def _bowl(x: Any, y: Any) -> Any:
    return 0.5 * x * x + 15.0 * y * y


def _rosenbrock(x: Any, y: Any) -> Any:
    a, b = 1.0 - x, y - x * x
    return a * a + 100.0 * b * b


def _rosenbrock_gradient(x: float, y: float) -> Point:
    b = y - x * x
    return -2.0 * (1.0 - x) - 400.0 * x * b, 200.0 * b


def _saddle(x: Any, y: Any) -> Any:
    return 0.5 * x * x - 0.5 * y * y + 0.25 * y * y * y * y


def _beale(x: Any, y: Any) -> Any:
    a, b, c = 1.5 - x + x * y, 2.25 - x + x * y * y, 2.625 - x + x * y * y * y
    return a * a + b * b + c * c


def _beale_gradient(x: float, y: float) -> Point:
    a, b, c = 1.5 - x + x * y, 2.25 - x + x * y * y, 2.625 - x + x * y * y * y
    return (
        2.0 * (a * (y - 1.0) + b * (y * y - 1.0) + c * (y * y * y - 1.0)),
        2.0 * x * (a + 2.0 * b * y + 3.0 * c * y * y),
    )


SURFACES: Mapping[str, Surface] = MappingProxyType(
    {
        "bowl": Surface(
            "Ill-conditioned bowl", "x²/2 + 15 y²", _bowl, lambda x, y: (x, 30.0 * y),
            (-4.0, 1.5), ((0.0, 0.0),), (-5.0, -2.5), (2.0, 2.5),
        ),
        "rosenbrock": Surface(
            "Rosenbrock", "(1 − x)² + 100 (y − x²)²", _rosenbrock, _rosenbrock_gradient,
            (-1.2, 1.0), ((1.0, 1.0),), (-2.0, -1.0), (2.0, 3.0),
        ),
        "saddle": Surface(
            "Saddle", "x²/2 − y²/2 + y⁴/4", _saddle, lambda x, y: (x, y * y * y - y),
            (-2.0, 0.01), ((0.0, 1.0), (0.0, -1.0)), (-2.5, -1.75), (1.5, 1.75),
        ),
        "beale": Surface(
            "Beale", "(1.5 − x + xy)² + (2.25 − x + xy²)² + (2.625 − x + xy³)²", _beale, _beale_gradient,
            (1.0, 1.5), ((3.0, 0.5),), (-0.5, -1.5), (4.5, 2.0),
        ),
    }
)  # fmt: skip
"""Surfaces by their name for `--surface`."""
