"""The optimizer on one rank's own slices: their masters and states, weight decay, the update.

Whether a step is taken, and what gradients are multiplied by, is decided in `control.py`. Holds no collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType, compute_dtype
from zerosim.optim.control import StepControl
from zerosim.optim.optimizer import Add, EstimatesCurvature, Optimizer, StateArray, Step, alone, estimates_every
from zerosim.optim.rounding import Lost, Rounding
from zerosim.tensor.flat import Flat


class Updater:
    """The same on every rank.

    decay      which weights decay, 'all' or 'matrices' (two dimensions or more)
    sub_group  flats are stepped together until they have so many elements of this rank's; 0: all of them
    foreach    with the temporaries of PyTorch's foreach implementation, beside which a fused one has none
    lazy       states are made in the first step, not before it
    rounding   how weights of half types are stored without masters (`rounding.py`); None: they have masters
    """

    def __init__(
        self,
        optimizer: Optimizer,
        control: StepControl,
        *,
        decay: str = "all",
        sub_group: int = 0,
        foreach: bool = False,
        lazy: bool = False,
        rounding: Rounding | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.control = control
        self.decay = decay
        self.sub_group = sub_group
        self.foreach = foreach
        self.lazy = lazy
        self.rounding = rounding
        self.lost = Lost()

    def decide(self, scaled_norm: float) -> float | None:
        """As `StepControl.decide`, and raises what it raises."""
        return self.control.decide(scaled_norm)

    def allocate(self, flat: Flat) -> None:
        """The own slice's states, unless they are lazy, and of half types its master, zeroed; live to the end."""
        arrays = [] if self.lazy else self._arrays(flat)
        if self.rounding is None and flat.dtype.is_half:
            arrays.append(StateArray("master", flat.own.size, self._stored(flat), flat.own_padding))
        flat.states = _zeroed(flat, arrays)
        flat.master = flat.states.pop("master", None)

    def make_states(self, flats: Sequence[Flat]) -> None:
        """What `allocate` left out, before the first weight moves. Source: PyTorch 2.13, optim/adam.py, _init_group."""
        for flat in flats:
            if self.lazy and not flat.states:
                with flat.device.scope(unit=flat.module):
                    flat.states = _zeroed(flat, self._arrays(flat))

    def _arrays(self, flat: Flat) -> list[StateArray]:
        """The own slice's states, the master not among them."""
        rounding = [] if self.rounding is None else self.rounding.arrays(flat.own)
        return [*self.optimizer.arrays(flat.spec, flat.own, self._stored(flat)), *rounding]

    def _stored(self, flat: Flat) -> DType:
        """What states are stored in: fp32 beside masters, the weights' own format without."""
        return compute_dtype(flat.dtype) if self.rounding is None else flat.dtype

    def groups(self, flats: Sequence[Flat]) -> Iterator[list[Flat]]:
        """Those that are stepped together: what fills a group ends it (DeepSpeed edaa722, _create_fp16_sub_groups)."""
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
        """A block that holds what a step of these flats takes beside their states, contents undefined."""
        held = [
            flat.device.alloc((flat.own.size,), self._stored(flat), Kind.TEMP, padding=flat.own_padding)
            for flat in flats
            for _ in range(self.optimizer.foreach_temporaries if self.foreach else 0)
        ]
        yield
        del held

    def update(self, flat: Flat, grad_scale: float, add: Add = alone) -> None:
        """Move the own slice of one flat by one step; `grad_scale` is what `decide` gave. `add`: `Optimizer.step`."""
        if flat.grad_shard is None:
            assert flat.own.size == 0
            return
        now = Step(grad_scale, self.control.lr, self.control.updates, self.decay)
        if self.rounding is None:
            self.optimizer.step(flat, now, add)
            return
        lost = self.lost.counter(flat)
        self.optimizer.step(flat, now._replace(storing=partial(self.rounding.storing, lost=lost)), add)
        self.lost.note(flat, lost)

    @property
    def estimate_is_due(self) -> bool:
        """Whether the step that was decided last is followed by an estimate of curvature (`EstimatesCurvature`)."""
        return self.control.is_due(estimates_every(self.optimizer))

    def estimate(self, flat: Flat, grad_scale: float) -> None:
        """Update what the optimizer estimates of the own slice of one flat; its gradient is that on drawn labels."""
        if flat.grad_shard is not None and isinstance(self.optimizer, EstimatesCurvature):
            self.optimizer.estimate(flat, grad_scale)


def _zeroed(flat: Flat, arrays: Sequence[StateArray]) -> dict[str, Buffer]:
    device = flat.device
    states = {a.name: device.alloc((a.numel,), a.dtype, Kind.OPTIM, padding=a.padding, name=a.name) for a in arrays}
    for state in states.values():
        device.kernel(0, device.backend.fill, state.array, 0.0)
    return states
