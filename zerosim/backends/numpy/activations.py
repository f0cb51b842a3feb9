"""Further activations in NumPy: GELU without an approximation, ReLU, SwiGLU and GEGLU. Arranged as `fused.py` is."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import raised, result_for, round_into, row_blocks, windows
from zerosim.backends.numpy.fused import gelu_gate, gelu_slope

TAIL = 0.3
TAIL_OF_FLOAT32 = (
    0.11968261517693911, 0.1196937303242303, 0.10863324962545133, 0.08990045889204544, 0.047555086631769286,
    0.0454089625138371, -0.004796943607499507, -0.043300774463656995, 0.017223751380873287,
)  # fmt: skip
TAIL_OF_FLOAT64 = (
    0.11968268412043014, 0.11968268412014409, 0.10891124258860975, 0.08736835743986454, 0.057962370827818854,
    0.02650917708188286, 0.0004278744345959877, -0.01383858921196794, -0.014957323569330137, 0.0025022058926634397,
    -0.02960764252404472, 0.15779207618810492, -0.42718365652507184, 0.9359670344710037, -1.5450973470685372,
    1.7997949496566152, -1.4567955446584742, 0.807920986858889, -0.29487537587294405, 0.06416977549252197,
    -0.006335939742776429,
)  # fmt: skip
"""The normal distribution's tail beyond z is t * polynomial(t) * exp(-z²/2) with t = 1 / (1 + TAIL * z), the form of
Abramowitz and Stegun, 7.1.26. Interpolated at Chebyshev's nodes: within 1e-6 of the tail, and 1e-14."""


def gelu_erf(x: Array, out: Array) -> None:
    for piece, target in windows(x, out):
        values = raised(piece)
        y = result_for(target, values.dtype)
        np.multiply(values, _normal(values)[0], out=y)
        round_into(y, target)


def gelu_erf_backward(grad: Array, x: Array, dx: Array) -> None:
    """d/dx (x * gate) = gate + x * density, where density is the gate's derivative."""
    for grad_piece, piece, target in windows(grad, x, dx):
        values = raised(piece)
        slope, density = _normal(values)
        density *= values
        density *= 1.0 / math.sqrt(2.0 * math.pi)
        slope += density
        result = result_for(target, values.dtype)
        np.multiply(slope, raised(grad_piece), out=result)
        round_into(result, target)


def _normal(x: Array) -> tuple[Array, Array]:
    """The chance that a normal number is below x, and exp(-x²/2)."""
    density = x * x
    density *= -0.5
    np.exp(density, out=density)
    t = np.abs(x)
    t *= TAIL
    t += 1.0
    np.divide(1.0, t, out=t)
    *lower, highest = TAIL_OF_FLOAT64 if x.dtype == np.float64 else TAIL_OF_FLOAT32
    gate = t * highest
    for factor in reversed(lower):
        gate += factor
        gate *= t
    gate *= density
    np.subtract(1.0, gate, out=gate, where=x > 0)
    return gate, density


def relu(x: Array, out: Array) -> None:
    for piece, target in windows(x, out):
        values = raised(piece)
        y = result_for(target, values.dtype)
        np.maximum(values, 0.0, out=y)
        round_into(y, target)


def relu_backward(grad: Array, x: Array, dx: Array) -> None:
    for grad_piece, piece, target in windows(grad, x, dx):
        values = raised(grad_piece)
        result = result_for(target, values.dtype)
        result[...] = values
        np.copyto(result, 0.0, where=raised(piece) <= 0.0)
        round_into(result, target)


def silu(x: Array, out: Array) -> None:
    for rows in row_blocks(*x.shape):
        block = raised(x[rows])
        round_into(block * _sigmoid(block), out[rows])


def swiglu(x: Array, out: Array) -> None:
    _gated(x, out, _sigmoid)


def swiglu_backward(grad: Array, x: Array, dx: Array) -> None:
    _gated_backward(grad, x, dx, _sigmoid, _sigmoid_slope)


def geglu(x: Array, out: Array) -> None:
    _gated(x, out, gelu_gate)


def geglu_backward(grad: Array, x: Array, dx: Array) -> None:
    _gated_backward(grad, x, dx, gelu_gate, gelu_slope)


def _sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)); far below 0 the exponential is inf and the result 0."""
    values = np.negative(x)
    np.exp(values, out=values)
    values += 1.0
    return np.divide(1.0, values, out=values)


def _sigmoid_slope(x: Array, gate: Array) -> Array:
    """d/dx (x * gate) = gate * (1 + x * (1 - gate))."""
    slope = 1.0 - gate
    slope *= x
    slope += 1.0
    slope *= gate
    return slope


def _gated(x: Array, out: Array, gate_of: Callable[[Array], Array]) -> None:
    """out = v * gate_of(v) * up of x with columns v|up."""
    width = out.shape[1]
    for gate, up, target in windows(x[:, :width], x[:, width:], out):
        values = raised(gate)
        y = result_for(target, values.dtype)
        np.multiply(values, gate_of(values), out=y)
        y *= raised(up)
        round_into(y, target)


def _gated_backward(
    grad: Array,
    x: Array,
    dx: Array,
    gate_of: Callable[[Array], Array],
    slope_of: Callable[[Array, Array], Array],
) -> None:
    """d(v * gate_of(v)) * up, and v * gate_of(v), each times grad."""
    width = grad.shape[1]
    halves = (x[:, :width], x[:, width:], dx[:, :width], dx[:, width:])
    for grad_piece, gate, up, dgate, dup in windows(grad, *halves):
        values, g = raised(gate), raised(grad_piece)
        opened = gate_of(values)
        slope = slope_of(values, opened)
        slope *= raised(up)
        opened *= values
        for factor, target in ((slope, dgate), (opened, dup)):
            result = result_for(target, values.dtype)
            np.multiply(factor, g, out=result)
            round_into(result, target)
