"""Traffic of the model states: elements and bytes that a rank sends per step, by stage.

The ZeRO paper's communication analysis (arXiv 1910.02054, section 7) and what schedules of
frameworks change about it. Not the traffic of tensor or pipeline parallelism, not time.

Psi is all parameters and N the ranks. Of Psi, V*D are a tied table, U the last unit, R the units
outside the blocks (tables, last norm, head), P the units that stay gathered for good, M the leaf modules that
backward runs a second time where they are gathered one by one; A micro-batches.
With hybrid sharding N are the ranks of one replica, and R the replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Volume:
    """Elements that cross the wire per rank and step, before the factor (N-1)/N.

    `grads` and `params` are multiples of Psi, apart because gradients travel in their own dtype.
    `tied` counts the extra gathers of a tied buffer of V*D elements, `again` those of modules that run again.
    What is saved by units that stay gathered: `kept` gathers of the last unit, `root` gathers of the units
    outside the blocks, `persistent` gathers of the units that are never freed.
    """

    grads: Fraction
    params: Fraction
    tied: int
    kept: int = 0
    root: int = 0
    persistent: int = 0
    again: int = 0

    def text(self) -> str:
        """All of it, such as '3Psi + 2VD'."""
        return self._terms(self.grads + self.params)

    def grads_text(self) -> str:
        return _times(self.grads, "Ψ") if self.grads else "0"

    def params_text(self) -> str:
        return self._terms(self.params)

    def sent_bytes(
        self,
        num_parameters: int,
        ranks: int,
        param_bytes: int,
        grad_bytes: int,
        tied_numel: int = 0,
        kept_numel: int = 0,
        root_numel: int = 0,
        persistent_numel: int = 0,
        again_numel: int = 0,
    ) -> Fraction:
        """Bytes sent per rank and step, the mean over ranks: the volume times (N-1)/N."""
        return self.sent_grad_bytes(num_parameters, ranks, grad_bytes) + self.sent_param_bytes(
            num_parameters, ranks, param_bytes, tied_numel, kept_numel, root_numel, persistent_numel, again_numel
        )

    def sent_grad_bytes(self, num_parameters: int | Fraction, ranks: int, grad_bytes: int) -> Fraction:
        """The part that reduces gradients."""
        return Fraction(ranks - 1, ranks) * self.grads * num_parameters * grad_bytes

    def sent_param_bytes(
        self,
        num_parameters: int | Fraction,
        ranks: int,
        param_bytes: int,
        tied_numel: int = 0,
        kept_numel: int = 0,
        root_numel: int = 0,
        persistent_numel: int = 0,
        again_numel: int = 0,
    ) -> Fraction:
        """The part that gathers parameters."""
        saved = self.kept * kept_numel + self.root * root_numel + self.persistent * persistent_numel
        numel = self.params * num_parameters + self.tied * tied_numel + self.again * again_numel - saved
        return Fraction(ranks - 1, ranks) * numel * param_bytes

    def _terms(self, psi: Fraction) -> str:
        text = _times(psi, "Ψ") if psi else "0"
        for count, name in ((self.tied, "VD"), (self.again, "M")):
            text += f" + {_times(count, name)}" if count else ""
        for count, name in ((self.kept, "U"), (self.root, "R"), (self.persistent, "P")):
            text += f" - {_times(count, name)}" if count else ""
        return text


def volume(
    stage: int,
    *,
    micro_batches: int = 1,
    tied: bool = False,
    reshard_after_forward: bool = True,
    keep_last_unit: bool = False,
    grad_reduction: str = "reduce_scatter",
    all_reduce: int = 2,
    keep_root_units: bool = False,
    persistent: bool = False,
    last_is_root: bool = True,
    again: bool = False,
    passes: int = 1,
) -> Volume:
    """Traffic per step (ZeRO paper, section 7; accumulation, tying and kept units derived from the schedule).

    Stages 0 and 1 reduce once a step. Stage 2 reduces every micro-batch. Stage 3 also gathers every
    parameter in forward and again in backward, a tied buffer (the table at the start is the head at
    the end) once more in each. Keeping the last unit saves its gather in backward, which is one of the
    tied buffer's where there is one: 3 Psi less one unit. Keeping every unit (FSDP's
    reshard_after_forward=False) saves all of backward's: 2 Psi.

    `grad_reduction="all_reduce"` (stages 1 and 2) moves whole reduced gradients to every rank, as early
    and default DeepSpeed do: 3 Psi in stage 1, 2A Psi + Psi in stage 2.
    `all_reduce` is what an all_reduce moves of Psi (`all_reduce_volume`): 2, or N by all pairs.
    `keep_root_units` (stage 3): the units outside the blocks, R elements that hold the tied table once, are
    gathered once per micro-batch and freed when backward ends (FSDP2's root): R less, and tying is free.
    `last_is_root`: the last unit, a head, is one of them; a model of blocks alone has it apart.
    `persistent` (stage 3): P elements stay gathered through the step and are gathered once, after the
    optimizer step (DeepSpeed's stage3_param_persistence_threshold). R then counts none of them, and
    where the tied buffer is among them, leave `tied` False.
    `again` (stage 3 by leaf module): M elements of modules that recompute runs a second time are gathered for that, too
    (DeepSpeed fetches a module before each of its forwards). By unit, one gather serves the block's second forward and
    its backward.
    `passes`: 2 in a step that is followed by an estimate of curvature, a second forward and backward of all
    micro-batches after which nothing is published: 4 Psi in stage 0, 3 Psi in stages 1 and 2, 6 Psi in stage 3.
    """
    if stage == 0:
        return Volume(Fraction(all_reduce * passes), Fraction(0), 0)
    reduction = all_reduce if grad_reduction == "all_reduce" else 1
    if stage == 1:
        return Volume(Fraction(reduction * passes), Fraction(1), 0)
    micro_batches *= passes  # what is reduced and gathered in each of them
    if stage == 2:
        return Volume(Fraction(reduction * micro_batches), Fraction(1), 0)
    grads = Fraction(micro_batches)
    if not reshard_after_forward:
        return Volume(grads, grads, 0, persistent=micro_batches - 1 if persistent else 0)
    saved, more = 2 * micro_batches - 1 if persistent else 0, micro_batches if again else 0
    if keep_root_units:
        kept = micro_batches if keep_last_unit and not last_is_root else 0
        return Volume(grads, 2 * grads, 0, kept, root=micro_batches, persistent=saved, again=more)
    if not tied:
        return Volume(grads, 2 * grads, 0, micro_batches if keep_last_unit else 0, persistent=saved, again=more)
    return Volume(grads, 2 * grads, (1 if keep_last_unit else 2) * micro_batches, persistent=saved, again=more)


def replica_bytes(
    num_parameters: int | Fraction,
    ranks: int,
    replicas: int,
    grad_bytes: int,
    *,
    reductions: int = 1,
    pairs: bool = False,
) -> Fraction:
    """Hybrid sharding: bytes sent per rank and step to average its part of the gradients over R replicas.

    2 (Psi/N) (R-1)/R elements for each reduction, an all_reduce of Psi/N; N ranks hold a replica together. By all
    pairs (R-1) Psi/N.
    Source: derived from MiCS (arXiv 2205.00119) and PyTorch's fully_shard on a 2-D mesh.
    """
    return all_reduce_sent(num_parameters, replicas, pairs=pairs) / ranks * grad_bytes * reductions


def replica_text(reductions: int = 1, all_reduce: int = 2) -> str:
    """That volume before the factor (R-1)/R, such as '2Psi/N'; `all_reduce` as in `volume`."""
    return f"{all_reduce * reductions}Ψ/N"


def all_reduce_volume(ranks: int, *, pairs: bool = False) -> int:
    """What an all_reduce moves of its payload, before the factor (N-1)/N.

    2: a reduce_scatter and an all_gather. By all pairs N, for each of N ranks sends the whole to the N-1 others.
    """
    return ranks if pairs else 2


def all_reduce_sent(numel: int | Fraction, ranks: int, *, pairs: bool = False) -> Fraction:
    """Elements that a rank sends of an all_reduce of `numel`, the mean over ranks: 2 (N-1)/N of them, by all pairs
    N-1 times all of them."""
    return Fraction(all_reduce_volume(ranks, pairs=pairs) * numel * (ranks - 1), ranks)


def _times(count: Fraction | int, name: str) -> str:
    return name if count == 1 else f"{count}{name}"
