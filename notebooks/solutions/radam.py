"""Exercise 25: along m alone until v can be trusted, then Adam's step times r."""

from __future__ import annotations

from typing import Any

from zerosim.grading import Array, Elementwise, Now


class MyRAdam(Elementwise):
    states = ("exp_avg", "exp_avg_sq")
    flops = 14
    beta1, beta2, eps = 0.9, 0.999, 1e-8

    def rule(
        self,
        xp: Any,
        w: Array,
        g: Array,
        now: Now,
        *states: Array,
    ) -> None:
        m, v = states
        g += now.weight_decay * w
        m += (1 - self.beta1) * (g - m)
        v += (1 - self.beta2) * (g * g - v)
        t, power = now.step, self.beta2**now.step
        most = 2 / (1 - self.beta2) - 1
        rho = most - 2 * t * power / (1 - power)
        rate = now.lr / (1 - self.beta1**t)
        if rho <= 5:
            w -= rate * m
            return
        r = (rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho)
        rate *= (r * (1 - power)) ** 0.5
        w -= rate * m / (xp.sqrt(v) + self.eps)
