"""What is kept against what is computed again: bytes and flops of one step under each choice.

Owns the comparison of the three kinds of recompute and the two attention kernels. Bytes are those of the
run's ledgers; flops are added up from the `Kernel` events of its record. Sources: arXiv 1604.06174
(recompute), 2205.05198 (selective), 2205.14135 (flash attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerosim.config import RunConfig
from zerosim.device.events import Event, Kernel
from zerosim.ledger.memory import Snapshot
from zerosim.lessons.tables import table
from zerosim.report.activations import block_unit
from zerosim.report.look import Adaptive, Stack
from zerosim.train.build import is_block
from zerosim.train.plan import plan


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of forward and backward: those of blocks, and those of embedding, head and loss."""

    forward_blocks: int
    forward_rest: int
    backward_blocks: int
    backward_rest: int

    @property
    def forward(self) -> int:
        return self.forward_blocks + self.forward_rest

    @property
    def backward(self) -> int:
        return self.backward_blocks + self.backward_rest

    @property
    def total(self) -> int:
        return self.forward + self.backward


def flops_of(events: Sequence[Event]) -> Flops:
    """Added up over one rank's kernels, in its forward and backward phases."""
    sums = dict.fromkeys(((phase, block) for phase in ("forward", "backward") for block in (True, False)), 0)
    for event in events:
        if isinstance(event, Kernel) and event.scope.phase in ("forward", "backward"):
            sums[event.scope.phase, is_block(event.scope.unit)] += event.flops
    return Flops(sums["forward", True], sums["forward", False], sums["backward", True], sums["backward", False])


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice, in bytes on rank 0: what a block keeps, what all units keep, the peak; and the flops of a step."""

    recompute: str
    attention: str
    block_bytes: int
    kept_bytes: int
    peak: Snapshot
    flops: Flops

    @property
    def peak_bytes(self) -> int:
        return self.peak.total_bytes


def choices(config: RunConfig) -> tuple[Choice, ...]:
    """Everything kept; flash attention; the attention core again; every block again. One step each, on shapes alone.

    Raises: InputError where the model has no blocks.
    """
    wanted = (("none", "eager"), ("none", "flash"), ("selective", "eager"), ("full", "eager"))
    return tuple(_count(config.replace(recompute=recompute, attention=attention)) for recompute, attention in wanted)


def _count(config: RunConfig) -> Choice:
    result = plan(config, keep_events=True)
    saved = {unit: sum(row.nbytes for row in rows) for unit, rows in result.saved.items()}
    return Choice(
        config.memory.recompute,
        config.memory.attention,
        saved[block_unit(result.saved)],
        sum(saved.values()),
        result.memory[0].peak,
        flops_of(result.events[0]),
    )


def choices_table(found: Sequence[Choice]) -> Stack | Adaptive:
    """A line per choice. Extra work is in percent of the first line's."""
    base = found[0].flops.total
    return table(
        (
            "recompute",
            "attention",
            "one block keeps",
            "all keep",
            "peak",
            "flops, forward",
            "flops, backward",
            "extra %",
        ),
        [
            (
                choice.recompute,
                choice.attention,
                choice.block_bytes,
                choice.kept_bytes,
                choice.peak_bytes,
                choice.flops.forward,
                choice.flops.backward,
                f"{100 * (choice.flops.total - base) / base:.1f}",
            )
            for choice in found
        ],
        title="What is kept, in bytes, and what is computed, in flops",
        note="Extra: flops of forward and backward together, beyond those of the first line.",
    )
