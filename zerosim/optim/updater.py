"""The optimizer on one rank's slices: their masters and states, weight decay, the update.

`control.py` decides whether to take a step, and the gradients' factor. This module has no collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType, compute_dtype
from zerosim.optim.control import StepControl
from zerosim.optim.optimizer import Add, EstimatesCurvature, Optimizer, StateArray, Step, alone, estimates_every
from zerosim.optim.rounding import Lost, Rounding
from zerosim.optim.temporaries import Temporaries
from zerosim.placement.memories import NVME
from zerosim.placement.partition import Slice
from zerosim.tensor.flat import Flat, in_turn


class Updater:
    """Updates a rank's slices. It is the same on every rank.

    decay      the weights with decay, 'all' or 'matrices' (two dimensions or more)
    sub_group  flats are stepped together until they have this number of the rank's elements; 0: all of them
    cpu_steps  the host's CPU updates, and so needs masters of every format
    temporaries   a step's (`temporaries.py`); None: it has none
    lazy       states are allocated in the first step, not before it
    rounding   the rounding of weights of half types without masters (`rounding.py`); None: they have masters
    """

    def __init__(
        self,
        optimizer: Optimizer,
        control: StepControl,
        *,
        decay: str = "all",
        sub_group: int = 0,
        cpu_steps: bool = False,
        temporaries: Temporaries | None = None,
        lazy: bool = False,
        rounding: Rounding | None = None,
    ) -> None:
        self.optimizer, self.control = optimizer, control
        self.upcasts: dict[str, Buffer] = {}  # fp32 gradients that outlive their step, by flat
        self.decay, self.sub_group, self.cpu_steps = decay, sub_group, cpu_steps
        self.temporaries = temporaries or Temporaries(optimizer)
        self.lazy, self.rounding, self.lost = lazy, rounding, Lost()

    def decide(self, scaled_norm: float) -> float | None:
        """Decide as `StepControl.decide`, with the same errors."""
        return self.control.decide(scaled_norm)

    def allocate(self, flat: Flat) -> None:
        """Allocate the local slice's states, unless lazy, and its master for half types, zeroed, to the end."""
        arrays = [] if self.lazy or flat.held.is_idle else self.arrays(flat)
        if self.rounding is None and (flat.value_dtype.is_half or self.cpu_steps):
            arrays.append(StateArray("master", flat.own.size, self.stored(flat), flat.own_padding))
        flat.states = self._zeroed(flat, arrays)
        flat.master = flat.states.pop("master", None)

    def make_states(self, flats: Sequence[Flat]) -> None:
        """Allocate the lazy states, before the first weight moves. Source: PyTorch 2.13, optim/adam.py, _init_group."""
        for flat in in_turn(flats):
            if self.lazy and not flat.states and not flat.held.is_idle:
                with flat.device.scope(unit=flat.spec.module):
                    flat.states = self._zeroed(flat, self.arrays(flat))

    def arrays(self, flat: Flat, part: Slice | None = None) -> list[StateArray]:
        """Return the states of a slice of a trained buffer, the local one by default, without the master."""
        part = flat.own if part is None else part
        rounding = [] if self.rounding is None else self.rounding.arrays(part.size, flat.spec.padding(part))
        return [*self.optimizer.arrays(flat.spec, part, self.stored(flat)), *rounding]

    def stored(self, flat: Flat) -> DType:
        """Return the states' format: fp32 beside masters, the weights' own format without."""
        return compute_dtype(flat.value_dtype) if self.rounding is None else flat.value_dtype

    def groups(self, flats: Sequence[Flat]) -> Iterator[list[Flat]]:
        """Yield the flats that are stepped together: the flat that fills a group ends it (DeepSpeed edaa722,
        _create_fp16_sub_groups)."""
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

    def update(self, flat: Flat, grad_scale: float, add: Add = alone) -> None:
        """Move the local slice of one flat by one step; `grad_scale` is `decide`'s. `add`: see `Optimizer.step`."""
        if flat.held.is_idle and self.optimizer.cut != "sums":  # sums are exchanged by all ranks
            return
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
        """Return whether an estimate of curvature follows the last decided step (`EstimatesCurvature`)."""
        return self.control.is_due(estimates_every(self.optimizer))

    def estimate(self, flat: Flat, grad_scale: float) -> None:
        """Update the optimizer's estimate for the local slice of one flat, from the gradient on drawn labels."""
        if flat.grad_shard is not None and not flat.held.is_idle and isinstance(self.optimizer, EstimatesCurvature):
            self.optimizer.estimate(flat, grad_scale)

    def _zeroed(self, flat: Flat, arrays: Sequence[StateArray]) -> dict[str, Buffer]:
        device, memory, kind = flat.device, flat.held.memory("optim"), Kind.OPTIM
        with device.at(memory):
            states = {
                a.name: device.alloc((a.numel,), a.dtype, kind, padding=a.padding, name=a.name, paged=a.paged)
                for a in arrays
            }
            for state in states.values() if memory != NVME else ():  # a new file is all zeros
                device.kernel(0, device.backend.fill, state.array, 0.0)
        return states
