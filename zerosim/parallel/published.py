"""When stages 1 and 2 gather new parameters. An update leaves each rank with its own slice of them only.

    Published     at once, flat by flat, in the optimizer step. Nothing computes meanwhile
    InForward     in the next step's forward. When the step begins, all gathers are launched in the order of use, in a
                  pipeline before the first input is received. A unit's forward waits for the unit's own flats. New
                  parameters arrive over the old ones, so the gathers in flight hold no memory

Under `InForward` all steps are alike: each begins with one gather. So does the first step, though no parameter has
changed, and a step after a skipped one. After the last step only text generation gathers. A result's weights are
assembled from the ranks' own slices.

Source: Megatron-LM d98e8a6, --overlap-param-gather: core/distributed/param_and_grad_buffer.py (start_param_sync,
finish_param_sync), distributed_data_parallel.py (forward pre-hooks). In an interleaved pipeline Megatron launches all
buckets of a chunk together (align_param_gather), as here. Without interleaving Megatron launches a bucket when the one
before it has arrived, so in a 1F1B pipeline each stage waits for it after it has received its input; here it does not.
Megatron's first step gathers nothing (disable_forward_pre_hook).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerosim.comm.group import Work
from zerosim.device.device import Buffer
from zerosim.nn import Unit
from zerosim.parallel.exchange import Slices
from zerosim.parallel.schedule import Timetable
from zerosim.tensor.flat import Flat, in_turn


class Published:
    """Gather new parameters in the optimizer step."""

    def __init__(self, exchange: Slices) -> None:
        self.exchange = exchange

    def place(self, flats: Sequence[Flat]) -> None:
        """Allocate memory that lives through the run."""

    def begin(self, timetable: Timetable) -> None:
        """Begin a step."""

    def open(self) -> None:
        """Begin a microbatch's forward. In a pipeline its input has not been received yet."""

    def open_backward(self) -> None:
        """Begin a microbatch's backward."""

    def publish(self, flat: Flat) -> None:
        """Bring a flat's new slices to every rank. Called after its update."""
        self.exchange.publish(flat)

    def wait(self, unit: Unit) -> None:
        """Wait for a unit's new parameters. Called before its forward."""


class InForward(Published):
    """Gather new parameters in the next step's forward; outside of steps, when a unit is used."""

    def __init__(self, exchange: Slices) -> None:
        super().__init__(exchange)
        self._stale: dict[Flat, Work[Buffer] | None] = {}  # with the gather in flight

    def begin(self, timetable: Timetable) -> None:
        self._stale = {flat: None for use in timetable.uses for flat in use.gathers if flat.spec.is_trained}

    def open(self) -> None:
        for flat, work in self._stale.items():
            self._stale[flat] = work or self._launch(flat)

    def publish(self, flat: Flat) -> None:
        self._stale[flat] = None

    def wait(self, unit: Unit) -> None:
        for flat in unit.flats:
            if flat in self._stale:
                work = self._stale.pop(flat) or self._launch(flat)
                work.wait()

    def _launch(self, flat: Flat) -> Work[Buffer]:
        with flat.device.scope(unit=flat.spec.module):
            return self.exchange.launch_publish(flat)


def regather(flats: Sequence[Flat], publish: Callable[[Flat], None]) -> None:
    """Gather the frozen flats that stay gathered for good, as after every step of DeepSpeed (0.19.8, stage3.py,
    _post_step: all persistent parameters, one by one)."""
    for flat in in_turn(flats):
        if not flat.spec.is_trained and flat.param is not None and not flat.held.rows["param"].is_whole:
            publish(flat)
