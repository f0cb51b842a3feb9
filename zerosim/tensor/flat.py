"""A unit's parameters in one flat buffer, as one rank holds it: the whole or the local slice, and optimizer states.

ZeRO paper, section 5: ZeRO partitions a flat buffer into slices. Where each weight lies: `placement/spec.py`; who owns
which part: `placement/layout.py`; its gradients: `accumulation.py`; which of the buffers exist at which moment: the
strategies (`parallel/`).
"""

from __future__ import annotations

from typing import Any

from zerosim.device.copies import put, write
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import DType, fp32
from zerosim.placement.formats import Format
from zerosim.placement.memories import DEVICE, NVME
from zerosim.placement.partition import Slice as Slice
from zerosim.placement.partition import nothing as nothing
from zerosim.placement.partition import slice_of as slice_of
from zerosim.placement.partition import slice_size as slice_size
from zerosim.placement.partition import whole as whole
from zerosim.placement.rows import Row
from zerosim.placement.spec import WeightSpec, unit_of
from zerosim.placement.split import Splits, Tile
from zerosim.tensor.accumulation import GradAccumulator
from zerosim.tensor.stored import beside, decoded, encoded
from zerosim.tensor.tensor import Parameter
from zerosim.tensor.turns import in_turn as in_turn


class Flat(GradAccumulator):
    """One flat buffer of parameters as one rank holds it.

    param        the whole, while resident: PARAM if every rank stores it, UNSHARDED_PARAM if it is gathered for use
    scales       of codes, where they are whole on every rank and the codes are not
    param_shard  the local slice: a window of `param`, or (ZeRO-3) a buffer; None if the master is cast at each use
    master       fp32 copy of the local slice, for half types; of frozen parameters, where they are cast at each use
    states       the optimizer's states of the local slice, by name
    kept         what maps of its weights keep from step to step

    Parameters point here; nothing here points back.
    """

    def __init__(
        self, name: str, device: Device, dtype: DType, grad_dtype: DType, module: str = "",
        format: Format | None = None, **how: Any,
    ) -> None:  # fmt: skip
        super().__init__(name, device, grad_dtype, module, **how)
        self.format, self.value_dtype = format, dtype  # of codes, None: there are none; of the values that ops read
        self.param: Buffer | None = None
        self.scales: Buffer | None = None
        self.param_shard: Buffer | None = None
        self.was_unsharded = False  # since the start: the whole buffer was on the device once, and is freed
        self.master: Buffer | None = None
        self.states, self.kept = dict[str, Buffer](), list[Any]()

    @property
    def dtype(self) -> DType:
        """The dtype of its buffers: of codes, if it has some."""
        return self.value_dtype if self.format is None else self.format.dtype

    def declare(
        self, name: str, shape: tuple[int, ...], *, splits: Splits = (), tile: Tile | None = None, **how: Any
    ) -> Parameter:
        """Append a parameter, without memory. `shape`: of the whole; `how`: other fields of its `WeightSpec`."""
        cuts = splits if tile is None else (*splits, tile.split)
        shape = cuts[-1].local_shape if cuts else shape
        form = None if self.format is None else self.format.of_map(shape[-1])
        declared: list[WeightSpec] = self._fields["weights"]
        declared.append(WeightSpec(name, shape, splits=splits, format=form, tile=tile, **how))
        vars(self).pop("spec", None)  # it is made when somebody reads it
        layer = name.rpartition(".")[0].rpartition(f"{unit_of(self._fields['module'] or self.name)}.")[2]
        return Parameter(self, len(declared) - 1, name, layer, shape)

    def place_params(self, row: Row) -> None:
        """Allocate the parameters before the first step: the whole, the local slice, or nothing. And their scales."""
        self.place_scales()
        if row.is_whole:
            self.param = self._alloc_param(Slice(0, self.padded_numel, self.numel))
            self.param_shard = self.own_window(self.param)
        elif row.lives != "use":
            self.param_shard = self._alloc_param(self.own, row.memory)
        elif not self.spec.is_trained:  # a trained one's master is allocated with its states
            self.master = self.device.alloc((self.own.size,), fp32, Kind.PARAM, padding=self.own_padding)
            self._zero(self.master.array)

    def place_scales(self) -> None:
        """Allocate scales that are apart from their codes."""
        if self.format is not None and self.format.apart:
            self.scales = self.device.alloc((self.spec.scale_bytes,), self.dtype, Kind.PARAM)

    def _alloc_param(self, part: Slice, memory: str = DEVICE) -> Buffer:
        param = self.device.alloc((part.size,), self.dtype, Kind.PARAM, padding=self.spec.padding(part), memory=memory)
        for start, stop in self.spec.gaps(part) if memory != NVME else ():  # a new file is all zeros
            with self.device.at(memory):
                self._zero(param[start:stop].array)
        return param

    def param_window(self, index: int) -> Buffer:
        if (param := self.param) is None:
            raise RuntimeError(
                f"rank {self.device.rank} uses {self.spec.weights[index].own_name} while {self.name} is sharded: "
                "all_gather it before use, and reshard only after its last use"
            )
        if self.format is None:
            return self.window(param, index)
        return decoded(param, self.spec, index, self.value_dtype, self.scales)

    def shard(self) -> Buffer:
        assert self.param_shard is not None, f"{self.name} has not been placed"
        return self.param_shard

    def whole_param(self) -> Buffer:
        assert self.param is not None, f"{self.name} is sharded"
        return self.param

    def unshard(self, full: Buffer) -> None:
        """Set the whole buffer: `full` has padded_numel elements (numel suffice)."""
        self.param = full
        self.was_unsharded = True

    def reshard(self) -> None:
        """Free the whole buffer; the local slice stays."""
        self.param = None

    def write(self, index: int, values: Any, *, exact_master: bool, coded: bool = False) -> None:
        """Store a parameter's values (host array) in this rank's part of it.

        The master is a copy of the rounded weight or, with `exact_master`, of the given value. `coded`: bytes already.
        """
        backend = self.device.backend
        if self.format is not None and not coded:
            values = encoded(backend, self.value_dtype, self.format, values)
        values = values.reshape(-1)
        if self.scales is not None:
            own = self.scales[beside(self.spec, index)]
            backend.from_host(values[: own.numel], own.array)
            values = values[own.numel :]
        if self.param is not None:
            backend.from_host(values, self.param[(at := self.spec.offsets[index]) : at + values.size].array)
        mine = self.spec.overlap(self.own, index)
        if mine is None:
            return
        values, here = values[mine.start : mine.stop], slice(mine.at, mine.at + mine.numel)
        # Without a stored shard the host rounds: an array that takes no memory of the device.
        stored = None if self.param_shard is None else self.param_shard[here]
        rounded = backend.empty(values.shape, self.dtype) if stored is None or stored.memory == NVME else stored.array
        backend.from_host(values, rounded)
        put(rounded, stored)
        if self.master is not None:
            (write if exact_master else put)(values if exact_master else rounded, self.master[here])

    def weights(self) -> Buffer:
        """Return the optimizer's target: the local slice of the master or, without one, of the parameters."""
        return self.shard() if self.master is None else self.master

    def store_param_shard(self) -> None:
        """Round the updated master into the local slice of the parameters, in the same memory. No traffic."""
        if self.master is not None and self.param_shard is not None:
            self.device.kernel(0, self.device.backend.copy, self.master.array, self.param_shard.array)

    def own_param(self, kind: Kind) -> Buffer:
        """Return the local slice of the parameters, to be sent. If there is none, cast it from the master into a buffer
        of `kind`."""
        if (stored := self.param_shard) is not None:
            if stored.storage.memory != DEVICE:
                raise RuntimeError(f"{self.name}: its local slice is in {stored.memory} memory; copy it to the device")
            return stored
        shard = self.device.alloc((self.own.size,), self.dtype, kind, padding=self.own_padding)
        self.cast_into(shard)
        return shard

    def cast_into(self, shard: Buffer) -> None:
        """Cast the local slice into an existing buffer."""
        assert self.master is not None, f"{self.name} has no master"
        self.device.kernel(0, self.device.backend.copy, self.master.array, shard.array)
