"""A flat buffer of trained maps whose weights are stored and sent as codes of 8 bits, beside fp32 masters.

Each weight has one scale, from its own amax, which all ranks agree on after an update: ranks hold slices. Every rank
then makes the codes of its slice, and gathers move codes.

    torchao             FSDP2 casts a shard before each gather (enable_fsdp_float8_all_gather)
    Transformer Engine  codes are the parameters (fp8_param_gather): no copy in 2 bytes

The first scales are of the whole initial weights, and masters start from these weights, not from their codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.work import VECTOR, KernelWork
from zerosim.dtypes import DType, fp32, uint8
from zerosim.placement.rows import Row
from zerosim.tensor import float8
from zerosim.tensor.flat import Flat
from zerosim.tensor.float8 import Casting

Share = Callable[[Buffer], None]
"""Takes the largest of every rank's numbers, in place."""


class Stored(NamedTuple):
    """A weight's codes, in its shape, and its scale (1, 1)."""

    casting: Casting
    codes: Buffer
    scale: Buffer


class CodedFlat(Flat):
    """Codes in place of parameters: `param` and `param_shard` hold a byte for each element.

    factors, scales   of each weight: what numbers are multiplied by, and what codes are
    """

    def __init__(self, casting: Casting, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        self.casting = casting
        self.factors: Buffer | None = None
        self.of_codes: Buffer | None = None

    @property
    def dtype(self) -> DType:
        return uint8

    def place_params(self, row: Row) -> None:
        count = len(self.spec.weights)
        self.factors, self.of_codes = (self.device.alloc((count, 1), fp32, Kind.PARAM) for _ in range(2))
        super().place_params(row)

    def stored(self, index: int) -> Stored:
        """Return a weight's codes and scale, while they are here."""
        assert self.of_codes is not None
        return Stored(self.casting, self.param_window(index), self.of_codes[index : index + 1])

    def write(self, index: int, values: Any, *, exact_master: bool, coded: bool = False) -> None:
        backend, weight = self.device.backend, self.spec.weights[index]
        assert self.factors is not None
        assert self.of_codes is not None
        half = backend.empty(values.shape, self.value_dtype)
        backend.from_host(values, half)
        rounded = np.asarray(backend.to_host(half), np.float32).reshape(weight.shape[0], -1)
        amax = float8.amax_of(np, self.casting, rounded)
        factor, scale = float8.factors_from(np, self.casting, amax), np.empty((1, 1), np.float32)
        float8.scales_from(np, self.casting, amax, scale)
        codes = np.empty(rounded.shape, np.uint8)
        float8.encode(np, self.casting, rounded, scale, codes, factor)
        backend.from_host(factor, self.factors[index : index + 1].array)
        backend.from_host(scale, self.of_codes[index : index + 1].array)
        if self.param is not None:
            at = self.spec.offsets[index]
            backend.from_host(codes.reshape(-1), self.param[at : at + codes.size].array)
        mine = self.spec.overlap(self.own, index)
        if mine is None:
            return
        here, part = slice(mine.at, mine.at + mine.numel), slice(mine.start, mine.stop)
        if self.param_shard is not None:
            backend.from_host(codes.reshape(-1)[part], self.param_shard[here].array)
        if self.master is not None:
            source = values if exact_master else rounded
            backend.from_host(np.asarray(source, np.float32).reshape(-1)[part], self.master[here].array)

    def rescale(self, share: Share) -> None:
        """Take new scales from the masters, after an update."""
        assert self.master is not None
        assert self.factors is not None
        assert self.of_codes is not None
        amax = self.device.alloc(self.factors.shape, fp32, Kind.TEMP)

        def find(xp: Any, master: Array, amax: Array) -> None:
            amax[...] = 0
            for index, here in self._own():
                amax[index] = float8.amax_of(xp, self.casting, self._rounded(xp, master[here]))[0]

        def scale(xp: Any, amax: Array, factors: Array, scales: Array) -> None:
            for index in range(len(amax)):
                one = amax[index : index + 1]
                factors[index] = float8.factors_from(xp, self.casting, one)[0]
                float8.scales_from(xp, self.casting, one, scales[index : index + 1])

        _run(self.device, "fp8_amax", self.own.size, find, self.master.array, amax.array)
        share(amax)
        _run(self.device, "fp8_scale", 0, scale, amax.array, self.factors.array, self.of_codes.array)

    def store_param_shard(self) -> None:
        if self.param_shard is not None:
            self.cast_into(self.param_shard)

    def cast_into(self, shard: Buffer) -> None:
        assert self.master is not None
        assert self.factors is not None
        assert self.of_codes is not None

        def rule(xp: Any, master: Array, factors: Array, scales: Array, shard: Array) -> None:
            for index, here in self._own():
                values = self._rounded(xp, master[here])
                one = slice(index, index + 1)
                float8.encode(xp, self.casting, values, scales[one], shard[here].reshape(1, -1), factors[one])

        arrays = self.master.array, self.factors.array, self.of_codes.array, shard.array
        _run(self.device, "fp8_cast", self.own.size, rule, *arrays)

    def _own(self) -> Iterator[tuple[int, slice]]:
        """Yield each weight of the local slice with its place there."""
        for index in range(len(self.spec.weights)):
            if (mine := self.spec.overlap(self.own, index)) is not None:
                yield index, slice(mine.at, mine.at + mine.numel)

    def _rounded(self, xp: Any, master: Array) -> Array:
        """Return masters as the parameters' own format has them, (1, n): libraries cast those."""
        half = self.device.backend.empty(master.shape, self.value_dtype)
        self.device.backend.copy(master, half)
        return half.reshape(1, -1)


def _run(device: Device, name: str, flops: int, rule: Any, *arrays: Array) -> None:
    read = sum(int(one.nbytes) for one in arrays[:-1])
    work = KernelWork(name, VECTOR, flops, read, int(arrays[-1].nbytes))
    device.kernels((work,), device.backend.coded, rule, *arrays)
