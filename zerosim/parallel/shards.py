"""A rank's local shards of the model states, between their uses: on the device. `offload.py` has them elsewhere.

gradients    stored when they are reduced, read by the norm
parameters   sent by each gather
step         updated by the device, when backward has ended
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from zerosim.device.device import Buffer, Kind
from zerosim.parallel.schedule import Use
from zerosim.placement.memories import DEVICE
from zerosim.tensor.flat import Flat


class Gradients:
    """Reduced gradients on the device. `place`: where their squares are added up."""

    place = DEVICE

    def keep(self, flat: Flat, grad: Buffer | None) -> None:
        """Store the local shard of a reduced gradient (None: there is none). A later microbatch's is added."""
        flat.add_grad_shard(grad)

    def keep_in_place(self, flat: Flat, own: Buffer | None) -> None:
        """Store the local shard of a gradient that is reduced in place, once a step."""
        flat.grad_shard = own

    def close_backward(self) -> None:
        """End a microbatch's backward."""

    def end_backward(self, flats: Sequence[Flat]) -> None:
        """End a step's backward. Every local shard is complete."""

    def grad(self, flat: Flat) -> Buffer | None:
        """Return the local shard in readable memory."""
        return flat.grad_shard


class Parameters:
    """Parameters on the device."""

    def is_away(self, flat: Flat) -> bool:
        """Return whether the local shard is in another memory."""
        return False

    def param(self, flat: Flat, kind: Kind) -> Buffer:
        """Return the local shard on the device, to be sent. If it is made now, it is a buffer of `kind`."""
        return flat.own_param(kind)

    def bring(self, flat: Flat, into: Buffer, by: str) -> None:
        """Copy or cast the local shard into its place in the whole buffer. `by`, a stream or compute, waits for the
        copy."""
        flat.cast_into(into)

    def fetch(self, flat: Flat) -> None:
        """Read the local shard into the host's memory, for a later gather."""

    def drop(self, flat: Flat) -> None:
        """Drop copies of the local shard: the whole is resident, or a new shard has replaced it."""


class Step:
    """An update on the device, when backward has ended. `place`: where it computes; `decides`: by the norm of all
    gradients."""

    place = DEVICE
    decides = True

    def tiles(self, groups: Iterable[list[Flat]]) -> Iterator[list[Flat]]:
        """Yield groups of flats that are updated together, each with its states at hand."""
        yield from groups

    def store(self, flat: Flat) -> None:
        """Round the updated master into the local shard of the parameters."""
        flat.store_param_shard()

    def left(self, flat: Flat) -> None:
        """Note that a flat's gradient has left the device. Backward no longer reads the flat's parameters."""

    def hold(self, flats: Sequence[Flat], scale: float | None) -> float | None:
        """Return the factor of the gradients for the update of this step; None: there is no update now."""
        return scale

    def begin(self, uses: Sequence[Use]) -> tuple[Sequence[Flat], float] | None:
        """Begin a step. Return the flats to update with gradients that were held back, and their factor."""
        return None

    def waiting(self, flat: Flat) -> Buffer | None:
        """Return a flat's gradient that is held back for a later update; None: there is none."""
        return None

    def renew(self, flats: Sequence[Flat], publish: Callable[[Flat], None]) -> None:
        """Replace parameters by new ones that wait, and `publish` them. Called when backward has ended."""


class Shards(NamedTuple):
    gradients: Gradients
    parameters: Parameters
    step: Step


HERE = Shards(Gradients(), Parameters(), Step())
"""All on the device."""
