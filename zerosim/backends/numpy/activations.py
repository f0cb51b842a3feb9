"""Further activations in NumPy: GELU without an approximation, ReLU, and GELU as a gate. Arranged as `fused.py` is."""

from __future__ import annotations

import math

import numpy as np

from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import raised, result_for, round_into, windows
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


def geglu(x: Array, out: Array) -> None:
    width = out.shape[1]
    for gate, up, target in windows(x[:, :width], x[:, width:], out):
        values = raised(gate)
        y = result_for(target, values.dtype)
        np.multiply(values, gelu_gate(values), out=y)
        y *= raised(up)
        round_into(y, target)


def geglu_backward(grad: Array, x: Array, dx: Array) -> None:
    """d(gelu(gate)) * up, and gelu(gate), each times grad."""
    width = grad.shape[1]
    halves = (x[:, :width], x[:, width:], dx[:, :width], dx[:, width:])
    for grad_piece, gate, up, dgate, dup in windows(grad, *halves):
        values, g = raised(gate), raised(grad_piece)
        opened = gelu_gate(values)
        slope = gelu_slope(values, opened)
        slope *= raised(up)
        opened *= values
        for factor, target in ((slope, dgate), (opened, dup)):
            result = result_for(target, values.dtype)
            np.multiply(factor, g, out=result)
            round_into(result, target)
