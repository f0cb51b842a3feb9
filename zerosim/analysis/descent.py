"""Run an optimizer on a surface of two weights, with the training code: a flat of one vector, a single rank, DDP.

Only the loss differs: its gradient is computed exactly, rounded to fp32 and passed to the strategy as after a backward.
Learning rates mean different things to optimizers, so each gets its best one from the list `RATES`: the rate with the
lowest loss after the steps among paths that stay in the picture; of two equal ones, the smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zerosim.analysis.surfaces import SURFACES, Point, Surface
from zerosim.comm.runtime import Context, World, launch
from zerosim.config import RunConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.dtypes import fp32
from zerosim.errors import InputError
from zerosim.parallel.ddp import DDP
from zerosim.tensor.flat import Flat
from zerosim.train.build_strategy import join_by_itself
from zerosim.train.build_updater import build_updater

RATES = tuple(float(f"{digit}e{power}") for power in range(-4, 1) for digit in (1, 2, 5))
"""1e-4, 2e-4, 5e-4, ..., 1, 2, 5."""
STEPS = 100
WORKS_ON = {"sums": "rows and columns of matrices", "matrices": "whole matrices", "blocks": "blocks of many weights"}
NEEDS_NOISE = ("adam-sage",)


class Path(NamedTuple):
    """The two weights before the first step and after each step; `losses` are the surface's values there."""

    lr: float
    points: tuple[Point, ...]
    losses: tuple[float, ...]
    stays: bool

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"lr": self.lr, "points": self.points, "losses": self.losses, "stays": self.stays}


def check_shows(optimizer: str) -> None:
    """Check an optimizer. Raises: InputError if its path on two weights would not be typical of it."""
    shown = ", ".join(name for name in OPTIMIZERS if OPTIMIZERS[name].cut == "elements" and name not in NEEDS_NOISE)
    cut = OPTIMIZERS[optimizer].cut
    if cut != "elements":
        raise InputError(
            f"{optimizer}: works on {WORKS_ON[cut]}, which two weights cannot show; plot optimizers trains a model "
            f"with it; here choose among {shown}"
        )
    if optimizer in NEEDS_NOISE:
        raise InputError(
            f"{optimizer}: moves a weight as its sensitivity changes between batches, but a surface has no batches; "
            "choose "
            f"among {shown}"
        )


def descend(surface: Surface, config: RunConfig, steps: int = STEPS) -> Path:
    """Return the path of `config`'s optimizer from the surface's start. The path ends where it leaves the picture.

    Only `config`'s fields of `optim` count, including its `lr`.
    """
    (path,) = launch(lambda ctx: _descend(ctx, surface, config, steps), World(ranks=1, record=False))
    return path


def best_path(surface: Surface, config: RunConfig, steps: int = STEPS) -> Path:
    """Return the path at the best of `RATES`; `config`'s own `lr` is ignored."""

    def program(ctx: Context) -> Path:
        paths = (_descend(ctx, surface, config.replace(lr=lr), steps) for lr in RATES)
        return min(paths, key=lambda path: (not path.stays, path.losses[-1]))

    (path,) = launch(program, World(ranks=1, record=False))
    return path


def best_paths(
    surfaces: Iterable[str] = tuple(SURFACES), optimizers: Sequence[str] = ("adam", "sgd"), steps: int = STEPS
) -> dict[str, dict[str, Path]]:
    """Return each `best_path`, by surface and then by the optimizer's title. Raises: InputError as `check_shows`
    does."""
    for name in optimizers:
        check_shows(name)
    configs = {OPTIMIZERS[name].title: RunConfig(optimizer=name) for name in optimizers}
    return {
        name: {title: best_path(SURFACES[name], config, steps) for title, config in configs.items()}
        for name in surfaces
    }


def _descend(ctx: Context, surface: Surface, config: RunConfig, steps: int) -> Path:
    device, backend = ctx.device, ctx.device.backend
    strategy = DDP(ctx.comm, device, build_updater(config.replace(precision="fp32"), steps))
    flat = Flat("surface", device, fp32, fp32)
    flat.declare("weights", (2,))
    join_by_itself(strategy, [flat])
    strategy.place([flat], lambda flat: backend.from_host([surface.start], flat.whole_param().reshape(1, 2).array))
    points, losses = [surface.start], [float(surface.loss(*surface.start))]
    for _ in range(steps):
        strategy.begin(())
        grad = flat.new_grad_shard()
        backend.from_host(surface.gradient(*points[-1]), grad.array)
        flat.add_grad_shard(grad)
        strategy.step()
        x, y = (float(weight) for weight in backend.to_host(flat.weights().array))
        points.append((x, y))
        losses.append(float(surface.loss(x, y)))
        if not surface.holds((x, y)):
            return Path(config.optim.lr, tuple(points), tuple(losses), stays=False)
    return Path(config.optim.lr, tuple(points), tuple(losses), stays=True)
