"""gradcheck: right rules pass, wrong ones are caught, and the message says where."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zerosim import functional as F
from zerosim.device.device import Buffer
from zerosim.errors import InputError
from zerosim.tensor import ops as P
from zerosim.tensor.gradcheck import GradcheckError, gradcheck
from zerosim.tensor.ops import Exp
from zerosim.tensor.tensor import Tensor, apply


def exp_with(rule: type[Exp], x: Tensor) -> Tensor:
    """exp, whose backward is `rule`'s."""
    out = P.exp(x).buffer
    return apply(rule(out), out, x)


class OneElementOff(Exp):
    def backward(self, grad: Buffer) -> tuple[Buffer | None, ...]:
        (dx,) = super().backward(grad)
        assert dx is not None
        dx.array[1, 2] *= 1.001
        return (dx,)


class RightInTheSum(Exp):
    """Its elements are those of the right gradient, in another order."""

    def backward(self, grad: Buffer) -> tuple[Buffer | None, ...]:
        (dx,) = super().backward(grad)
        assert dx is not None
        dx.array[...] = dx.array[::-1].copy()
        return (dx,)


class NotANumber(Exp):
    def backward(self, grad: Buffer) -> tuple[Buffer | None, ...]:
        (dx,) = super().backward(grad)
        assert dx is not None
        dx.array[0, 0] = math.nan
        return (dx,)


def test_a_right_rule_passes_and_reports() -> None:
    values = np.linspace(-2, 2, 12).reshape(3, 4)
    before = values.copy()
    report = gradcheck(lambda x: F.gelu(x), [values])
    assert report.checked == 12
    assert report.error < 1e-8
    assert report.input == 0
    assert report.analytic == pytest.approx(report.numeric)
    assert "12 gradients" in str(report)
    assert (values == before).all()


def test_one_wrong_element_is_found_and_named() -> None:
    with pytest.raises(GradcheckError) as caught:
        gradcheck(lambda a, x: a.sum() + exp_with(OneElementOff, x), [(2,), (2, 3)])
    report = caught.value.report
    assert report is not None
    assert (report.input, report.index) == (1, (1, 2))
    assert report.analytic == pytest.approx(1.001 * report.numeric, rel=1e-6)
    for part in ("1 gradients are wrong", "input 1 at (1, 2)", f"{report.analytic:.9g}", f"{report.numeric:.9g}"):
        assert part in str(caught.value)


def test_the_wrong_element_is_named_though_a_right_one_is_further_off() -> None:
    """1e9 is off by rounding, far more than a thousandth of 1; and yet the thousandth is what is wrong."""
    values = np.zeros((2, 3))
    values[0, 0] = 20.7
    with pytest.raises(GradcheckError, match=r"1 gradients are wrong; .* input 0 at \(1, 2\)"):
        gradcheck(lambda x: exp_with(OneElementOff, x), [values])


@pytest.mark.parametrize("rule", [RightInTheSum, NotANumber])
def test_other_wrong_rules(rule: type[Exp]) -> None:
    with pytest.raises(GradcheckError):
        gradcheck(lambda x: exp_with(rule, x), [np.arange(6.0).reshape(2, 3)])


def test_a_gradient_that_does_not_flow_is_wrong() -> None:
    with pytest.raises(GradcheckError) as caught:
        gradcheck(lambda x: x + float(x.numpy()[0]), [np.array([3.0])])
    assert caught.value.report is not None
    assert caught.value.report.numeric == pytest.approx(2 * caught.value.report.analytic)
    with pytest.raises(GradcheckError, match="analytic 0"):
        gradcheck(lambda x: P.maximum(x, (0,)), [np.array([3.0, 1.0])])


def test_an_input_that_does_not_matter_has_gradient_0() -> None:
    assert gradcheck(lambda x, unused: 2 * x, [(2,), (3,)]).checked == 5


def test_shapes_draw_the_same_values_each_time() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(x.numpy())
        return x * x

    gradcheck(look, [(2, 2)])
    first = seen[0]
    gradcheck(look, [(2, 2)])
    assert first.dtype == np.float64
    assert (first == seen[len(seen) // 2]).all()


def test_what_cannot_be_checked_is_said() -> None:
    state = np.random.default_rng(0)
    with pytest.raises(GradcheckError, match="two results"):
        gradcheck(lambda x: x * float(state.random()), [(2,)])
    with pytest.raises(InputError, match="returned float"):
        gradcheck(lambda x: 1.0, [(2,)])  # type: ignore[arg-type,return-value]
    with pytest.raises(InputError, match="no element"):
        gradcheck(lambda x: x, [(0,)])
