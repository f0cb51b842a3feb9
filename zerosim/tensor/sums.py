"""Gradients that are added to stored ones, and whether they were finite."""

from __future__ import annotations

from collections.abc import Callable

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.work import ACCUMULATE, KernelWork, work_of
from zerosim.dtypes import fp64


class GradProbe:
    """Remembers, on the device, whether this rank's own gradients were finite: an error can name the rank and unit."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.flag: Buffer | None = None  # (1,), fp64: finite as long as all of them were

    def look(self, grad: Buffer) -> None:
        flag = self.device.alloc((1,), fp64, Kind.TEMP)
        self.device.kernel(grad.numel, self.device.backend.finite_probe, grad.array, flag.array)
        self.flag = added(self.flag, flag)


def added(kept: Buffer | None, grad: Buffer) -> Buffer:
    if kept is None:
        return grad
    accumulate(kept.device, grad.numel, kept.device.backend.add, kept.array, grad.array, kept.array)
    return kept


def accumulate(device: Device, flops: int, run: Callable[..., None], *arrays: Array) -> None:
    """Add a gradient to a stored one. Here this is its own kernel; in fused frameworks the product that computes the
    gradient also adds it."""
    device.kernels((KernelWork(ACCUMULATE, *work_of(run.__name__, flops, arrays)[1:]),), run, *arrays)
