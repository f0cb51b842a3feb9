"""Random numbers as a function of where they are used, never of earlier draws.

A key is a hash of words that name the place: (seed, parameter) for a weight; (seed, attempted step, global microbatch,
unit, op) for a dropout; (seed, step) for a batch, and for labels that are drawn for it. So ranks, ZeRO stages,
recompute and a resumed run agree without ever exchanging a generator's state.
"""

from __future__ import annotations

import hashlib
from operator import index
from typing import Any

import numpy as np

from zerosim.device.device import Device


def key(*words: int | str) -> tuple[int, int]:
    """Return two 64-bit words that name a place in the program."""
    text = "\x1f".join(f"str:{word}" if isinstance(word, str) else f"int:{index(word)}" for word in words)
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def generator(*words: int | str) -> np.random.Generator:
    """Return a host generator for that place (Philox-4x64, counter 0)."""
    return np.random.Generator(np.random.Philox(key=np.array(key(*words), np.uint64)))


def normal(shape: tuple[int, ...], std: float, *words: int | str) -> Any:
    """Draw a host array of fp32 normals: the same numbers, whatever precision they are rounded to later."""
    return generator(*words).standard_normal(shape, np.float32) * np.float32(std)


class DropoutKeys:
    """Keys for dropout, read from the device's scope: (seed, attempted step, global microbatch, unit, op).

    `first_micro_batch` is the global number of this rank's first microbatch of a step; the scope's slot counts on from
    there. Global numbers make masks depend on the data, not on the rank that holds it.
    """

    def __init__(self, device: Device, seed: int, first_micro_batch: int) -> None:
        self.device = device
        self.seed = seed
        self.first_micro_batch = first_micro_batch

    def __call__(self, op: str, unit: str = "") -> tuple[int, int]:
        """Return the key of an op in a `unit`; without one, in the unit that runs."""
        where = self.device.where
        return key("dropout", self.seed, where.step, self.first_micro_batch + where.slot, unit or where.unit, op)


class LabelKeys:
    """The place of drawn labels in their step's stream, read from the device's scope.

    The stream is that of (seed, attempted step). It has a number for each target of the global batch, row by row, so a
    target's label does not depend on how the batch is cut into ranks and microbatches. `first_micro_batch` is as for
    `DropoutKeys`.
    """

    def __init__(self, device: Device, seed: int, first_micro_batch: int) -> None:
        self.device = device
        self.seed = seed
        self.first_micro_batch = first_micro_batch

    def __call__(self, targets: int) -> tuple[tuple[int, int], int]:
        """Return the stream's key, and where in the stream this microbatch of so many targets begins."""
        where = self.device.where
        return key("labels", self.seed, where.step), (self.first_micro_batch + where.slot) * targets
