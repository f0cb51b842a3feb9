"""The result of a run: losses, ledgers, weights; and its JSON form.

The JSON is a contract for programs (`schema` 2): strict JSON, non-finite numbers as null, bytes as
integers, kinds in lower case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zerosim.config import RunConfig
from zerosim.config.files import SCHEMA
from zerosim.device.events import Event
from zerosim.ledger.activations import SavedRow
from zerosim.ledger.clock import StepTime
from zerosim.ledger.ranks import RankLedgers
from zerosim.ledger.traffic import TrafficRow
from zerosim.models.model import Model
from zerosim.nn.balance import NOTHING_ROUTED, Routed
from zerosim.optim.control import StepReport
from zerosim.placement.axes import coordinates
from zerosim.placement.layout import Layout
from zerosim.train.check_trained import counts_of
from zerosim.train.memory import OtherMemory, RankMemory
from zerosim.train.nodes import NodeMemory, nodes_of, nodes_values
from zerosim.train.offload import moves_states
from zerosim.train.saved import Saved


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
    """The result of a run or a plan. Bytes are whole numbers, padding included; `to_dict()` is its JSON.

    num_parameters     Psi: a tied table once, padding not; `tied_numel` are that table's elements
    losses             [step][data rank], means over its tokens, in nats; `mean_losses` is over data ranks
    steps              each step's decisions: norm, loss scale, learning rate, whether it was skipped
    memory, traffic    by rank: live bytes at each mark and at the peak; bytes sent and received, a row an operation
    weights            full host arrays by name, the fp32 masters if there are any
    sample             the model's continuation of `config.data.sample`, None without one
    live_bytes_after   by rank, the host's included, after its program ended: 0 unless something leaks
    events             by rank the whole record, empty unless `keep_events` was given
    saved, saved_again rank 0's activations by unit and op, kept by forward and by recompute (`ledger/activations.py`)
    gpus               GPUs and their bytes in use, with backend cuda on threads
    lost_updates       by step, the share of the weights that an update left unchanged, without masters
    stuck_moments      the same of Adam's second moments
    time               of a plan on a cluster: the time of a step there (`ledger/clock.py`; `delayed.timed_step`)
    extended_from      of a plan: the numbers of microbatches of the two runs from which all figures were extended
    node_ranks         how many neighbouring ranks share a node
    first_step         the first step of this run: others were done by the run that it goes on with
    save               of a plan: what a save after its last step takes, if one was asked for
    routed             choices of experts in a run, dropped ones, and by block how often each expert was chosen

    On shapes alone there are no losses, norms and weights, and one of each group of identical ranks ran:
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
    stuck_moments: Sequence[Fraction] = ()
    node_ranks: int = 1
    routed: Routed = NOTHING_ROUTED
    first_step: int = 0
    save: Saved | None = None

    @property
    def last_step(self) -> int:
        """The number of the last step."""
        return self.first_step + len(self.steps) - 1

    def report(self, step: int) -> StepReport | None:
        """Return a step's decisions; None for a step of an earlier run, or one that failed."""
        return self.steps[step - self.first_step] if self.first_step <= step <= self.last_step else None

    @property
    def units(self) -> tuple[UnitInfo, ...]:
        """The flat buffers, and their owners under `--partition owner`."""
        layout = self.layout
        return tuple(UnitInfo(name, flat.num_parameters, layout.owner(name)) for name, flat in layout.flats.items())

    @property
    def ran(self) -> list[int]:
        """The ranks that ran."""
        return sorted(set(self.stands_for))

    @property
    def nodes(self) -> list[NodeMemory]:
        """What each node's ranks held of its host memory and its drives, at the most and together."""
        return nodes_of(self.memory, self.node_ranks)

    @property
    def mean_losses(self) -> list[float]:
        """The mean loss over data ranks, by step."""
        return [math.fsum(row) / len(row) for row in self.losses]

    def sent_bytes(self, rank: int, step: int, purpose: str = "states") -> int:
        """Return the bytes that one rank sent in one step; with native collectives, which do not report them, those of
        a ring."""
        rows = self.traffic[rank]
        return sum(row.wire_bytes for row in rows if row.step == step and row.purpose == purpose and not row.saves)

    @property
    def is_modelled(self) -> bool:
        """Whether the sent bytes are a ring's figure, because native collectives do not report them."""
        return any(row.modelled_bytes is not None for rank in self.ran for row in self.traffic[rank])

    def __repr__(self) -> str:
        config, loss = self.config, f", loss {self.mean_losses[-1]:.4f}" if self.losses else ""
        peak = max(memory.peak.total_bytes for memory in self.memory)
        return (
            f"RunResult({config.model.name}, stage {config.parallel.zero_stage}, {config.mesh.ranks} ranks, "
            f"{self.num_parameters:,} parameters, {len(self.steps)} steps{loss}, peak {peak:,} B)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, schema 2."""
        mesh, nodes = self.layout.mesh, self.nodes
        return {
            "schema": SCHEMA,
            "config": self.config.to_dict(),
            "set_aside": dict(self.config.set_aside),
            **({"notes": list(self.config.model.notes)} if self.config.model.is_of_file else {}),
            "mesh": dict(mesh.sizes),
            "num_parameters": self.num_parameters,
            **counts_of(self.config, self.layout),
            **({"first_step": self.first_step} if self.first_step else {}),
            "losses": [_finite(loss) for loss in self.mean_losses],
            "losses_by_data_rank": [[_finite(loss) for loss in row] for row in self.losses],
            "grad_norm": [_finite(step.grad_norm) for step in self.steps],
            "loss_scale": [_finite(step.loss_scale) for step in self.steps],
            "skipped": [step.skipped for step in self.steps],
            "lost_updates": [float(share) for share in self.lost_updates],
            "stuck_moments": [float(share) for share in self.stuck_moments],
            **({"routed": self.routed.to_dict()} if self.routed.choices else {}),
            "ranks": [self._rank_dict(rank) for rank in self.ran],
            **({"nodes": nodes_values(nodes)} if any(node.host_bytes or node.nvme_bytes for node in nodes) else {}),
        }

    def _rank_dict(self, rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "coordinates": dict(coordinates(self.layout.mesh, rank)),
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
    stuck_moments: Sequence[Fraction] = (),
    node_ranks: int | None = None,
    routed: Routed = NOTHING_ROUTED,
    first_step: int = 0,
) -> RunResult:
    """Build a result from the counts of the ranks that ran, each for the ranks that it represents."""
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
            {
                name: OtherMemory(dict(other.marks), other.peak, dict(other.moments))
                for name, other in one.memory.others.items()
                if moves_states(config)
            },
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
        live_bytes_after=[ledgers[rank].memory.live_everywhere for rank in stands_for],
        events=[ledgers[rank].events for rank in stands_for] if keep_events else [],
        stands_for=list(stands_for),
        saved=activations.saved(),
        saved_again=activations.saved_again(),
        gpus=gpus,
        lost_updates=lost_updates,
        routed=routed,
        first_step=first_step,
        stuck_moments=stuck_moments,
        node_ranks=node_ranks or config.mesh.ranks_per_node or config.mesh.ranks,
    )


def _rows(rows: Sequence[TrafficRow]) -> list[dict[str, Any]]:
    return [row._asdict() for row in rows]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
