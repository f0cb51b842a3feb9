"""Whether a configuration fits on a device: its bytes and, beside them, the device's memory outside of the program.

The peak was counted; memory outside is the preset's (`config/presets/outside.py`) or `--reserve`. The two are compared
with the device together, and the verdict shows both.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from zerosim.analysis.capabilities import notes_of
from zerosim.analysis.compare import peak_rank
from zerosim.analysis.shares import is_mesh
from zerosim.config import RunConfig
from zerosim.config.parts.allocators import feels_limit, is_exact
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.hardware import Hardware
from zerosim.config.presets.kernel_tables import KernelTables
from zerosim.config.presets.outside import Outside
from zerosim.config.presets.recipes import USUAL
from zerosim.errors import OutOfMemory
from zerosim.placement.mesh import DATA
from zerosim.report.names import OPTIMIZERS, counted, listed
from zerosim.train.memory import RankMemory
from zerosim.train.result import RunResult
from zerosim.units import format_bytes, parse_bytes


class Limit(NamedTuple):
    """A device's memory: the device's name ('' if only its bytes are known), and its bytes.

    `device` gives its memory outside of a program; `kept`, if given, is the reserve in its place.
    """

    name: str
    nbytes: int
    device: Hardware | None = None
    kept: int | None = None

    @property
    def line(self) -> tuple[str, int]:
        """A picture's label and line: name and bytes."""
        return self.name, self.nbytes

    def outside(self, config: RunConfig) -> tuple[Outside, ...]:
        """Return the device's memory beside the program, line by line. For a flat model none: it exists for the papers'
        tables, which count all of a device for model states."""
        if self.device is None or config.model.family == "flat":
            return ()
        is_tied = config.model.has_blocks and config.model.tie_embeddings
        return self.device.outside(config.mesh.axes, is_tied=is_tied)

    def reserve(self, config: RunConfig) -> int:
        """Return the reserved bytes."""
        return sum(one.nbytes for one in self.outside(config)) if self.kept is None else self.kept

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.nbytes}


class Planned(NamedTuple):
    """A plan, and its allocator's refusal, if any: then the figures are those of exact bytes."""

    result: RunResult
    refusal: OutOfMemory | None = None

    @property
    def fullest(self) -> RankMemory:
        """The rank that takes most from its device."""
        return max(self.result.memory, key=lambda memory: memory.reserved_bytes)

    def fits(self, limit: Limit | None) -> bool:
        return self.refusal is None and (limit is None or fits(self.result, limit))

    def total_bytes(self, limit: Limit | None) -> int:
        """Return the bytes compared with the device: the fullest rank's, at least, and the reserve."""
        error, taken = self.refusal, self.fullest.reserved_bytes
        if error is not None:
            needed = sum(error.live.values()) + error.requested
            taken = needed if error.room is None else max(taken, error.room.needed_bytes)
        return taken + (0 if limit is None else limit.reserve(self.result.config))


def peak_bytes(result: RunResult) -> int:
    """Return the highest peak over ranks."""
    return result.memory[peak_rank(result)].peak.total_bytes


def save_peak(result: RunResult) -> int:
    """Return the fullest device's bytes while a planned save gathers states; 0 if none does."""
    return 0 if result.save is None else result.save.device_peak


def fits(result: RunResult, limit: Limit) -> bool:
    """Return whether the peak and the reserve are at most the device's bytes, during a planned save too."""
    return max(peak_bytes(result), save_peak(result)) + limit.reserve(result.config) <= limit.nbytes


def is_saves_fault(result: RunResult, limit: Limit) -> bool:
    """Return whether the step fits, and its save does not."""
    return not fits(result, limit) and peak_bytes(result) + limit.reserve(result.config) <= limit.nbytes


def verdict(config: RunConfig, limit: Limit, taken: int) -> str:
    """Return whether `taken` bytes and the reserve fit, and by how much: the first words of a page."""
    reserve = limit.reserve(config)
    need, room = format_bytes(taken + reserve), limit.nbytes - taken - reserve
    takes = "peak"
    if not is_exact(config.memory):  # a refused run did not go on
        takes = "the allocator takes" if room >= 0 else "the allocator needs at least"
    elif feels_limit(config.memory) and room < 0:
        takes = "needs at least"
    what = f"{takes} {need}"
    if reserve:
        of = " for CUDA" if limit.kept is None else ""
        what = f"{takes} {alike(taken, need)} + {alike(reserve, need)} reserved{of} = {alike(taken + reserve, need)}"
    answer, left = ("Fits", "free") if room >= 0 else ("Does not fit", "short")
    return f"{answer}: {what}, on {device_text(limit)} ({format_bytes(abs(room))} {left})."


def alike(value: int, other: str) -> str:
    """Return a size in the unit and with the decimals of another one: 418 MB beside '67.4 GB' is '0.4 GB'."""
    number, unit = other.split()
    digits = max(len(number.partition(".")[2]), int(unit != "B"))
    text = f"{value / parse_bytes(f'1{unit}'):.{digits}f}"
    return f"{text} {unit}" if float(text) else format_bytes(value)


def device_text(limit: Limit) -> str:
    """Return 'a 32 GB V100', 'an 85 GB A100', 'a 20 GB device'."""
    size = re.sub(r"\.0+ ", " ", format_bytes(limit.nbytes))
    name = limit.name or "device"
    if limit.name and limit.device is not None and limit.device.held is not None:  # 'v100-32' says the memory again
        name = next(
            (part for part in reversed(name.upper().split("-")) if re.fullmatch(r"[A-Z]{1,4}\d+[A-Z]?", part)), name
        )
    an = "an" if re.match(r"8|1[18]\b", size) else "a"
    return f"{an} {size} {name}"


def taken_column(config: RunConfig) -> str:
    """Return the heading for the bytes by which a configuration is judged."""
    return "peak, bytes" if is_exact(config.memory) else "reserved, bytes"


def assumed(config: RunConfig, limit: Limit | None, cluster: Cluster | None = None) -> str:
    """Return the assumptions of the verdict and the clock, and what they leave out."""
    data, reserve = config.data, 0 if limit is None else limit.reserve(config)
    cp, each = config.mesh.cp, "data rank" if is_mesh(config) else "rank"
    names = (f"group of {cp} ranks", f"groups of {cp} ranks") if cp > 1 else (each,)
    ranks = counted(config.mesh.axes.size(*DATA), *names)
    rows = f"{counted(data.micro_batch, 'row')} of {config.model.row_tokens:,} tokens"
    batch = counted(data.accumulate, "microbatch", "microbatches")
    batch += f" ({data.accumulate / config.mesh.pp:.3g} for each stage)" if config.mesh.pp > 1 else ""
    batch += f" of {rows} on each of {ranks}".replace("each of 1 ", "one ")
    batch += f" that share them, {config.model.seq // cp:,} tokens of a row each" if cp > 1 else ""
    parts = [batch, config.precision.param_dtype, OPTIMIZERS[config.optim.optimizer]]
    if config.model.has_blocks:
        parts += [f"{config.memory.attention} attention{_why(config, limit, cluster)}"]
        parts += notes_of(config, "assumed")
    parts.append(f"recipe {config.parallel.recipe}")
    missing = []
    if reserve:
        parts.append(f"{format_bytes(reserve)} outside the program")
    elif limit is None or limit.device is None or limit.device.machine is None:
        flag = "--gpu NAME" if limit is None or limit.device is None else "--reserve SIZE"
        missing.append(f"CUDA and its libraries ({flag} adds them)")
    if is_exact(config.memory):
        missing.append("memory that an allocator leaves unused between buffers (--allocator caching adds it)")
    return f"Assumed: {', '.join(parts)}." + (f" Not counted: {listed(missing)}." if missing else "")


def _why(config: RunConfig, limit: Limit | None, cluster: Cluster | None) -> str:
    """Return whose kernel runs on a device without FlashAttention, and whose times replace a kernel's."""
    device, said = None if limit is None else limit.device, []
    if config.memory.attention != "flash":
        return ""
    if device is not None and device.flash is False:
        said.append(f"PyTorch's memory-efficient kernel on {device.name}")
    if cluster is not None and isinstance(tables := cluster.measured, KernelTables):
        asked = config.clock.flash_kernel
        if (taken := tables.flash_kernel(asked)) != asked:
            said.append(f"the table of {tables.gpu} has no {asked}: timed as {taken}")
    return f" ({', '.join(said)})" if said else ""


def usual_text(config: RunConfig) -> str:
    """Return which recipe was chosen because none was given; nothing if one was."""
    if config.given.get("recipe") != USUAL:
        return ""
    stage, cut = config.parallel.zero_stage, " with tp or pp" * (config.mesh.tp * config.mesh.pp > 1)
    if config.precision.is_pure:
        return f"Recipe {config.parallel.recipe} (none was given): without fp32 masters no framework's rules apply."
    return f"Recipe {config.parallel.recipe}, as people run stage {stage}{cut} (none was given)."
