"""TIMES: what the clock says of a step (docs/time.md), for a measured time or throughput to be compared with.

The record says what is done and in which order, the clock when; so these are modelled, and no count.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

from zerosim.analysis.expect.asked import Asked, Quantity
from zerosim.analysis.expect.sweeps import BANDWIDTH


def _hardware_flops(asked: Asked) -> Fraction:
    return Fraction(asked.time.hardware_flops / asked.config.mesh.ranks / asked.time.seconds)


def _model_flops(asked: Asked) -> Fraction:
    return Fraction(asked.time.model_flops / asked.config.mesh.ranks / asked.time.seconds)


def _tokens(asked: Asked) -> Fraction:
    c = asked.config
    return Fraction(c.global_batch * c.model.seq / c.mesh.ranks / asked.time.seconds)


_NEEDS_AND_TAKES = ("gpu",), (BANDWIDTH,)

TIMES: Mapping[str, Quantity] = MappingProxyType(
    {
        "step_seconds": Quantity(
            lambda asked: Fraction(asked.time.seconds),
            "seconds",
            "a step by the clock, on the GPU that is named (docs/time.md)",
            *_NEEDS_AND_TAKES,
        ),
        "hardware_flops_per_s": Quantity(
            _hardware_flops,
            "flops per second",
            "FLOP/s of a GPU by the clock: all products of the step, those that are computed again included",
            *_NEEDS_AND_TAKES,
        ),
        "model_flops_per_s": Quantity(
            _model_flops,
            "flops per second",
            "FLOP/s of a GPU by the clock: each forward product and the two of its backward, none computed again",
            *_NEEDS_AND_TAKES,
        ),
        "tokens_per_s": Quantity(
            _tokens, "tokens per second", "tokens per second of a GPU, by the clock", *_NEEDS_AND_TAKES
        ),
        "compute_share": Quantity(
            lambda asked: Fraction(asked.time.compute / asked.time.seconds),
            "share",
            "of a step by the clock, how much the kernels take",
            *_NEEDS_AND_TAKES,
        ),
    }
)
