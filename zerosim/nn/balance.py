"""What a rank's routers have from step to step: how often their experts were chosen, and biases that even this out.

The biases of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2; without a loss, 2408.15664): they are added to the scores by
which experts are chosen, not to those that weigh them, and no gradient reaches them. Once a step each moves by a fixed
rate, up if fewer tokens than the mean chose its expert, else down. They are buffers, not parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import fp32
from zerosim.placement.spec import unit_of


class Noted(Protocol):
    """What the own tokens chose of each expert, and how many choices were dropped."""

    @property
    def chosen(self) -> tuple[int, ...]: ...
    @property
    def dropped(self) -> int: ...


class Routed(NamedTuple):
    """Tokens' choices of experts in a run: how many were dropped, and by block how often each expert was chosen."""

    dropped: int
    chosen: Mapping[str, tuple[int, ...]]

    @property
    def choices(self) -> int:
        """How many there were."""
        return sum(map(sum, self.chosen.values()))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"choices": self.choices, **self._asdict()}


NOTHING_ROUTED = Routed(0, {})


def routed_by(parts: Iterable[Routed]) -> Routed:
    """Return the choices of all ranks together."""
    dropped, chosen = 0, dict[str, tuple[int, ...]]()
    for part in parts:
        dropped += part.dropped
        for name, own in part.chosen.items():
            chosen[name] = tuple(map(sum, zip(chosen[name], own, strict=True))) if name in chosen else own
    return Routed(dropped, chosen)


class Balance:
    """The loads and biases, by the biases' name. `rate`: of the biases; `micro_batches`: of a step."""

    def __init__(self, rate: float, micro_batches: int) -> None:
        self.rate, self.micro_batches = rate, micro_batches
        self.scale: Callable[[], float] = lambda: 1.0  # of the loss, which the rank's updater decides
        self.loads = dict[str, list[int]]()
        self.biases = dict[str, list[float]]()
        self.dropped, self.chosen = 0, dict[str, list[int]]()  # of all steps

    def join(self, name: str, experts: int, *, biased: bool) -> None:
        """Add a layer's router. `biased`: it has biases."""
        self.loads[name] = [0] * experts
        self.chosen[unit_of(name)] = [0] * experts
        if biased:
            self.biases.setdefault(name, [0.0] * experts)

    def bias(self, name: str, device: Device) -> Buffer | None:
        """Return a layer's biases on the device; None if it has none."""
        if name not in self.biases:
            return None
        buffer = device.alloc((len(self.biases[name]),), fp32, Kind.TEMP)
        device.backend.from_host(self.biases[name], buffer.array)
        return buffer

    def note(self, name: str, way: Noted) -> None:
        """Count a microbatch's choices."""
        for loads, own in ((self.loads, name), (self.chosen, unit_of(name))):
            loads[own] = [sum(both) for both in zip(loads[own], way.chosen, strict=True)]
        self.dropped += way.dropped

    @property
    def routed(self) -> Routed:
        """What the own tokens chose so far."""
        return Routed(self.dropped, {name: tuple(own) for name, own in self.chosen.items()})

    def factor(self, shares: int) -> float:
        """Return the factor of a router's losses, of whose gradient each of so many ranks adds one share: the mean over
        a step's microbatches, as of the tokens' loss."""
        return self.scale() / (self.micro_batches * shares)

    def load(self, given: Mapping[str, Any]) -> None:
        """Take biases that are given by name."""
        self.biases |= {name: [float(one) for one in given[name]] for name in self.biases if name in given}

    def move(self, loads: dict[str, list[float]]) -> None:
        """End a step whose tokens chose experts so often, on all ranks together."""
        for name, bias in self.biases.items():
            own = loads[name]
            mean = sum(own) / len(own)
            steps = ((load < mean) - (load > mean) for load in own)
            self.biases[name] = [one + self.rate * step for one, step in zip(bias, steps, strict=True)]
        self.loads = {name: [0] * len(own) for name, own in self.loads.items()}
