"""What a rank holds of its memories: at marks, at the peak, and at each moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from zerosim.ledger.allocator import AllocatorMark, AllocatorPeaks
from zerosim.ledger.memory import MARKS, Moment, Snapshot
from zerosim.ledger.pools import PoolRow
from zerosim.placement.memories import DEVICE, HOST


class OtherMemory(NamedTuple):
    """A rank's bytes in its node's host memory, or on its drives: at each mark, and at the peak; of a short plan also
    the highest point of each moment."""

    marks: Mapping[str, Snapshot]
    peak: Snapshot
    moments: Mapping[Moment, Snapshot] = MappingProxyType({})

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: bytes by kind at each mark and at the peak."""
        peak = {"bytes": self.peak.total_bytes, "by_kind": dict(self.peak.by_kind)}
        return {**{mark: dict(self.marks[mark].by_kind) for mark in MARKS if mark in self.marks}, "peak": peak}


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's live bytes at each mark, and at the peak; on a GPU also its memory pool's bytes at each mark; and
    its allocator's bytes, at the peak and at each mark, unless it is exact.

    `host_peak_bytes`: the peak of its bytes in the host's memory, which are not the device's. `states`: bytes
    of the optimizer's states by name, the master among them, padding included. `moments`: the highest point of each
    moment, of an extended plan. `first_step_bytes`: the peak until the end of the first step. `others`: in a run
    with offload, the rank's bytes in its node's host memory and on its drives.
    """

    marks: dict[str, Snapshot]
    peak: Snapshot
    pool: tuple[PoolRow, ...] = ()
    allocator: AllocatorPeaks | None = None
    host_peak_bytes: int = 0
    states: Mapping[str, int] = field(default_factory=dict)
    moments: Mapping[Moment, Snapshot] = field(default_factory=dict)
    allocator_marks: Mapping[str, AllocatorMark] = field(default_factory=dict)
    first_step_bytes: int = 0
    others: Mapping[str, OtherMemory] = field(default_factory=dict)

    def __repr__(self) -> str:
        marks = ", ".join(f"{name} {shot.total_bytes:,} B" for name, shot in self.marks.items())
        return f"RankMemory({marks}, peak {self.peak.total_bytes:,} B)"

    @property
    def reserved_bytes(self) -> int:
        """The peak of the device's bytes: live bytes, unless an allocator reserves more."""
        return self.peak.total_bytes if self.allocator is None else self.allocator.reserved_bytes

    def peak_bytes(self, memory: str) -> int:
        """Return the peak of live bytes in one of the rank's memories."""
        if memory == HOST:
            return self.host_peak_bytes
        peak = self.peak if memory == DEVICE else self.others[memory].peak if memory in self.others else None
        return 0 if peak is None else peak.total_bytes

    def everywhere(self, mark: str, kind: str) -> tuple[int, int]:
        """Return the bytes of a kind at a mark in all memories, and the padding among them."""
        shots = [self.marks[mark], *(other.marks[mark] for other in self.others.values() if mark in other.marks)]
        return sum(shot.by_kind.get(kind, 0) for shot in shots), sum(shot.padding.get(kind, 0) for shot in shots)

    def model_states(self, mark: str = "end_of_backward") -> dict[str, int]:
        """Return the bytes of param, grad and optim at a mark, padding included. Raises: KeyError for a mark that was
        never passed."""
        by_kind = self.marks[mark].by_kind
        return {kind: by_kind.get(kind, 0) for kind in ("param", "grad", "optim")}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: bytes by kind at each mark, the allocator's bytes, padding, and the peak; also the
        first step's peak if a later step needs more."""
        scope, held = self.peak.scope, self.allocator
        most = {} if held is None else {name: getattr(held, name) for name in ("allocated_bytes", "reserved_bytes")}
        return {
            **{mark: dict(self.marks[mark].by_kind) for mark in MARKS if mark in self.marks},
            "padding": dict(self.marks["end_of_backward"].padding),
            "states": dict(self.states),
            "peak": {
                "bytes": self.peak.total_bytes,
                **most,
                "step": scope.step,
                "phase": scope.phase,
                "unit": scope.unit,
                "by_kind": dict(self.peak.by_kind),
            },
            **({"first_step_bytes": self.first_step_bytes} if self.first_step_bytes < self.peak.total_bytes else {}),
            **({"host_peak_bytes": self.host_peak_bytes} if self.host_peak_bytes else {}),
            **{name: other.to_dict() for name, other in self.others.items()},
            **({"pool": [row.to_dict() for row in self.pool]} if self.pool else {}),
            **({} if held is None else {"allocator": {**held.to_dict(), "marks": self._allocated()}}),
        }

    def _allocated(self) -> dict[str, Any]:
        return {mark: self.allocator_marks[mark]._asdict() for mark in MARKS if mark in self.allocator_marks}
