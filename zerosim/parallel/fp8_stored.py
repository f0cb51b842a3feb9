"""Shards of maps whose weights are stored and sent as codes (`tensor/coded_flat.py`): after each update all ranks agree
on the weights' amax, 4 bytes each, and make the codes of their slices."""

from __future__ import annotations

from functools import partial

from zerosim.comm.groups import Groups
from zerosim.device.copies import CONTROL
from zerosim.device.device import Buffer
from zerosim.parallel.shards import HERE, Shards, Step
from zerosim.tensor.coded_flat import CodedFlat
from zerosim.tensor.flat import Flat


class CodedStep(Step):
    """An update whose new parameters are codes."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    def store(self, flat: Flat) -> None:
        if isinstance(flat, CodedFlat):
            flat.rescale(partial(self._share, flat))
        super().store(flat)

    def _share(self, flat: Flat, amax: Buffer) -> None:
        if not flat.held.rows["optim"].is_whole:
            self.groups(*flat.held.axes).all_reduce(amax, op="max", purpose=CONTROL)


def coded_shards(groups: Groups) -> Shards:
    """Return a rank's shards on the device, some of them codes."""
    return HERE._replace(step=CodedStep(groups))
