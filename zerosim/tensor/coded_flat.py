"""A flat buffer of trained maps whose weights are stored and sent as codes of 8 bits, beside fp32 masters.

A weight has one scale, or one for each 128 x 128 block, from an amax which all ranks agree on after an update: ranks
hold slices. Every rank then makes the codes of its slice, and gathers move codes.

    torchao             FSDP2 casts a shard before each gather (enable_fsdp_float8_all_gather)
    Transformer Engine  codes are the parameters (fp8_param_gather): no copy in 2 bytes. So does DeepSeek-V3

The first scales are of the whole initial weights, and masters start from these weights, not from their codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.work import VECTOR, KernelWork
from zerosim.dtypes import DType, fp32, uint8
from zerosim.tensor import float8
from zerosim.tensor.flat import Flat
from zerosim.tensor.float8 import Casting

Share = Callable[[Buffer], None]
"""Takes the largest of every rank's numbers, in place."""


class Stored(NamedTuple):
    """A weight's codes, in its shape, and its scales."""

    casting: Casting
    codes: Buffer
    scales: Buffer


class CodedFlat(Flat):
    """Codes in place of parameters: `param` and `param_shard` hold a byte for each element.

    factors, of_codes   of each block of each weight: what numbers are multiplied by, where `casting` has that, and
                        the scales of codes
    """

    def __init__(self, casting: Casting, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        self.casting = casting
        self.factors: Buffer | None = None
        self.of_codes: Buffer | None = None

    @property
    def dtype(self) -> DType:
        return uint8

    def place_scales(self) -> None:
        count = sum(down * across for down, across in map(self._grid, range(len(self.spec.weights))))
        self.of_codes = self.device.alloc((count,), fp32, Kind.PARAM)
        if self.casting.has_factors:
            self.factors = self.device.alloc((count,), fp32, Kind.PARAM)

    def _grid(self, index: int) -> tuple[int, int]:
        """Return the shape of a weight's scales."""
        rows, columns = self.spec.weights[index].shape
        return self.casting.grid(rows, columns)

    def _blocks(self, index: int) -> slice:
        """Return where a weight's scales are."""
        sizes = [down * across for down, across in map(self._grid, range(index + 1))]
        return slice(sum(sizes[:-1]), sum(sizes))

    def stored(self, index: int) -> Stored:
        """Return a weight's codes and scales, while they are here."""
        assert self.of_codes is not None
        scales = self.of_codes[self._blocks(index)].reshape(*self._grid(index))
        return Stored(self.casting, self.param_window(index), scales)

    def write(self, index: int, values: Any, *, exact_master: bool, coded: bool = False) -> None:
        backend, weight, grid = self.device.backend, self.spec.weights[index], self._grid(index)
        half = backend.empty(values.shape, self.value_dtype)
        backend.from_host(values, half)
        rounded = np.asarray(backend.to_host(half), np.float32).reshape(weight.shape)
        codes, scales = np.empty(rounded.shape, np.uint8), np.empty(grid, np.float32)
        amax = float8.amax_of(np, self.casting, rounded)
        factors = self._scale(np, amax, scales)
        float8.encode(np, self.casting, rounded, scales, codes, factors)
        for host, buffer in ((scales, self.of_codes), (factors, self.factors)):
            if buffer is not None and host is not None:
                backend.from_host(host.reshape(-1), buffer[self._blocks(index)].array)
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
            source = np.asarray(values if exact_master else rounded, np.float32)
            backend.from_host(source.reshape(-1)[part], self.master[here].array)

    def rescale(self, share: Share) -> None:
        """Take new scales from the masters, after an update."""
        assert self.master is not None
        assert self.of_codes is not None
        amax = self.device.alloc(self.of_codes.shape, fp32, Kind.TEMP)

        def find(xp: Any, master: Array, amax: Array) -> None:
            amax[...] = 0
            for index, whole in self._own(xp, master):
                amax[self._blocks(index)] = float8.amax_of(xp, self.casting, whole).reshape(-1)

        def scale(xp: Any, amax: Array, scales: Array, *factors: Array) -> None:
            for index in range(len(self.spec.weights)):
                here, grid = self._blocks(index), self._grid(index)
                found = self._scale(xp, amax[here].reshape(grid), scales[here].reshape(grid))
                for out in factors:
                    out[here] = found.reshape(-1)

        kept = [one.array for one in (self.of_codes, self.factors) if one is not None]
        run_rule(self.device, "fp8_amax", self.own.size, find, [self.master.array], [amax.array])
        share(amax)
        run_rule(self.device, "fp8_scale", 0, scale, [amax.array], kept)

    def store_param_shard(self) -> None:
        if self.param_shard is not None:
            self.cast_into(self.param_shard)

    def cast_into(self, shard: Buffer) -> None:
        assert self.master is not None
        assert self.of_codes is not None

        def rule(xp: Any, master: Array, scales: Array, *more: Array) -> None:
            *factors, shard = more
            for index, whole in self._own(xp, master):
                here, grid = self._blocks(index), self._grid(index)
                codes = xp.empty(whole.shape, xp.uint8)
                given = factors[0][here].reshape(grid) if factors else None
                float8.encode(xp, self.casting, whole, scales[here].reshape(grid), codes, given)
                mine = self.spec.overlap(self.own, index)
                assert mine is not None
                shard[mine.at : mine.at + mine.numel] = codes.reshape(-1)[mine.start : mine.stop]

        kept = [one.array for one in (self.of_codes, self.factors) if one is not None]
        run_rule(self.device, "fp8_cast", self.own.size, rule, [self.master.array, *kept], [shard.array])

    def _scale(self, xp: Any, amax: Array, scales: Array) -> Any:
        """Set a weight's scales. Return its factors, or None where values are divided by scales."""
        float8.scales_from(xp, self.casting, amax, scales)
        return float8.factors_from(xp, self.casting, amax) if self.casting.has_factors else None

    def _own(self, xp: Any, master: Array) -> Iterator[tuple[int, Array]]:
        """Yield each weight of the local slice as the parameters' own format has it, which libraries cast, in its whole
        shape: 0 where others have it."""
        backend = self.device.backend
        for index, weight in enumerate(self.spec.weights):
            if (mine := self.spec.overlap(self.own, index)) is not None:
                half = backend.empty((mine.numel,), self.value_dtype)
                backend.copy(master[mine.at : mine.at + mine.numel], half)
                whole = xp.zeros((weight.numel,), xp.float32)
                whole[mine.start : mine.stop] = half.astype(xp.float32)
                yield index, whole.reshape(weight.shape)


def run_rule(device: Device, name: str, flops: int, rule: Any, read: Sequence[Array], made: Sequence[Array]) -> None:
    """Run a rule over NumPy's or CuPy's functions as one kernel, which reads arrays and fills others."""
    sizes = [sum(int(one.nbytes) for one in arrays) for arrays in (read, made)]
    work = KernelWork(name, VECTOR, flops, sizes[0], sizes[1])
    device.kernels((work,), device.backend.coded, rule, *read, *made)
