"""Every check of a result, made once: what tables mark, what a comparison sums up, whether formulas agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from zerosim.analysis.blocks import block_unit, check_block, has_block
from zerosim.analysis.capabilities.delayed import has_late
from zerosim.analysis.capability import Step
from zerosim.analysis.check import Check, Compared
from zerosim.analysis.compare import check_buffers, check_states, last_whole_step
from zerosim.analysis.copies import check_copies, check_memories
from zerosim.analysis.forms import forms
from zerosim.analysis.lazy_states import held_cost
from zerosim.analysis.letters import letters_of
from zerosim.analysis.nodes import check_nodes
from zerosim.analysis.saving import check_save
from zerosim.analysis.shares import share_of
from zerosim.analysis.traffic import all_sent, check_exchanges, check_traffic
from zerosim.analysis.weights import passes_of
from zerosim.train.result import RunResult


class Checks:
    """The checks of one pipeline stage's ranks, by what they are of. Each is made when it is first asked for."""

    def __init__(self, of: Compared) -> None:
        self.of = of

    @cached_property
    def states(self) -> list[Check]:
        return check_states(self.of)

    @cached_property
    def buffers(self) -> Check:
        return check_buffers(self.of)

    @cached_property
    def memories(self) -> list[Check]:
        return check_memories(self.of)

    @cached_property
    def sent(self) -> list[Check]:
        """Model states, then their total."""
        return check_traffic(self.of)

    @cached_property
    def exchanged(self) -> list[Check]:
        return check_exchanges(self.of)

    @cached_property
    def traffic(self) -> list[Check]:
        """What was exchanged and sent, then the total of both."""
        return all_sent(self.sent, self.exchanged)

    @cached_property
    def nodes(self) -> list[Check]:
        return check_nodes(self.of)

    @cached_property
    def copied(self) -> list[Check]:
        return check_copies(self.of)

    @cached_property
    def saved(self) -> list[Check]:
        """Of a plan that saves, what a save takes."""
        return check_save(self.of)

    @cached_property
    def kept(self) -> list[Check]:
        """One block's activations, of rank 0."""
        result = self.of.result
        if self.of.share.stage or not has_block(result):
            return []
        unit = block_unit(result.saved)
        return [check_block(result.config, result.saved[unit], unit)]

    @property
    def of_memory(self) -> list[Check]:
        return [*self.states, self.buffers, *self.memories, *self.kept]

    @property
    def of_step(self) -> list[Check]:
        """The bytes that moved in the step; nothing without a whole step."""
        return [] if self.of.step is None else [*self.traffic, *self.nodes, *self.copied]


def checks(result: RunResult, step: int | None = None) -> list[Checks]:
    """Return the checks of a result by pipeline stage, at a step or at the last whole one."""
    config, step = result.config, last_whole_step(result) if step is None else step
    number = step or 0
    at, made, found = Step(passes_of(result, number), number, has_late(result)), {}, []
    for stage in range(result.layout.mesh.pp):
        cost, share = held_cost(result, stage), share_of(result, stage)
        if cost not in made:
            made[cost] = forms(config, cost, at)
        held, padded = (letters_of(result, stage, padded=padded, step=number, share=share) for padded in (False, True))
        found.append(Checks(Compared(result, share, step, made[cost], cost, held, padded)))
    return found


def agree(checked: Iterable[Check]) -> bool:
    """Return whether no count differs from its closed form."""
    return all(check.agrees is not False for check in checked)


def formulas_agree(found: Sequence[Checks]) -> bool:
    """Return whether every count that has a closed form equals it."""
    return all(agree((*one.of_memory, *one.of_step, *one.saved)) for one in found)
