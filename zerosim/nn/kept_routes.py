"""What the routers of recomputed blocks return, kept from forward to backward: logits, weights and chosen experts.

    kept of M tokens   M E logits, and of each of k choices a weight and the expert's number, M k (4 or 2, and 8 bytes)
    run again          all else of the block: dispatch with the exchange of counts, the experts, combine

The second forward of a block repeats the first one's decision, even where a kernel of the router adds in another order
and scores nearly tie. A token that changes its expert changes how many rows a rank receives: PyTorch's checkpoints then
raise a CheckpointError. Here no kernel is so, and the bits are the same without it.

Source: NVIDIA-NeMo/Automodel, components/moe/parallelizer.py, apply_ac (ignore_router_for_ac: the selective checkpoint
saves the router's projection and its top-k); torchtitan pull 3146 (aten.topk saved by selective checkpoints).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zerosim.device.device import Device, Kind
from zerosim.functional.router import Known
from zerosim.tensor.tensor import record_saved


class KeptRoutes:
    """A rank's, by router and microbatch. Each is taken once."""

    def __init__(self) -> None:
        self._keeps = False
        self._kept: dict[tuple[str, int], Known] = {}

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what routers return inside: a recomputed block's first forward."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False

    def keep(self, name: str, device: Device, route: Known) -> None:
        """Keep what a router returned, if its block runs again."""
        if self._keeps:
            self._kept[name, device.where.slot] = route
            for buffer in route:
                device.retag(buffer, Kind.KEPT)
            record_saved(device, "router", route._asdict())

    def take(self, name: str, device: Device) -> Known | None:
        """Return what a router returned in this microbatch's first forward; None: this is the first, or the only."""
        return self._kept.pop((name, device.where.slot), None)

    def forget(self) -> None:
        """Drop what no backward will use."""
        self._kept.clear()
