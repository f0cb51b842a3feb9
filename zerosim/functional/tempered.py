"""Queries times a number of their position, for attention over long texts without rotary positions (Llama 4's; Scalable
softmax, arXiv 2501.19399)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerosim.device.device import Buffer
from zerosim.functional.common import Grads, grad_like, like
from zerosim.tensor.tensor import Tensor, apply

Runs = Sequence[tuple[slice, float]]


@dataclass(frozen=True, slots=True)
class Tempered:
    """Saves nothing: backward multiplies by the same numbers."""

    columns: int
    runs: Runs

    def backward(self, grad: Buffer) -> Grads:
        dx = grad_like(grad)
        _multiply(grad, self.columns, self.runs, dx)
        return (dx,)


def tempered(qkv: Tensor, columns: int, temper: float, every: int, positions: Sequence[range] = ()) -> Tensor:
    """Return q|k|v with its first `columns`, q, of the token at position t times 1 + temper ln(1 + floor((t + 1) /
    every)); without a copy where all of these are 1. Positions are 0 .. T-1 if none are given. Shapes (B, T, C)."""
    runs = list(_runs(temper, every, positions or (range(qkv.shape[1]),)))
    if all(factor == 1.0 for _, factor in runs):
        return qkv
    out = like(qkv)
    _multiply(qkv.buffer, columns, runs, out)
    return apply(Tempered(columns, runs), out, qkv, op="tempered")


def _runs(temper: float, every: int, positions: Sequence[range]) -> Iterator[tuple[slice, float]]:
    """Yield the tokens that have the same factor."""
    at = 0
    for run in positions:
        while run:
            number = (run.start + 1) // every
            length = min(len(run), (number + 1) * every - 1 - run.start)
            yield slice(at, at + length), 1.0 + temper * math.log1p(number)
            at, run = at + length, run[length:]


def _multiply(x: Buffer, columns: int, runs: Runs, out: Buffer) -> None:
    device, k = x.device, x.device.backend
    for rows, factor in runs:
        q, into = x.array[:, rows, :columns], out.array[:, rows, :columns]
        device.kernel(q.size, k.multiply, q, factor, into)
    device.kernel(0, k.copy, x.array[:, :, columns:], out.array[:, :, columns:])
