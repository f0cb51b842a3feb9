"""An element-wise rule (`optim/elementwise.py`) as one CUDA kernel.

The rule is run once on names instead of arrays; what it does to them becomes the kernel's lines, one rounded operation
each, in its order: NumPy's bits. Its Python numbers are arguments of the kernel, in the order in which they come up, so
that a step with other numbers finds the kernel that is there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from zerosim.backends.cuda import types
from zerosim.backends.cuda.rounding import stored_step
from zerosim.backends.kernels import Array, Storing


class _Trace:
    """What a rule has done so far."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.numbers: list[float] = []

    def term(self, value: Any) -> str:
        if isinstance(value, Traced):
            return value.name
        self.numbers.append(float(value))
        return f"W(n{len(self.numbers) - 1})"

    def new(self, expression: str) -> Traced:
        name = f"t{len(self.lines)}"
        self.lines.append(f"W {name} = {expression};")
        return Traced(name, self)


class Traced:
    """An array of a rule, by its name in the kernel."""

    __slots__ = ("name", "trace")

    def __init__(self, name: str, trace: _Trace) -> None:
        self.name, self.trace = name, trace

    def _of(self, left: Any, sign: str, right: Any) -> Traced:
        return self.trace.new(f"{self.trace.term(left)} {sign} {self.trace.term(right)}")

    def _set(self, sign: str, right: Any) -> Traced:
        self.trace.lines.append(f"{self.name} = {self.name} {sign} {self.trace.term(right)};")
        return self

    def __add__(self, other: Any) -> Traced:
        return self._of(self, "+", other)

    def __radd__(self, other: Any) -> Traced:
        return self._of(other, "+", self)

    def __sub__(self, other: Any) -> Traced:
        return self._of(self, "-", other)

    def __rsub__(self, other: Any) -> Traced:
        return self._of(other, "-", self)

    def __mul__(self, other: Any) -> Traced:
        return self._of(self, "*", other)

    def __rmul__(self, other: Any) -> Traced:
        return self._of(other, "*", self)

    def __truediv__(self, other: Any) -> Traced:
        return self._of(self, "/", other)

    def __rtruediv__(self, other: Any) -> Traced:
        return self._of(other, "/", self)

    def __iadd__(self, other: Any) -> Traced:
        return self._set("+", other)

    def __isub__(self, other: Any) -> Traced:
        return self._set("-", other)

    def __imul__(self, other: Any) -> Traced:
        return self._set("*", other)

    def __itruediv__(self, other: Any) -> Traced:
        return self._set("/", other)

    def __setitem__(self, window: Any, value: Any) -> None:
        assert window is Ellipsis, "a rule sets whole arrays"
        self.trace.lines.append(f"{self.name} = {self.trace.term(value)};")


class _Functions:
    """`xp`: what a rule may call, by NumPy's names."""

    def sqrt(self, x: Traced) -> Traced:
        return x.trace.new(f"sqrt({x.name})")

    def abs(self, x: Traced) -> Traced:
        return x.trace.new(f"{x.name} < W(0) ? -{x.name} : {x.name}")

    def sign(self, x: Traced) -> Traced:
        return x.trace.new(f"{x.name} > W(0) ? W(1) : {x.name} < W(0) ? W(-1) : {x.name}")

    def minimum(self, x: Traced, y: Any) -> Traced:
        y = x.trace.term(y)
        return x.trace.new(f"{y} < {x.name} || {y} != {y} ? {y} : {x.name}")

    def maximum(self, x: Traced, y: Any) -> Traced:
        y = x.trace.term(y)
        return x.trace.new(f"{y} > {x.name} || {y} != {y} ? {y} : {x.name}")


@cache
def _kernel(inputs: str, outputs: str, lines: str) -> Any:
    return types.elementwise(inputs, outputs, lines, "rule")


def elementwise(
    rule: Callable[..., None],
    now: object,
    grad_scale: float,
    grad: Array,
    param: Array,
    *states: Array,
    storing: Storing | None = None,
) -> None:
    """See `kernels.py`. The kernel is compiled where its text is new."""
    trace = _Trace()
    kept = [f"s{i}" for i in range(len(states))]
    rule(_Functions(), *(Traced(name, trace) for name in ("w", "g")), now, *(Traced(name, trace) for name in kept))
    if storing is not None:
        stored_step(" ".join(trace.lines), trace.numbers, grad_scale, grad, param, states, storing)
        return
    numbers = "".join(f", float64 n{i}" for i in range(len(trace.numbers)))
    arrays = ["param", *(f"state{i}" for i in range(len(states)))]
    loads = [f"W {name} = wide_of({array});" for name, array in zip(("w", *kept), arrays, strict=True)]
    stores = [f"store({name}, {array});" for name, array in zip(("w", *kept), arrays, strict=True)]
    head = ["using W = typename wide<T>::type;", *loads, "W g = W(wide_of(grad)) * W(grad_scale);"]
    lines = " ".join([*head, *trace.lines, *stores])
    outputs = ", ".join(f"T {array}" for array in arrays)
    kernel = _kernel(f"G grad, float64 grad_scale{numbers}", outputs, lines)
    kernel(grad, float(grad_scale), *trace.numbers, param, *states)
