"""Save a step, on each rank: copy to the host, write, and let the first rank complete the step.

    sharded     each rank copies one run after the other to the host and writes it: the host holds one run at a time
    gathered    states are all-gathered flat by flat; the first rank of each group copies them to the host, until it has
                all of them, and writes them (FSDP's FULL_STATE_DICT). The others write nothing
    async       each rank copies all of its runs to the host and goes on. They are written beside the next steps, and
                the host holds them until the next save, or the end

Every copy is recorded: from the device to the host, and from there to the node's drives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from zerosim.comm.collectives import Comm
from zerosim.config.parts.saving import ASYNC, GATHERED, SHARDED
from zerosim.config.safetensors import Planned, write_tensors
from zerosim.device.copies import copy_to_host, launch_copy
from zerosim.device.device import Buffer, Kind, Phase
from zerosim.device.events import CPU, Copy, Wait
from zerosim.models.model import Model
from zerosim.parallel.base import Strategy
from zerosim.parallel.stage import Stage
from zerosim.placement.memories import DEVICE, HOST, NVME
from zerosim.state.checkpoint import Checkpoint
from zerosim.state.folder import StateFolder, failing_as_output, leave_entries, write_json
from zerosim.state.gathered import gathered
from zerosim.state.manifest import Manifest
from zerosim.state.resume import biases, numbers_of, restore
from zerosim.state.runs import CHECKPOINT, Source, own_numbers, to_json, written
from zerosim.tensor.flat import in_turn

AFTER_SAVE = "after_save"
"""The mark at the end of a save."""
STORED = {"fp64": "F64", "fp32": "F32", "bf16": "BF16", "fp16": "F16", "uint8": "U8", "int32": "I32", "int64": "I64"}


class Saving(NamedTuple):
    """How a run saves. `due`: whether it saves after so many steps; `config`: its given options; without a `folder`
    everything is recorded and nothing written."""

    how: str
    due: Callable[[int], bool]
    config: Mapping[str, Any] = MappingProxyType({})
    folder: StateFolder | None = None


class Checkpoints(NamedTuple):
    """The saved step that a run goes on from, and how it saves; None: from the start, and never."""

    start: Checkpoint | None = None
    saving: Saving = Saving("", lambda done: False)

    @property
    def first(self) -> int:
        """The step to begin with."""
        return 0 if self.start is None else self.start.step

    def begin(self, world: Comm, strategy: Strategy, model: Model) -> Saver:
        """Fill a rank's optimizer states and all else that it goes on with, and return what saves its steps."""
        if self.start is not None:
            restore(self.start, strategy, model)
        return Saver(self.saving, world, strategy, model)


NONE = Checkpoints()


class Saver:
    """Saves this rank's part of each step that is due. `world`: all ranks."""

    def __init__(self, asked: Saving, world: Comm, strategy: Strategy, model: Model) -> None:
        self.asked, self.world, self.strategy, self.model = asked, world, strategy, model
        self.device = strategy.device
        self._beside: list[tuple[Buffer, int]] = []  # runs that are written beside later steps

    def after(self, done: int) -> None:
        """Save after so many steps, if that is due. Raises: OutputError if the drive fails."""
        if not self.asked.due(done):
            return
        with self.device.scope(step=done - 1, phase=Phase.SAVE):
            self.settle()
            sources = self._sources()
            if self.asked.how == ASYNC:
                sources = [source._replace(buffer=self._staged(source.buffer)) for source in sources]
            self._write(done, sources)
            self.world.barrier()
            if self.asked.folder is not None and self.device.rank == 0:
                numbers = numbers_of(self.strategy)
                self.asked.folder.complete(done, Manifest(done, self.world.size, self.asked.config, numbers, ()))
            self.device.mark(AFTER_SAVE)

    def settle(self) -> None:
        """Wait until everything that is written beside the steps is on the drives."""
        with self.device.scope(phase=Phase.SAVE):
            for work in [work for _, work in self._beside]:  # keeps no buffer beyond the phase
                self.device.recorder.add(Wait(self.device.where, work, CPU))
            self._beside.clear()

    def _sources(self) -> Iterable[Source]:
        rank = self.device.rank
        found = gathered(self.strategy) if self.asked.how == GATHERED else written(self.strategy, rank)
        yield from found
        if isinstance(self.strategy, Stage):
            yield from own_numbers(self.strategy, rank)
        yield from biases(self.model, self.strategy.layout.mesh, self.device)

    def _write(self, done: int, sources: Iterable[Source]) -> None:
        folder, rank = self.asked.folder, self.device.rank
        if folder is None:
            for source in sources if self.asked.how == SHARDED else self._in_turn(list(sources)):
                self._values(source)
            return
        place, found = folder.writing(done), list(sources)
        if not found:
            return
        name = place / f"rank-{rank:05}.safetensors"
        with failing_as_output(folder.path):
            with name.open("wb") as file:
                write_tensors(file, self._planned(found))
                file.flush()
                os.fsync(file.fileno())
            index = name.with_suffix(".json")
            write_json(index, [to_json(source.run) for source in found])
            leave_entries(place, rank, name, index)

    def _in_turn(self, sources: list[Source]) -> Iterator[Source]:
        """Yield what was collected flat by flat, each in its turn, then the rest."""
        by_flat: dict[str, list[Source]] = {}
        for source in sources:
            by_flat.setdefault(source.flat, []).append(source)
        for flat in in_turn(self.strategy.flats):
            yield from by_flat.pop(flat.name, ())
        self.device.turn("")
        for rest in by_flat.values():
            yield from rest

    def _planned(self, sources: list[Source]) -> Iterator[Planned]:
        for source in sources:
            dtype = STORED[source.buffer.dtype.name]
            yield Planned(source.run.name, dtype, (source.run.numel,), partial(self._values, source))

    def _values(self, source: Source) -> Any:
        """Return a run's numbers on the host, which goes to the drives now or, where it is written beside later steps,
        then."""
        import numpy as np

        host = source.buffer if self.asked.how == ASYNC else self._staged(source.buffer)
        work = self.device.next_id() if self.asked.how == ASYNC else None
        self.device.recorder.add(Copy(self.device.where, HOST, NVME, host.nbytes, CHECKPOINT, work, CPU))
        if work is not None:
            self._beside.append((host, work))
        return None if self.asked.folder is None else np.asarray(host.array)

    def _staged(self, buffer: Buffer) -> Buffer:
        """Return a buffer's copy on the host; the buffer itself if it is there already and written at once."""
        if buffer.memory == DEVICE:
            return copy_to_host(buffer, Kind.TEMP, CHECKPOINT)
        if buffer.memory == HOST and self.asked.how != ASYNC:
            return buffer
        host = self.device.alloc(buffer.shape, buffer.dtype, Kind.TEMP, memory=HOST)
        launch_copy(buffer, host, after=CPU, purpose=CHECKPOINT).wait(CPU)
        return host
