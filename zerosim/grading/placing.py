"""The exercise on what to offload: every placement that fits is run under the clock, the answer among them.

A step on paper has two phases, in each of which everything overlaps (`given/exercises.toml` lists the copies).
`ledger/clock.py` times it: copies in their streams, compute on the device, the update there or on the CPU.
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

from zerosim.device.events import Copy, Scope
from zerosim.grading.asking import Wrong
from zerosim.grading.plain import shown
from zerosim.grading.waiting import OnPaper
from zerosim.ledger.clock import simulate
from zerosim.ledger.entries import Busy, Entry
from zerosim.placement.memories import DEVICE, HOST, MEMORIES, NVME
from zerosim.placement.mesh import Mesh

STATES = ("optimizer", "gradients", "parameters")
SIZES = (12, 2, 2)  # bytes a parameter
Placement = tuple[str, str, str]

PLACEMENTS: tuple[Placement, ...] = tuple(
    (optim, grad, param)
    for optim, grad, param in product(MEMORIES, (DEVICE, HOST), MEMORIES)
    if grad == DEVICE or optim != DEVICE
)

ON_PAPER = (
    # parameters, room of device and host, PCIe, NVMe, compute, update on the device and on the CPU
    (10, 200, 200, 10, 1, 4, 1, 6),  # all of it fits
    (10, 50, 200, 10, 1, 4, 1, 6),  # the optimizer must go
    (10, 25, 200, 10, 1, 4, 1, 6),  # gradients too
    (10, 15, 200, 10, 1, 9, 1, 6),  # and parameters, which come while the device computes
    (10, 40, 100, 10, 10, 4, 1, 6),  # the host is too small for the optimizer
    (10, 150, 200, 1, 1, 60, 1, 2),  # a slow link, and enough compute to hide it
    (10, 45, 200, 2, 1, 4, 1, 6),  # gradients cross later, while parameters come back
    (10, 140, 200, 2, 1, 15, 1, 12),  # parameters come twice
    (10, 200, 200, 100, 1, 2, 50, 6),  # the device's update is slow
    (10, 160, 140, 2, 3, 40, 5, 1),  # all of it fits, to the byte
    (10, 150, 120, 2, 5, 20, 1, 12),  # parameters alone must go, and come back after a fast update
    (10, 30, 160, 5, 5, 4, 10, 1),  # gradients cross while the device computes, parameters stay
    (10, 20, 130, 5, 3, 1, 30, 30),  # the host holds the optimizer alone: parameters come from slow drives
    (10, 140, 80, 1, 10, 1, 30, 50),  # the host is too small, and a slow update hides fast drives
    (10, 20, 120, 2, 10, 40, 5, 1),  # the optimizer fits the host, to the byte; parameters come over both links
    (10, 30, 130, 10, 5, 1, 50, 20),  # the optimizer on drives, or parameters?
    (10, 170, 140, 2, 3, 20, 50, 6),  # a slow update on the device: is the CPU's worth what it carries?
    (10, 150, 130, 1, 1, 1, 20, 50),  # parameters that cross twice, or a slow update on the CPU?
    (10, 20, 150, 5, 10, 20, 30, 2),  # all but the optimizer may go where it likes: which link is free?
    (10, 170, 30, 5, 1, 40, 5, 1),  # all of it fits, and copies hide behind compute and update
    (10, 200, 160, 2, 2, 20, 5, 2),  # all of it fits, and is faster on a host that it fills
)
"""Billions of parameters, GB, GB/s and seconds."""


class Paper(OnPaper):
    """Costs of a copy: its bytes divided by its link's bandwidth."""

    def __init__(self, links: dict[str, int]) -> None:
        self._links = links

    def copy(self, copy: Copy) -> float:
        return copy.nbytes / self._links["nvme" if NVME in (copy.source, copy.target) else "pcie"]


def held(psi: int, where: Placement) -> dict[str, int]:
    """Return the bytes that each memory holds."""
    found = dict.fromkeys(MEMORIES, 0)
    for memory, size in zip(where, SIZES, strict=True):
        found[memory] += size * psi
    return found


def seconds(
    psi: int, links: dict[str, int], compute: int, update: dict[str, int], where: Placement
) -> tuple[float, float]:
    """Return how long a step's two phases take, one after the other."""
    optim, grad, param = where
    place = DEVICE if optim == DEVICE else HOST
    trains = _moves(2 * psi, param, DEVICE) * 2 + (_moves(2 * psi, DEVICE, HOST) if grad == HOST else [])
    steps = _moves(2 * psi, place, param) + (_moves(2 * psi, DEVICE, HOST) if grad == DEVICE != place else [])
    if optim == NVME:
        steps += _moves(12 * psi, NVME, HOST) + _moves(12 * psi, HOST, NVME)
    return _phase(trains, compute, DEVICE, links), _phase(steps, update[place], place, links)


def _phase(moves: list[tuple[int, str, str]], busy: int, place: str, links: dict[str, int]) -> float:
    """Return the seconds of a phase under the clock: everything is launched at its beginning, and it ends with the
    last."""
    copies: list[Entry] = [
        Copy(Scope(0), source, target, nbytes, "offload", work) for work, (nbytes, source, target) in enumerate(moves)
    ]
    return simulate(
        {0: [*copies, Busy(Scope(0), "", float(busy), 0, 0, place=place)]}, [0], Mesh(), Paper(links)
    ).seconds


def _moves(nbytes: int, source: str, target: str) -> list[tuple[int, str, str]]:
    """Return the copies that bring bytes from one memory to another: between device and NVMe through the host."""
    if source == target:
        return []
    if {source, target} == {DEVICE, NVME}:
        return [(nbytes, source, HOST), (nbytes, HOST, target)]
    return [(nbytes, source, target)]


def questions(seed: int) -> list[tuple[Any, ...]]:
    draw, rows = random.Random(19 + seed), list[tuple[int, ...]](ON_PAPER)
    while len(rows) < len(ON_PAPER) + 16:
        psi = draw.choice((5, 10, 20))
        room = psi * draw.choice((3, 4, 5, 15, 17)), psi * draw.choice((3, 8, 15, 20))
        rows.append((psi, *room, *(draw.choice((1, 2, 5, 20, 50)) for _ in range(5))))
    return [_asked(*row) for row in rows]


def _asked(
    psi: int, device: int, host: int, pcie: int, nvme: int, compute: int, here: int, there: int
) -> tuple[Any, ...]:
    room, links = {DEVICE: device, HOST: host, NVME: 16 * psi}, {"pcie": pcie, "nvme": nvme}
    given = psi, room, links, compute, {DEVICE: here, HOST: there}
    return f"my_offload{given}", *given


def wrong(
    asked: str, psi: int, room: dict[str, int], links: dict[str, int], compute: int, update: dict[str, int], came: Any
) -> Wrong | None:
    """Return the error in an answer, compared with the best placement that fits."""
    if not isinstance(came, tuple | list) or tuple(came) not in PLACEMENTS:
        expected = "optimizer, gradients, parameters; the optimizer may be on the device only if gradients are"
        return f"{asked} is {shown(came)}, expected one of {len(PLACEMENTS)} placements: {expected}", _RULES
    chosen: Placement = tuple(came)
    if over := _over(psi, room, chosen):
        return f"{asked} is {shown(came)}, which does not fit: {over}", "add up what each memory holds: 12Ψ, 2Ψ, 2Ψ"
    fits = (where for where in PLACEMENTS if not _over(psi, room, where))
    times = {where: seconds(psi, links, compute, update, where) for where in fits}
    best = min(times, key=lambda where: sum(times[where]))
    mine, least = times[chosen], times[best]
    if sum(mine) <= sum(least) * (1 + 1e-9):  # the student's own sums may have chosen among equals
        return None
    words = f"{_summed(mine)}; {' '.join(best)} takes {_summed(least)}"
    return f"{asked} is {shown(came)}, a step of {words}", _FIRST if mine[0] > least[0] else _SECOND


def _summed(phases: tuple[float, float]) -> str:
    return f"{sum(phases):g} s ({phases[0]:g} + {phases[1]:g})"


_RULES = "follow the bytes of each link, each way, through the two phases: a phase takes as long as its slowest part"
_FIRST = f"{_RULES}. In phase 1 parameters come twice, over both links from drives, and gradients on the host go there"
_SECOND = (
    f"{_RULES}. In phase 2 gradients on the device go to the CPU, new parameters go to their memory, and states on "
    "drives come and go"
)


def _over(psi: int, room: dict[str, int], where: Placement) -> str:
    """Return the first memory that has too little room, in words; '' if everything fits."""
    needs = held(psi, where)
    return next((f"{needs[one]} GB on {one}, room for {room[one]}" for one in MEMORIES if needs[one] > room[one]), "")
