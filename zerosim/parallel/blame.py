"""Which rank and unit first had a gradient that was not finite, before it was reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerosim.comm.collectives import Comm
from zerosim.device.device import Kind
from zerosim.dtypes import fp64
from zerosim.errors import NonFiniteGradient
from zerosim.tensor.flat import Flat


def blame(everyone: Comm, flats: Sequence[Flat], names: Sequence[str]) -> NonFiniteGradient:
    """Find the rank and the unit whose own gradient was not finite before it was reduced; `names` are all ranks'
    units."""
    device = everyone.device
    step, backend = device.where.step, device.backend
    flags = device.alloc((everyone.size, len(names)), fp64, Kind.TEMP)
    device.kernel(0, backend.fill, flags.array, 0.0)
    for flat in flats:
        probe = flat.collector.probe
        if probe is not None and probe.flag is not None:
            i = names.index(flat.name)
            device.kernel(0, backend.copy, probe.flag.array, flags.array[everyone.rank, i : i + 1])
    everyone.all_reduce(flags, op="sum", purpose="control")
    seen = backend.to_host(flags.array)
    for i in reversed(range(len(names))):  # backward's order: the first unit with a bad gradient
        bad = [rank for rank, row in zip(everyone.ranks, seen, strict=True) if not math.isfinite(row[i])]
        if bad:
            return NonFiniteGradient(
                f"rank {bad[0]}'s gradient of {names[i]} is not finite at step {step}"
                + (f" (also on ranks {bad[1:]})" if bad[1:] else "")
                + ": lower the learning rate, clip, or pass --skip-nonfinite to skip such steps",
                rank=bad[0],
            )
    return NonFiniteGradient(
        f"the sum of the ranks' gradients overflows at step {step}, each rank's own is finite: "
        "lower the learning rate, clip, or pass --skip-nonfinite to skip such steps"
    )
