"""An element-wise rule (`optim/elementwise.py`) as one CUDA kernel.

The rule runs once on names in place of arrays. Each of its operations becomes a line of the kernel, rounded by itself
and in order, which gives NumPy's bits. Its Python numbers become arguments of the kernel, in order of appearance. So
a step with other numbers reuses the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from zerosim.backends.cuda import types
from zerosim.backends.cuda.rounding import stored_step
from zerosim.backends.kernels import Array, Rule, Storing


class _Trace:
    """The operations of a rule so far."""

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


_Method = Callable[["Traced", Any], "Traced"]


def _operator(sign: str) -> tuple[_Method, _Method, _Method]:
    """Return Python's methods for an operator: with the array on its left, on its right, and in place."""

    def combined(trace: _Trace, left: Any, right: Any) -> str:
        return f"{trace.term(left)} {sign} {trace.term(right)}"

    def plain(own: Traced, other: Any) -> Traced:
        return own.trace.new(combined(own.trace, own, other))

    def reflected(own: Traced, other: Any) -> Traced:
        return own.trace.new(combined(own.trace, other, own))

    def in_place(own: Traced, other: Any) -> Traced:
        own.trace.lines.append(f"{own.name} = {combined(own.trace, own, other)};")
        return own

    return plain, reflected, in_place


class Traced:
    """An array of a rule, by its name in the kernel."""

    __slots__ = ("name", "trace")

    def __init__(self, name: str, trace: _Trace) -> None:
        self.name, self.trace = name, trace

    __add__, __radd__, __iadd__ = _operator("+")
    __sub__, __rsub__, __isub__ = _operator("-")
    __mul__, __rmul__, __imul__ = _operator("*")
    __truediv__, __rtruediv__, __itruediv__ = _operator("/")

    def __setitem__(self, window: Any, value: Any) -> None:
        assert window is Ellipsis, "a rule sets whole arrays"
        self.trace.lines.append(f"{self.name} = {self.trace.term(value)};")


class _Functions:
    """`xp`: the functions that a rule may call, by NumPy's names."""

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


def elementwise(rule: Rule, grad: Array, param: Array, *states: Array, storing: Storing | None = None) -> None:
    """See `kernels.py`. A kernel is compiled the first time that its source appears."""
    trace = _Trace()
    kept = [f"s{i}" for i in range(len(states))]
    w, g, *others = (Traced(name, trace) for name in ("w", "g", *kept))
    rule.run(_Functions(), w, g, rule.now, *others)
    scale = float(rule.grad_scale)
    if storing is not None:
        stored_step(" ".join(trace.lines), [scale, *trace.numbers], grad, param, states, storing)
        return
    numbers = "".join(f", float64 n{i}" for i in range(len(trace.numbers)))
    arrays = ["param", *(f"state{i}" for i in range(len(states)))]
    loads = [f"W {name} = wide_of({array});" for name, array in zip(("w", *kept), arrays, strict=True)]
    stores = [f"store({name}, {array});" for name, array in zip(("w", *kept), arrays, strict=True)]
    head = ["using W = typename wide<T>::type;", *loads, "W g = W(wide_of(grad)) * W(grad_scale);"]
    lines = " ".join([*head, *trace.lines, *stores])
    outputs = ", ".join(f"T {array}" for array in arrays)
    kernel = _kernel(f"G grad, float64 grad_scale{numbers}", outputs, lines)
    kernel(grad, scale, *trace.numbers, param, *states)
