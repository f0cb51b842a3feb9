"""Is a backward rule the derivative of its forward? Checked numerically, in float64, by central differences.

    gradcheck(lambda x: F.gelu(x), [np.random.randn(3, 4)])
    gradcheck(lambda x, w: x @ w, [(2, 3), (3, 4)])          # shapes: values are drawn

A tensor-valued function is made a scalar, L = sum(projection * function(inputs)), with a projection that is drawn once
and never changes; a plain sum would miss gradients that are wrong but add up to the right total. Backward gives dL/dx
of all elements at once; for each element in turn, with h the step,

    dL/dx_i  ~  (L(x_i + h) - L(x_i - h)) / 2h,  off by about h^2 (the curve) + 1e-16 / h (rounding).

"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zerosim.errors import InputError, ZerosimError
from zerosim.tensor.autograd import backward
from zerosim.tensor.tensor import Tensor, cpu, tensor

Function = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class GradcheckReport:
    """The element whose two gradients differ most, of the `checked` elements of all inputs.

    `input` numbers the function's arguments from 0, `index` is the element's place in that input.
    """

    checked: int
    error: float
    input: int
    index: tuple[int, ...]
    analytic: float
    numeric: float

    def __str__(self) -> str:
        return (
            f"largest error {self.error:.3g} of {self.checked} gradients: input {self.input} at {self.index}, "
            f"analytic {self.analytic:.9g}, numeric {self.numeric:.9g}"
        )


class GradcheckError(ZerosimError, AssertionError):
    """Backward and finite differences disagree; `report` says where they differ most."""

    def __init__(self, message: str, report: GradcheckReport | None = None) -> None:
        super().__init__(message)
        self.report = report


def gradcheck(
    function: Function,
    inputs: Sequence[Any],
    *,
    step: float = 1e-6,
    rtol: float = 1e-5,
    atol: float = 1e-7,
) -> GradcheckReport:
    """Compare the gradients of `function` with central differences, element by element.

    `inputs` are arrays of values or tuples of sizes (a shape, whose values are drawn); `function` is called with one
    float64 tensor for each, and returns one tensor of any shape. It must give the same result each time: a dropout
    needs a fixed key. Cost: two calls per element.

    Raises: GradcheckError if the two differ by more than atol + rtol * |numeric|.
    """
    device = cpu()
    values = [_values(given, number) for number, given in enumerate(inputs)]
    leaves = [tensor(value, device, dtype="fp64", requires_grad=True) for value in values]
    out = function(*leaves)
    if not isinstance(out, Tensor):
        raise InputError(f"gradcheck: the function returned {type(out).__name__}, expected one tensor")
    projection = _normal(out.shape, "projection")
    if out.node is not None:
        seed = tensor(projection, device, dtype=out.dtype)
        backward(out.node, [seed.buffer])

    def run() -> Any:
        """Return the result at these values, a host array; no graph is made, since no input asks for a gradient."""
        return function(*(tensor(value, device, dtype="fp64") for value in values)).numpy()

    if not _same(run(), out.numpy()):
        raise GradcheckError("the function gave two results for one input: fix its random numbers, such as a dropout's")

    worst: GradcheckReport | None = None
    failed, checked = 0, sum(value.size for value in values)
    for number, (value, leaf) in enumerate(zip(values, leaves, strict=True)):
        collected = None if leaf.grad is None else leaf.grad.numpy()
        for index in _indices(value.shape):
            analytic = 0.0 if collected is None else float(collected[index])
            numeric = _difference(run, value, index, step, projection)
            error = abs(analytic - numeric)
            if math.isnan(error):
                error = math.inf
            wrong = error == math.inf or error > atol + rtol * abs(numeric)
            report = GradcheckReport(checked, error, number, index, analytic, numeric)
            if worst is None or (wrong, error) > (failed > 0, worst.error):
                worst = report
            failed += wrong
    if worst is None:
        raise InputError("gradcheck: there is no element to check")
    if failed:
        raise GradcheckError(f"{failed} gradients are wrong; {worst}", worst)
    return worst


def _difference(run: Callable[[], Any], value: Any, index: tuple[int, ...], step: float, projection: Any) -> float:
    """Return dL/dx of one element. Results are subtracted before they are projected: less cancels than in L - L."""
    kept = value[index]
    try:
        value[index] = above = kept + step
        upper = run()
        value[index] = below = kept - step
        lower = run()
    finally:
        value[index] = kept
    return float(((upper - lower) * projection).sum() / (above - below))


def _same(a: Any, b: Any) -> bool:
    import numpy as np

    return np.array_equal(a, b, equal_nan=True)


def _values(given: Any, number: int) -> Any:
    import numpy as np

    if isinstance(given, tuple) and all(isinstance(size, int) for size in given):
        return _normal(given, number)
    return np.array(given, np.float64)


def _normal(shape: tuple[int, ...], name: int | str) -> Any:
    from zerosim.tensor.rng import generator

    return generator("gradcheck", name).standard_normal(shape)


def _indices(shape: tuple[int, ...]) -> Any:
    import numpy as np

    return np.ndindex(*shape)
