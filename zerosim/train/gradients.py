"""Compare the gradients of a real run with the range of narrow formats: the histogram of mixed precision's Figure 3.

One rank trains in fp32, so that the true size of every gradient is known. Each step's gradients are counted
after the sum over microbatches, before the norm, clipping and the update. Each gradient is multiplied by each loss
scale and cast; nothing is derived from a format's limits. In a half-precision run the gradients of activations
go through the same cast before, so the counted loss is a lower bound.

Source: Micikevicius et al., Mixed Precision Training (arXiv 1710.03740), section 3.2 and Figure 3, of activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from zerosim.backends.numpy.narrow import NARROW, Fates, exponents, fates
from zerosim.comm.collectives import Comm
from zerosim.comm.runtime import launch
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.models.model import Model
from zerosim.optim.updater import Updater
from zerosim.parallel.ddp import DDP
from zerosim.train.rank import Progress
from zerosim.train.run import Experiment
from zerosim.train.world import world_of

POWERS = (0, 4, 8, 12, 16, 20, 24)
"""Loss scales, as powers of two."""
FORMATS = tuple(NARROW)
ALONE: Mapping[str, str | int | None] = MappingProxyType(
    {"ranks": 1, "dp_replicate": 1, "tp": 1, "pp": 1, "stage": 0, "backend": "numpy", "world": "threads"}
)
"""The settings of a run on one rank, whose numbers are counted on the host."""
FIXED: Mapping[str, str | int | None] = MappingProxyType({**ALONE, "precision": "fp32", "loss_scale": None})
"""The settings of every run whose gradients are counted."""


@dataclass(slots=True)
class Gradients:
    """All gradients of a run's steps, counted.

    num        their number, including zeros
    zeros      the number of zeros before any cast: rows of a table without a token, inactive neurons
    exponents  the number of the others in [2^e, 2^(e+1)), by e
    fates      the fate of the others in a cast, by format and power of two of the loss scale
    """

    steps: int = 0
    num: int = 0
    zeros: int = 0
    exponents: Counter[int] = field(default_factory=Counter)
    fates: dict[tuple[str, int], Fates] = field(default_factory=dict)

    def add(self, values: Any) -> None:
        """Count one buffer of a step, float32."""
        others = values[values != 0]
        self.num += values.size
        self.zeros += values.size - others.size
        self.exponents.update(exponents(others))
        for power in POWERS:
            scaled = others * np.float32(2.0**power)  # exact: multiplying by a power of two changes no digit
            for name in FORMATS:
                now, before = fates(scaled, name), self.fates.get((name, power), Fates(0, 0, 0, 0))
                self.fates[name, power] = Fates(*(a + b for a, b in zip(now, before, strict=True)))

    def share(self, name: str, power: int) -> dict[str, float]:
        """Return the shares of nonzero gradients that a format holds and loses at a loss scale."""
        counts = self.fates[name, power]
        return {what: count / (self.num - self.zeros) for what, count in counts._asdict().items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "steps": self.steps,
            "gradients": self.num,
            "zeros": self.zeros,
            "exponents": {str(power): self.exponents[power] for power in sorted(self.exponents)},
            "formats": {name: NARROW[name]._asdict() for name in FORMATS},
            "casts": [
                {"format": name, "loss_scale": 2**power, **counts._asdict()}
                for (name, power), counts in self.fates.items()
            ],
        }


class _Counting(DDP):
    """DDP on one rank that counts the gradients before it takes the step."""

    def __init__(self, comm: Comm, device: Device, updater: Updater, found: Gradients) -> None:
        super().__init__(comm, device, updater)
        self._found = found

    def step(self) -> None:
        whole = [(flat, flat.whole_grad()) for flat in self.flats]
        arrays = [
            self.device.backend.to_host(flat.window(grad, index).array).reshape(-1)
            for flat, grad in whole
            for index in range(len(flat.spec.weights))
        ]
        if all(np.isfinite(values).all() for values in arrays):  # otherwise the step below reports it
            self._found.steps += 1
            for values in arrays:
                self._found.add(values)
        del whole, arrays
        super().step()


def on_one_rank(config: RunConfig) -> RunConfig:
    """Return the same run on one rank, in fp32.

    Raises: InputError for a setting that needs more ranks, such as sequence parallelism.
    """
    return config.replace(**FIXED)


def count_gradients(config: RunConfig, *, progress: Progress | None = None) -> Gradients:
    """Train on one rank in fp32, whatever mesh and precision `config` has, and count the gradients of every step.

    Steps with gradients that are not finite are left out. Raises: InputError, OutOfMemory, NonFiniteGradient.
    """
    found = Gradients()

    def counting(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> DDP:
        return _Counting(comm, device, updater, found)

    alone = on_one_rank(config)
    experiment = Experiment(alone, counting)
    launch(lambda ctx: experiment.train_rank(ctx, progress=progress), world_of(alone))
    return found
