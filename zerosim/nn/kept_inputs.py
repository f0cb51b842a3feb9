"""Storage of a recomputed unit's input from forward to backward: ZeRO-R's Pa and Pa+cpu (1910.02054, 6.1).

b rows, s tokens, h width; t tensor-parallel ranks, which all have the same input. Elements of each input:

                        on the device    on the host    all-gathered over t    copied out, and back
    whole               bsh
    Pa                  bsh/t                           bsh
    whole, on host                       bsh                                   bsh
    Pa+cpu                               bsh/t          bsh                    bsh/t

Pa is DeepSpeed's partition_activations and Megatron-LM's --distribute-saved-activations; on host: DeepSpeed's
cpu_checkpointing. As in DeepSpeed (runtime/activation_checkpointing/checkpointing.py) the flat input is cut in t equal
parts, the own one is copied out of it, and is gathered from its place in the whole. Copies to the host run inline,
unless there is a stash window (`stash.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from zerosim.comm.collectives import Comm
from zerosim.device.device import Buffer, Kind
from zerosim.nn.stash import Stash
from zerosim.tensor.tensor import Tensor, record_saved

PURPOSE = "activations"

Restore = Callable[[], Buffer]
"""Returns the whole input, once. The stored part is freed with this function."""


class StoredInputs:
    """Keeps inputs whole or, with a tensor-parallel `comm`, this rank's part of each; on the device, or `on_host`.

    With a `window` copies to the host and back run beside compute.
    """

    def __init__(self, comm: Comm | None = None, *, on_host: bool = False, window: int = 0) -> None:
        self.comm = comm
        self.stash = Stash(window) if on_host else None

    def keep(self, x: Buffer) -> Restore:
        """Keep x, and say how it comes back."""
        device, shape, dtype = x.device, x.shape, x.dtype
        if self.comm is None and self.stash is None:
            device.retag(x, Kind.KEPT)
            self._record(x, "input")
            return lambda: x

        if self.stash is not None:
            bring_back = self.stash.put(x, self._part)
        else:
            part = self._part(x)
            own = device.alloc(part.shape, dtype, Kind.KEPT)
            device.kernel(0, device.backend.copy, part.array, own.array)
            self._record(own, "part of the input")

            def bring_back() -> Buffer:
                whole = device.alloc(shape, dtype, Kind.ACTIVATION)
                device.kernel(0, device.backend.copy, own.array, self._part(whole).array)
                return whole

        def again() -> Buffer:
            whole = bring_back()
            if self.comm is not None:
                self.comm.all_gather(self._part(whole), out=whole.reshape(-1), purpose=PURPOSE)
            return whole

        return again

    def forget(self) -> None:
        """Drop inputs that no backward will use."""
        if self.stash is not None:
            self.stash.forget()

    def _part(self, x: Buffer) -> Buffer:
        """This rank's elements of x, or all, as a flat window. A group of t divides the heads, and so the width."""
        flat = x.reshape(-1)
        if self.comm is None:
            return flat
        numel = flat.numel // self.comm.size
        return flat[self.comm.rank * numel : (self.comm.rank + 1) * numel]

    def _record(self, kept: Buffer, what: str) -> None:
        if kept.device.recorder.enabled:
            record_saved(kept.device, "recompute", {what: Tensor(kept)})
