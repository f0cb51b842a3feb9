"""The optimizer on one rank's own slices: their masters and states, weight decay, the update.

Whether a step is taken, and what gradients are multiplied by, is decided in `control.py`. Holds no collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from warnings import warn

from zerosim.device.device import Kind
from zerosim.dtypes import compute_dtype
from zerosim.optim.control import StepControl
from zerosim.optim.optimizer import Optimizer
from zerosim.tensor.accumulation import GradMemory
from zerosim.tensor.flat import Flat


class Updater:
    """The same on every rank.

    decay      which weights decay, 'all' or 'matrices' (two dimensions or more)
    sub_group  flats are stepped together until they have so many elements of this rank's; 0: all of them
    foreach    with the temporaries of PyTorch's foreach implementation, beside which a fused one has none
    """

    def __init__(
        self,
        optimizer: Optimizer,
        control: StepControl,
        *,
        decay: str = "all",
        grad_memory: GradMemory = GradMemory(),  # noqa: B008  frozen
        sub_group: int = 0,
        foreach: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.control = control
        self.decay = decay
        self.grad_memory = grad_memory
        self.sub_group = sub_group
        self.foreach = foreach

    def decide(self, scaled_norm: float) -> float | None:
        """As `StepControl.decide`, and raises what it raises."""
        return self.control.decide(scaled_norm)

    def judge(self, scaled_norm: float) -> float | None:
        """The old name of `decide`."""
        warn("updater.judge is now updater.decide", DeprecationWarning, stacklevel=2)
        return self.decide(scaled_norm)

    def allocate(self, flat: Flat) -> None:
        """The own slice's optimizer states and, of half types, master, zeroed; live from start to end."""
        device, own, stored = flat.device, flat.own, compute_dtype(flat.dtype)
        names = [*self.optimizer.states, *(["master"] if flat.dtype.is_half else [])]
        flat.states = {
            name: device.alloc((own.size,), stored, Kind.OPTIM, padding=own.padding, name=name) for name in names
        }
        for state in flat.states.values():
            device.kernel(0, device.backend.fill, state.array, 0.0)
        flat.master = flat.states.pop("master", None)

    def groups(self, flats: Sequence[Flat]) -> Iterator[list[Flat]]:
        """The flats that are stepped together, in order. Source: DeepSpeed edaa722, stage3.py, _create_fp16_sub_groups:
        a group ends with what fills it."""
        group: list[Flat] = []
        elements = 0
        for flat in flats:
            group.append(flat)
            elements += flat.own.size
            if self.sub_group and elements >= self.sub_group:
                yield group
                group, elements = [], 0
        if group:
            yield group

    @contextmanager
    def temporaries(self, flats: Sequence[Flat]) -> Iterator[None]:
        """`with updater.temporaries(flats):` holds what a step of these flats takes beside their states. Contents are
        undefined: the kernel works element by element, and writes none."""
        held = [
            flat.device.alloc((flat.own.size,), compute_dtype(flat.dtype), Kind.TEMP, padding=flat.own.padding)
            for flat in flats
            for _ in range(self.optimizer.foreach_temporaries if self.foreach else 0)
        ]
        yield
        del held

    def update(self, flat: Flat, grad_scale: float) -> None:
        """Move the own slice of one flat by one step; `grad_scale` is what `decide` gave."""
        weights, grad = flat.weights(), flat.grad_shard
        if grad is None:
            assert flat.own.size == 0
            return
        for start, stop, decays in _decay_ranges(flat, self.decay):
            self.optimizer.update(
                weights[start:stop],
                grad[start:stop],
                {name: state[start:stop] for name, state in flat.states.items()},
                grad_scale=grad_scale,
                lr=self.control.lr,
                step=self.control.updates,
                decays=decays,
            )


def _decay_ranges(flat: Flat, decay: str) -> list[tuple[int, int, bool]]:
    """The own slice cut where weight decay begins or ends, in elements from its start."""
    ranges: list[tuple[int, int, bool]] = []
    for mine in flat.spec.within(flat.own):
        stop = mine.at + mine.numel
        decays = decay == "all" or len(mine.weight.shape) >= 2
        if ranges and ranges[-1][2] == decays:
            ranges[-1] = (ranges[-1][0], stop, decays)
        else:
            ranges.append((mine.at, stop, decays))
    return ranges
