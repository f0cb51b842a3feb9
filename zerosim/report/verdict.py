"""Whether a plan fits on a device: its peak and, beside it, what the device holds outside of the program.

The peak was counted; what is outside is the preset's (`config/presets/outside.py`) or `--reserve`. The two are compared
with the device together, and are never one figure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Column

from zerosim.analysis.compare import peak_rank
from zerosim.analysis.formulas import STATES
from zerosim.config import RunConfig
from zerosim.config.presets.hardware import Hardware
from zerosim.config.presets.outside import Outside
from zerosim.ledger.memory import Snapshot
from zerosim.report.look import Adaptive, Grid, right, titled
from zerosim.report.names import counted, listed
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

_LOGITS = ("lm_head", "loss")  # the units that hold them and their gradients


class Limit(NamedTuple):
    """A device's memory: what the device is called ('' where only its bytes are known), and its bytes.

    `device` says what it holds outside of a program; `kept`, where it is given, is the reserve in its place.
    """

    name: str
    nbytes: int
    device: Hardware | None = None
    kept: int | None = None

    @property
    def line(self) -> tuple[str, int]:
        """What a picture draws: name and bytes."""
        return self.name, self.nbytes

    def outside(self, config: RunConfig) -> tuple[Outside, ...]:
        """What the device holds beside the program, line by line. None of a flat model: the papers' tables, which it is
        there for, count all of a device for model states."""
        if self.device is None or config.model.family == "flat":
            return ()
        return self.device.outside(config.mesh.axes)

    def reserve(self, config: RunConfig) -> int:
        """Bytes that are kept for it."""
        return sum(one.nbytes for one in self.outside(config)) if self.kept is None else self.kept

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.nbytes}


def peak_bytes(result: RunResult) -> int:
    """The highest peak over ranks."""
    return result.memory[peak_rank(result)].peak.total_bytes


def fits(result: RunResult, limit: Limit) -> bool:
    """Whether the peak and the reserve are at most what the device has."""
    return peak_bytes(result) + limit.reserve(result.config) <= limit.nbytes


def verdict(result: RunResult, limit: Limit) -> str:
    """Whether it fits and by how much."""
    peak, reserve = peak_bytes(result), limit.reserve(result.config)
    room = limit.nbytes - peak - reserve
    share = f"{100 * abs(room) / limit.nbytes:.3g} %"
    if result.config.memory.allocator != "exact":  # it was given what the reserve leaves, and has not refused
        reserved = max(memory.reserved_bytes for memory in result.memory)
        return f"It fits: the allocator takes {format_bytes(reserved)} of {format_bytes(limit.nbytes - reserve)}."
    if room >= 0:
        of = f"{format_bytes(peak)} of {format_bytes(limit.nbytes)}"
        kept = f" {format_bytes(reserve)} are kept for what is outside the program," if reserve else ""
        return f"It fits: the peak is {of},{kept} {format_bytes(room)} ({share}) are left."
    kept = f" and {format_bytes(reserve)} are kept for what is outside the program" if reserve else ""
    return (
        f"It does not fit: the peak is {format_bytes(peak)}{kept}, {format_bytes(-room)} ({share}) more than the "
        f"{format_bytes(limit.nbytes)}{f' of {limit.name}' if limit.name else ''}."
    )


def takes(config: RunConfig) -> str:
    """The subject and verb of the bytes by which a configuration is judged."""
    return "the peak is" if config.memory.allocator == "exact" else "the allocator takes"


def taken_column(config: RunConfig) -> str:
    """The heading of those bytes in a table."""
    return "peak, bytes" if config.memory.allocator == "exact" else "reserved, bytes"


def assumed(config: RunConfig, limit: Limit) -> str:
    """What the verdict takes for granted."""
    parts = [f"micro-batches of {counted(config.data.micro_batch, 'row')} of {config.model.seq:,} tokens"]
    if config.model.has_blocks:
        parts.append(f"{config.memory.attention} attention{_why(config, limit)}")
    reserve = limit.reserve(config)
    parts.append(f"{format_bytes(reserve)} outside the program" if reserve else "nothing outside the program")
    exact = " What an allocator leaves unused between buffers is not counted: see --allocator caching."
    return f"Assumed: {', '.join(parts)}.{exact if config.memory.allocator == 'exact' else ''}"


def _why(config: RunConfig, limit: Limit) -> str:
    """Which kernels a device has, where that is what decides."""
    device = limit.device
    if device is None or device.flash is not (config.memory.attention == "flash"):
        return ""
    return f" ({'' if device.flash else 'no '}flash kernels run on {device.name})"


def too_much(result: RunResult, limit: Limit) -> str:
    """Which part alone is more than the device has for the program; else which is the largest. Seen at the peak and at
    the marks."""
    memory, room = result.memory[peak_rank(result)], limit.nbytes - limit.reserve(result.config)
    held = [_parts(snapshot) for snapshot in (memory.peak, *memory.marks.values())]
    parts = {name: max(at[name] for at in held) for name in held[0]}
    alone = [(name, nbytes) for name, nbytes in parts.items() if nbytes > room]
    if not alone:
        name = max(parts, key=parts.__getitem__)
        return f"No part alone is more than the device has; the largest: {name}, {format_bytes(parts[name])}."
    return f"Alone more than the device has: {listed([f'{name} ({format_bytes(nbytes)})' for name, nbytes in alone])}."


def _parts(at: Snapshot) -> dict[str, int]:
    """What can be too much on its own, as it was held at one moment."""
    gathered: dict[str, int] = {}
    logits = activations = 0
    for (unit, kind), nbytes in at.by_unit.items():
        if kind in ("unsharded_param", "prefetched_param", "unsharded_grad"):
            gathered[unit] = gathered.get(unit, 0) + nbytes
        elif kind in ("activation", "activation_grad", "kept", "temp"):
            logits += nbytes if unit in _LOGITS else 0
            activations += nbytes if unit not in _LOGITS else 0
    return {
        "model states": sum(at.by_kind.get(kind, 0) for kind in STATES),
        "one gathered unit and its gradient": max(gathered.values(), default=0),
        "activations": activations,
        "logits and their gradients": logits,
        "buffers of collectives": at.by_kind.get("comm", 0),
    }


def outside_table(config: RunConfig, limit: Limit | None) -> RenderableType | None:
    """What the device holds beside the program, with sources; None where nothing is known."""
    lines = () if limit is None else limit.outside(config)
    if limit is None or not lines:
        return None
    grid = Grid("what", right("bytes"), Column("read in", overflow="fold"), Column("assumed", overflow="fold"))
    for one in lines:
        grid.add(one.name, one.nbytes, one.source, one.assumed)
    grid.rule()
    grid.add("total", sum(one.nbytes for one in lines), None, None, style="bold")
    note = "Not counted, and in no peak; --reserve SIZE is kept in its place."
    if limit.kept is not None:
        note = f"Not counted, and in no peak. --reserve: {format_bytes(limit.kept)} are kept in its place."
    less = grid.without("assumed")
    return titled("Outside the program", Adaptive(grid, less, less.without("read in")), note)
