"""Further activations on the device: GELU without an approximation, ReLU, and GELU as a gate. As in NumPy's file."""

from __future__ import annotations

from zerosim.backends.cuda.fused import GELU_GATE, GELU_SLOPE
from zerosim.backends.cuda.types import elementwise
from zerosim.backends.kernels import Array

# The chance that a normal number is below v, by the function that is exact in both tails.
_NORMAL = (
    "using W = typename wide<T>::type; const W v = wide_of(x), gate = W(0.5) * erfc(v * W(-0.7071067811865476));\n"
)
_gelu_erf = elementwise("T x", "U out", _NORMAL + "store(v * gate, out)", "gelu_erf")
_gelu_erf_backward = elementwise(
    "G grad, T x",
    "U dx",
    _NORMAL + "store((gate + v * exp(W(-0.5) * v * v) * W(0.3989422804014327)) * W(wide_of(grad)), dx)",
    "gelu_erf_backward",
)
_relu = elementwise("T x", "U out", "using W = typename wide<T>::type; store(larger(wide_of(x), W(0)), out)", "relu")
_relu_backward = elementwise(
    "G grad, T x", "U dx", "store(wide_of(x) <= 0 ? decltype(wide_of(grad))(0) : wide_of(grad), dx)", "relu_backward"
)
_geglu = elementwise("T x, T up", "U out", GELU_GATE + "store(v * gate * wide_of(up), out)", "geglu")
_geglu_backward = elementwise(
    "G grad, T x, T up",
    "U dgate, U dup",
    GELU_GATE
    + GELU_SLOPE
    + "const W d = wide_of(grad), u = wide_of(up);\nstore(slope * u * d, dgate);\nstore(gate * v * d, dup)",
    "geglu_backward",
)


def gelu_erf(x: Array, out: Array) -> None:
    _gelu_erf(x, out)


def gelu_erf_backward(grad: Array, x: Array, dx: Array) -> None:
    _gelu_erf_backward(grad, x, dx)


def relu(x: Array, out: Array) -> None:
    _relu(x, out)


def relu_backward(grad: Array, x: Array, dx: Array) -> None:
    _relu_backward(grad, x, dx)


def geglu(x: Array, out: Array) -> None:
    width = out.shape[1]
    if out.size:
        _geglu(x[:, :width], x[:, width:], out)


def geglu_backward(grad: Array, x: Array, dx: Array) -> None:
    width = grad.shape[1]
    if grad.size:
        _geglu_backward(grad, x[:, :width], x[:, width:], dx[:, :width], dx[:, width:])
