"""What a kernel costs: cases worked by hand from the constants and the rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerosim.config.presets.cluster import Curve, cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.device.events import Kernel, Scope
from zerosim.ledger.costs import kernel_seconds

A100 = cluster_of(find_hardware("a100-80"))


@pytest.mark.parametrize(
    ("name", "engine", "flops", "nbytes", "takes"),
    [
        ("linear", "matmul", 1000, 8, 10 / 0.5),  # 10 s at the peak
        ("linear", "matmul", 1000, 400, 40 / 0.8),  # 40 s of memory traffic
        ("add", "vector", 1000, 8, 0.8 / 0.8),  # its arithmetic is free
        ("flash_attention", "matmul", 1000, 8, 5 / 0.25),  # half of the products, at no more than `flash`
        ("free", "vector", 0, 0, 0.0),
    ],
)
def test_a_kernel_takes_the_longer_of_arithmetic_and_memory(
    name: str, engine: str, flops: int, nbytes: int, takes: float
) -> None:
    matmul, memory = Curve(((1.0, 0.5),), 0.5), Curve(((1.0, 0.8),), 0.8)
    cluster = replace(A100, peak_flops=100.0, hbm=10.0, matmul=matmul, memory=memory, flash=0.25)
    kernel = Kernel(Scope(0), name, engine, flops, nbytes // 2, nbytes // 2)
    assert kernel_seconds(kernel, cluster) == pytest.approx(takes)
