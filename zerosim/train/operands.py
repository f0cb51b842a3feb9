"""Count the codes that each scaling makes of a real run's operands: which keep their digits, become 0 or saturate.

One rank trains without 8 bits. In each step the operands of the blocks' linear maps are cast as the recipes of `--fp8`
would cast them, to e4m3 and to e5m2: inputs and weights before forward's products, the results' gradients before
backward's. The training itself goes on in its own format, so every scaling sees the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from zerosim.backends.kernels import Array
from zerosim.backends.numpy.narrow import Fates
from zerosim.comm.collectives import Comm
from zerosim.comm.runtime import launch
from zerosim.config import RunConfig
from zerosim.config.parts.fp8 import SCALINGS
from zerosim.device.device import Device, Phase
from zerosim.device.work import DGRAD, LINEAR
from zerosim.errors import wrong
from zerosim.functional.fp8_recipes import History, Products, torchao, transformer_engine
from zerosim.models.model import Model
from zerosim.optim.updater import Updater
from zerosim.parallel.ddp import DDP
from zerosim.tensor import float8
from zerosim.tensor.float8 import KINDS, Casting
from zerosim.train.gradients import ALONE
from zerosim.train.rank import Progress
from zerosim.train.run import Experiment
from zerosim.train.world import world_of

OPERANDS = ("inputs", "weights", "gradients")
"""The operands of a linear map. The gradients are those of its result."""
FORMATS = tuple(KINDS)
FIXED: Mapping[str, str | int | None] = MappingProxyType({**ALONE, "fp8": "none", "lora_rank": 0})
"""The settings of every run whose operands are counted."""


class Cast(NamedTuple):
    """One way to make codes."""

    operand: str
    scaling: str
    format: str


@dataclass(slots=True)
class Operands:
    """All operands of a run's steps, counted.

    num     how many numbers they have, by operand
    zeros   how many of them are 0 before any cast
    fates   the fates of the others, by cast
    """

    steps: int = 0
    num: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OPERANDS, 0))
    zeros: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OPERANDS, 0))
    fates: dict[Cast, Fates] = field(default_factory=dict)

    def add(self, cast: Cast, found: Fates, zeros: int) -> None:
        """Add the fates of one matrix, of which so many numbers are 0."""
        others = found._replace(full=found.full - zeros)
        before = self.fates.get(cast, Fates(0, 0, 0, 0))
        self.fates[cast] = Fates(*(a + b for a, b in zip(before, others, strict=True)))

    def share(self, operand: str, scaling: str, form: str) -> dict[str, float]:
        """Return the shares of an operand's nonzero numbers that codes hold and lose."""
        total = self.num[operand] - self.zeros[operand]
        counts = self.fates[Cast(operand, scaling, form)]
        return {what: count / total if total else 0.0 for what, count in counts._asdict().items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "steps": self.steps,
            "operands": {name: {"numbers": self.num[name], "zeros": self.zeros[name]} for name in OPERANDS},
            "casts": [{**cast._asdict(), **counts._asdict()} for cast, counts in self.fates.items()],
        }


def _products(scaling: str) -> Products:
    """Return the products of `--fp8`'s default library."""
    if scaling in ("tensorwise", "rowwise"):
        return torchao(scaling, "floor", exact_wgrad=False)
    return transformer_engine(scaling, "e4m3", History(1, "most_recent"), 0, exact_wgrad=False, caches=False)


_PRODUCTS: Mapping[str, Products] = MappingProxyType({scaling: _products(scaling) for scaling in SCALINGS})


def casting_of(cast: Cast) -> Casting:
    """Return how `--fp8` casts an operand under a scaling, but to this format."""
    products = _PRODUCTS[cast.scaling]
    of = {"inputs": products.forward.left, "weights": products.forward.right, "gradients": products.dgrad.left}
    return of[cast.operand]._replace(kind=KINDS[cast.format])


@dataclass(slots=True)
class _Seen:
    """Delayed scaling of one operand of one map: the amax of its steps, and the factor that they gave."""

    history: Array
    factor: Array
    step: int


class _Watch:
    """Counts the operands of products of blocks as they run."""

    def __init__(self, device: Device, found: Operands) -> None:
        self.device, self.found, self.product = device, found, device.product
        self.seen: dict[tuple[str, str, int, str], _Seen] = {}
        self.at, self.uses = device.where, dict[str, int]()

    def __call__(self, name: str, run: Callable[..., None], left: Array, right: Array, *rest: Array | None) -> None:
        where = self.device.where
        if where.unit.rpartition(".")[2].isdigit():  # a block's name ends in its number
            if name == LINEAR and where.phase == Phase.FORWARD.value:
                self.look("inputs", left)
                self.look("weights", right.T)
            elif name == DGRAD and where.phase == Phase.BACKWARD.value:
                self.look("gradients", left)
        self.product(name, run, left, right, *rest)

    def look(self, operand: str, values: Array) -> None:
        """Count a matrix under every scaling."""
        where, wide = self.device.where, values.astype(np.float32)
        if where != self.at:
            self.at, self.uses = where, {}
        number = self.uses[operand] = self.uses.get(operand, -1) + 1
        zeros = int(np.count_nonzero(wide == 0))
        padded = np.pad(wide, ((0, 0), (0, -wide.shape[1] % 32)))  # e8m0 scales need whole blocks
        self.found.num[operand] += wide.size
        self.found.zeros[operand] += zeros
        for scaling in SCALINGS:
            for form in FORMATS:
                cast, scales = Cast(operand, scaling, form), None
                casting = casting_of(cast)
                history = _PRODUCTS[scaling].history
                if history is not None:
                    scales = self.delayed((where.unit, operand, number, form), casting, history, wide)
                matrix = padded if casting.scale == "e8m0" else wide
                self.found.add(cast, float8.fates(casting, matrix, scales), zeros + matrix.size - wide.size)

    def delayed(self, key: tuple[str, str, int, str], casting: Casting, how: History, values: Array) -> Array:
        """Return the scale that former steps give, and note this matrix's amax for later ones."""
        step = self.device.where.step
        if key not in self.seen:
            self.seen[key] = _Seen(np.zeros((how.length, 1), np.float32), np.ones(1, np.float32), step)
        seen = self.seen[key]
        if seen.step != step:
            seen.factor = float8.delayed_factor(np, casting, seen.history, how.algo, seen.factor)
            seen.history, seen.step = float8.rolled(np, seen.history), step
        seen.history[0] = np.maximum(seen.history[0], float8.amax_of(np, casting, values)[0])
        return (np.float32(1) / seen.factor).reshape(1, 1)


def on_one_rank(config: RunConfig) -> RunConfig:
    """Return the same run on one rank, without 8 bits.

    Raises: InputError for a setting that needs more ranks, and for a model without blocks.
    """
    if not config.model.has_blocks:
        raise wrong("model", f" {config.model.family!r} has no blocks with linear maps; choose gpt or llama")
    return config.replace(**FIXED)


def count_operands(config: RunConfig, *, progress: Progress | None = None) -> Operands:
    """Train on one rank without 8 bits, whatever `config` has, and count the operands' codes under each scaling.

    Raises: InputError, OutOfMemory, NonFiniteGradient.
    """
    found = Operands()

    def watching(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> DDP:
        device.product = _Watch(device, found)  # type: ignore[method-assign]
        return DDP(comm, device, updater)

    alone = on_one_rank(config)
    experiment = Experiment(alone, watching)
    launch(lambda ctx: experiment.train_rank(ctx, progress=progress), world_of(alone))
    found.steps = experiment.steps
    return found
