"""New parameters that wait until the old ones have no reader (ZeRO-Offload's delayed parameter update).

If the local shard lies on the device, the new parameters wait on the host, and are copied when backward has left the
buffer. If it lies elsewhere they wait beside it, and then replace it.
"""

from __future__ import annotations

from zerosim.device.copies import Copying, launch_copy
from zerosim.device.device import Kind
from zerosim.device.events import CpuEvent, Wait
from zerosim.placement.memories import DEVICE, HOST
from zerosim.tensor.flat import Flat
from zerosim.tensor.offloaded import TO_DEVICE, store_params


class LateParams:
    """The local shard of one flat, as the CPU has just updated it."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        device, shard = flat.device, flat.shard()
        memory = HOST if shard.memory == DEVICE else shard.memory
        padding = flat.own_padding
        self.values = device.alloc(shard.shape, shard.dtype, Kind.PARAM, padding=padding, memory=memory)
        store_params(flat, self.values)
        self._stepped, self._copy = device.next_id(), list[Copying]()
        device.recorder.add(CpuEvent(device.where, self._stepped))

    def launch(self) -> None:
        """Copy the new parameters to the device after the CPU's update, once the step no longer reads the old ones."""
        device, shard = self.flat.device, self.flat.shard()
        if shard.memory == DEVICE and not self._copy:
            device.recorder.add(Wait(device.where, self._stepped, TO_DEVICE))
            self._copy.append(launch_copy(self.values, shard))

    def replace(self) -> None:
        """Make the new parameters the flat's."""
        self.launch()
        for copy in self._copy:
            copy.wait()
        if self.flat.shard().memory != DEVICE:
            self.flat.param_shard, self.flat.incoming = self.values, None
