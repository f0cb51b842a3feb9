"""What a run leaves behind: losses, ledgers, weights; and its JSON form.

The JSON is a contract for programs (`schema` 2): strict JSON, non-finite numbers as null, bytes as
integers, kinds in lower case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from zerosim.config import RunConfig
from zerosim.config.files import SCHEMA
from zerosim.device.events import Event
from zerosim.ledger.activations import SavedRow
from zerosim.ledger.allocator import AllocatorMark, AllocatorPeaks
from zerosim.ledger.clock import StepTime
from zerosim.ledger.memory import MARKS, Moment, Snapshot
from zerosim.ledger.pools import PoolRow
from zerosim.ledger.ranks import RankLedgers
from zerosim.ledger.traffic import TrafficRow
from zerosim.models.model import Model
from zerosim.optim.control import StepReport
from zerosim.placement.layout import Layout


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's live bytes at each mark, and at the peak; on a GPU also what its memory pool said at each mark; what
    its allocator held, at most and at each mark, unless it is exact.

    `host_peak_bytes`: the most that it held in the host's memory, which counts as none of the device's. `states`: bytes
    of the optimizer's states by name, the master among them, padding included. `moments`: the highest point of each
    moment, of a plan that is extended. `first_step_bytes`: the peak until the first step was over.
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

    def __repr__(self) -> str:
        marks = ", ".join(f"{name} {shot.total_bytes:,} B" for name, shot in self.marks.items())
        return f"RankMemory({marks}, peak {self.peak.total_bytes:,} B)"

    @property
    def reserved_bytes(self) -> int:
        """The most that was taken from the device: live bytes, unless an allocator takes more."""
        return self.peak.total_bytes if self.allocator is None else self.allocator.reserved_bytes

    def model_states(self, mark: str = "end_of_backward") -> dict[str, int]:
        """Bytes of param, grad and optim at a mark, padding included. Raises: KeyError for a mark that never came."""
        by_kind = self.marks[mark].by_kind
        return {kind: by_kind.get(kind, 0) for kind in ("param", "grad", "optim")}

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: bytes by kind at each mark, what the allocator held there, padding, the peak; the first step's
        where a later one took more."""
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
            **({"pool": [row.to_dict() for row in self.pool]} if self.pool else {}),
            **({} if held is None else {"allocator": {**held.to_dict(), "marks": self._allocated()}}),
        }

    def _allocated(self) -> dict[str, Any]:
        return {mark: self.allocator_marks[mark]._asdict() for mark in MARKS if mark in self.allocator_marks}


@dataclass(frozen=True, slots=True)
class GpuUse:
    """A GPU after the last step: bytes in use in all, and those outside the ranks' memory pools."""

    index: int
    name: str
    used_bytes: int
    outside_bytes: int


@dataclass(frozen=True, slots=True)
class UnitInfo:
    """One flat buffer: its weights' elements, and its owner under `--partition owner`."""

    name: str
    numel: int
    owner: int | None


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run, or a plan, leaves. Bytes are whole numbers, padding included; `to_dict()` is its JSON.

    num_parameters     Psi: a tied table once, padding not; `tied_numel` are that table's elements
    losses             [step][data rank], means over its tokens, in nats; `mean_losses` is over data ranks
    steps              what each step decided: norm, loss scale, learning rate, whether it was skipped
    memory, traffic    by rank: live bytes at each mark and at the peak; bytes sent and received, a row an operation
    weights            full host arrays by name, the fp32 masters where there are any
    sample             what the model continued `config.data.sample` with, None where there was none
    live_bytes_after   by rank, host's included, when its program had ended: 0 unless something leaks
    events             by rank the whole record, empty unless `keep_events` was given
    saved, saved_again rank 0's activations by unit and op, kept by forward and by recompute (`ledger/activations.py`)
    gpus               GPUs and what was in use on them, with backend cuda on threads
    lost_updates       by step, the share of the weights that an update left as they were, where there are no masters
    time               of a plan on a cluster: how long its first step takes there (`ledger/clock.py`)
    extended_from      of a plan: how many micro-batches were run, twice, all figures extended from them

    On shapes alone there are no losses, norms and weights. Of ranks that cannot differ one was run then:
    `stands_for` names it for each rank, and their entries are the same objects.
    """

    config: RunConfig
    layout: Layout
    num_parameters: int
    tied_numel: int
    losses: list[list[float]]
    steps: list[StepReport]
    memory: list[RankMemory]
    traffic: list[list[TrafficRow]]
    weights: dict[str, Any]
    sample: bytes | None
    live_bytes_after: list[int]
    events: list[list[Event]]
    stands_for: list[int]
    saved: dict[str, tuple[SavedRow, ...]]
    saved_again: dict[str, tuple[SavedRow, ...]]
    gpus: tuple[GpuUse, ...] = ()
    extended_from: tuple[int, int] | None = None
    time: StepTime | None = None
    lost_updates: Sequence[Fraction] = ()

    @property
    def units(self) -> tuple[UnitInfo, ...]:
        """The flat buffers, and who owns each under `--partition owner`."""
        layout = self.layout
        return tuple(UnitInfo(name, flat.num_parameters, layout.owner(name)) for name, flat in layout.flats.items())

    @property
    def ran(self) -> list[int]:
        """The ranks that were run."""
        return sorted(set(self.stands_for))

    @property
    def mean_losses(self) -> list[float]:
        """The mean over data ranks, by step."""
        return [math.fsum(row) / len(row) for row in self.losses]

    def sent_bytes(self, rank: int, step: int, purpose: str = "states") -> int:
        """What one rank put on the wire in one step; with native collectives, which do not tell, what a ring would."""
        rows = self.traffic[rank]
        return sum(row.wire_bytes for row in rows if row.step == step and row.purpose == purpose)

    @property
    def is_modelled(self) -> bool:
        """Whether what was sent is a ring's figure, because native collectives do not tell."""
        return any(row.modelled_bytes is not None for rank in self.ran for row in self.traffic[rank])

    def __repr__(self) -> str:
        config, loss = self.config, f", loss {self.mean_losses[-1]:.4f}" if self.losses else ""
        peak = max(memory.peak.total_bytes for memory in self.memory)
        return (
            f"RunResult({config.model.name}, stage {config.parallel.zero_stage}, {config.mesh.ranks} ranks, "
            f"{self.num_parameters:,} parameters, {len(self.steps)} steps{loss}, peak {peak:,} B)"
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, schema 2."""
        mesh = self.layout.mesh
        return {
            "schema": SCHEMA,
            "config": self.config.to_dict(),
            "set_aside": dict(self.config.set_aside),
            "mesh": dict(mesh.sizes),
            "num_parameters": self.num_parameters,
            "losses": [_finite(loss) for loss in self.mean_losses],
            "losses_by_data_rank": [[_finite(loss) for loss in row] for row in self.losses],
            "grad_norm": [_finite(step.grad_norm) for step in self.steps],
            "loss_scale": [_finite(step.loss_scale) for step in self.steps],
            "skipped": [step.skipped for step in self.steps],
            "lost_updates": [float(share) for share in self.lost_updates],
            "ranks": [self._rank_dict(rank) for rank in self.ran],
        }

    def _rank_dict(self, rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "coordinates": dict(self.layout.mesh.coordinates(rank)),
            "memory": self.memory[rank].to_dict(),
            "traffic": _rows(self.traffic[rank]),
        }


def collect(
    config: RunConfig,
    model: Model,
    layout: Layout,
    ledgers: Mapping[int, RankLedgers],
    stands_for: Sequence[int],
    reports: list[StepReport],
    *,
    losses: list[list[float]] | None = None,
    weights: dict[str, Any] | None = None,
    sample: bytes | None = None,
    keep_events: bool = False,
    gpus: tuple[GpuUse, ...] = (),
    lost_updates: Sequence[Fraction] = (),
) -> RunResult:
    """A result of what was counted on the ranks that ran, each for those that it stands for."""
    memory = {}
    for rank, one in ledgers.items():
        held = None if one.allocator is None else one.allocator.peaks
        memory[rank] = RankMemory(
            dict(one.memory.marks),
            one.memory.peak,
            tuple(one.pool.rows),
            held,
            one.memory.host_peak_bytes,
            dict(one.memory.states),
            dict(one.memory.moments),
            {} if one.allocator is None else dict(one.allocator.marks),
            one.memory.first_step_bytes,
        )
    traffic = {rank: one.traffic.rows() for rank, one in ledgers.items()}
    activations = ledgers[0].activations
    assert activations is not None
    return RunResult(
        config=config,
        layout=layout,
        num_parameters=model.num_parameters,
        tied_numel=model.tied_numel,
        losses=losses or [],
        steps=reports,
        memory=[memory[rank] for rank in stands_for],
        traffic=[traffic[rank] for rank in stands_for],
        weights=weights or {},
        sample=sample,
        live_bytes_after=[ledgers[rank].memory.live_bytes + ledgers[rank].memory.host_bytes for rank in stands_for],
        events=[ledgers[rank].events for rank in stands_for] if keep_events else [],
        stands_for=list(stands_for),
        saved=activations.saved(),
        saved_again=activations.saved_again(),
        gpus=gpus,
        lost_updates=lost_updates,
    )


def _rows(rows: Sequence[TrafficRow]) -> list[dict[str, Any]]:
    return [row._asdict() for row in rows]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
