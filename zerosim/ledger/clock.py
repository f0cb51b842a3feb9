"""The clock: the time of every kernel, copy and call of a step, on given hardware. A pure reader of ranks' records.

A device runs its kernels in order, on its compute stream. A collective queues in the stream of its mesh axis, a
message in the stream of its pair of ranks, and a copy in the stream of its direction. A
collective starts when its last member has launched it. A Wait holds compute until the work has ended. A collective's
own sums are part of it. Streams that share a NIC have fixed shares of it (`costs.py`).

Kernels on the host's CPU run in a separate stream beside the device, and wait for copies there. A copy
starts after the earlier work of the stream that launched it. A step ends when the device, the CPU and all copies have
ended.

A rank's host launches one kernel or call after the other, and does not wait for the device: it runs ahead if
kernels are long, and the device waits for it if they are short. At the end of the step it has read the loss.

Kernels that run while a collective is in flight share the device with it, and slow down by a share. The clock adds
that time when compute waits for the collective, not to each kernel.

Identical ranks are simulated once (`train/plan.py`): a member of a group behaves like its representative,
at the call of the same number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zerosim.errors import InputError
from zerosim.ledger.alike import alike
from zerosim.ledger.costs import Costs
from zerosim.ledger.entries import Entries
from zerosim.ledger.laps import Laps
from zerosim.ledger.rank_clock import Calls, Run
from zerosim.ledger.tracks import Track
from zerosim.placement.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Timeline:
    """The simulated ranks. `last` is the rank that ends last, which ends the step."""

    tracks: Mapping[int, Track]

    @property
    def last(self) -> Track:
        return max(self.tracks.values(), key=lambda track: (track.end, -track.rank))

    @property
    def seconds(self) -> float:
        return self.last.end


def simulate(
    paces: Mapping[int, Entries],
    stands_for: Sequence[int],
    mesh: Mesh,
    costs: Costs,
    *,
    keep_spans: bool = False,
) -> Timeline:
    """Simulate one step of these ranks (`entries.py`). `stands_for` gives each mesh rank's representative.

    Raises: InputError if a rank waits for a call that another rank never makes.
    """
    together = None if keep_spans else alike(paces, stands_for, mesh, costs)
    if together is None:
        runs: Mapping[int, Run] = {
            rank: Run(rank, paces[rank], mesh, costs, keep_spans) for rank in sorted(set(stands_for))
        }
    else:
        _go_on(together.leaders, [together.follows[rank] for rank in stands_for], costs)
        runs = together.follow()
    if (stuck := _go_on(runs, stands_for, costs)) is not None:
        raise InputError(f"rank {stuck.track.rank} waits for a call that another rank never makes")
    return Timeline({rank: run.track for rank, run in runs.items()})


def _go_on(runs: Mapping[int, Run], stands_for: Sequence[int], costs: Costs) -> Run | None:
    """Let all ranks go on as far as they may. Return one that did not end."""
    calls, waiting = Calls(runs, stands_for, costs), deque(runs.values())
    laps, stuck = Laps(runs, calls), 0
    while waiting:
        run = waiting.popleft()
        before = run.at
        run.go_on(calls)
        stuck = 0 if run.ended or run.at > before else stuck + 1
        if not run.ended:
            waiting.append(run)
        if stuck > len(waiting):
            if not laps.next():
                return run
            stuck = 0
    return None


class StepTime(NamedTuple):
    """The seconds of a step and their parts, on the rank that ends last.

    compute, slowed, bubble, host, copies, cpu and all of `exposed` (by mesh axis) add up to `seconds`: see `Track`.
    `kernels` counts compute's kernels. `hardware_flops` are those of all products on all ranks. `model_flops` count
    each forward product and its backward products (one if the weight is frozen), but no recomputed product.
    """

    rank: int
    seconds: float
    compute: float
    slowed: float
    exposed: Mapping[str, float]
    bubble: float
    host: float
    copies: float
    kernels: int
    hardware_flops: int
    model_flops: int
    cpu: float = 0.0


def step_time(timeline: Timeline, stands_for: Sequence[int]) -> StepTime:
    """Return the time of a step from its simulated ranks."""
    last, tracks = timeline.last, [timeline.tracks[rank] for rank in stands_for]
    return StepTime(
        last.rank,
        last.end,
        last.compute,
        last.slowed,
        dict(last.exposed),
        last.bubble,
        last.host,
        last.copies,
        last.kernels,
        sum(track.flops for track in tracks),
        sum(track.model_flops for track in tracks),
        last.cpu,
    )
