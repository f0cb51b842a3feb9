"""Traffic of the model states: elements and bytes that a rank sends per step, by stage.

The ZeRO paper's communication analysis (arXiv 1910.02054, section 7) and what schedules of
frameworks change about it. Not the traffic of tensor or pipeline parallelism, not time.

Psi is all parameters and N the ranks, with hybrid sharding those of one replica; the other letters: `letters.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from zerosim.analysis.formulas.form import Form, form, ring, symbols
from zerosim.analysis.formulas.states import PSI, QUANTIZED, QUANTIZED_BYTES, TRAINED, ZERO_PAPER, N

_VD, _U, _R, _P, _M, _F, _w, _g, _q, _c = symbols("VD U R P M F w g q c")
_B, _P_t, _Z = symbols("B P_t Z")
ZERO_VOLUME = f"{ZERO_PAPER}, section 7"


class Volume(NamedTuple):
    """Bytes that a rank sends per step, the mean over ranks: of gradients, and of parameters. Their `elements` are the
    paper's volume, without the factor (N-1)/N."""

    grads: Form
    params: Form = Form()

    def keeping(self, times: int) -> Volume:
        """Return the volume less the gathers of U elements that stay gathered."""
        return self._replace(params=self.params - ring(N) * _w * times * _U)

    @property
    def total(self) -> Form:
        return self.grads + self.params

    def __str__(self) -> str:
        """All of its elements, such as '3Ψ + 2VD'."""
        return str(self.total.elements)


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
    again: bool = False,
    passes: int = 1,
    sync: bool = True,
    in_forward: bool = False,
    casts: bool = False,
    frozen: bool = False,
    quantized: bool = False,
) -> Volume:
    """Return the traffic per step (ZeRO paper, section 7; accumulation, tying and kept units derived from the
    schedule).

    Stages 0 and 1 reduce once a step. Stage 2 reduces every microbatch. Stage 3 also gathers every
    parameter in forward and again in backward, a tied buffer (the table at the start is the head at
    the end) once more in each. Keeping the last unit saves its gather in backward, which is one of the
    tied buffer's where there is one: 3 Psi less one unit. Keeping every unit (FSDP's
    reshard_after_forward=False) saves all of backward's: 2 Psi.

    `grad_reduction="all_reduce"` (stages 1 and 2) moves whole reduced gradients to every rank, as early
    and default DeepSpeed do: 3 Psi in stage 1, 2m Psi + Psi in stage 2 with m microbatches.
    `all_reduce` is what an all_reduce moves of Psi (`all_reduce_volume`): 2, or N by all pairs.
    `keep_root_units` (stage 3): the units outside the blocks, R elements that hold the tied table once, are
    gathered once per microbatch and freed when backward ends (FSDP2's root): R less, and tying is free.
    A last unit that is one of them, a head, makes U = 0.
    `persistent` (stage 3): P elements stay gathered through the step and are gathered once, after the
    optimizer step (DeepSpeed's stage3_param_persistence_threshold). R then counts none of them, and
    where the tied buffer is among them, leave `tied` False.
    `again` (stage 3 by leaf module): M elements of modules that recompute runs a second time are gathered for that, too
    (DeepSpeed fetches a module before each of its forwards). By unit, one gather serves the block's second forward and
    its backward.
    Without `sync` (stages 2 and 3) gradients are reduced once, after the last microbatch.
    `passes`: 2 in a step that is followed by an estimate of curvature, a second forward and backward of all
    microbatches after which nothing is published: 4 Psi in stage 0, 3 Psi in stages 1 and 2, 6 Psi in stage 3.
    `in_forward` (stages 1 and 2): parameters are gathered in each pass's forward, not after the update: 4 Psi then.
    `casts`: gradients are cast to q bytes before they are sent.
    `frozen`: Psi_t of Psi are trained, and alone reduced and published. Stage 3 gathers all of Psi for forward, and for
    backward B elements, those of units that it comes through and that are not gathered already (2106.09685; derived).
    `quantized`: of Psi, Psi_q parameters are Q bytes, which are gathered as they are (2305.14314; derived).
    """
    trained = TRAINED if frozen else PSI
    grads, params = ((ring(N) * each).by(ZERO_VOLUME) for each in (_q if casts else _g, _w))
    if stage == 0:
        return Volume(grads * all_reduce * passes * trained)
    reduction = all_reduce if grad_reduction == "all_reduce" else 1
    gathers = passes if in_forward else 1
    if stage == 1:
        return Volume(grads * reduction * passes * trained, params * gathers * trained)
    micro_batches *= passes  # what is reduced and gathered in each of them
    reductions = micro_batches if sync else passes
    if stage == 2:
        return Volume(grads * reduction * reductions * trained, params * gathers * trained)
    reduced = grads * reductions * trained
    if frozen:
        published = persistent * _P_t - persistent * micro_batches * _P
        second = micro_batches * (again * _M + tied * _VD)
        codes = ring(N) * micro_batches * (QUANTIZED_BYTES - _w * QUANTIZED) if quantized else Form()
        return Volume(reduced, params * (micro_batches * (PSI + _B) + second + published) + codes)
    if not reshard_after_forward:
        return Volume(reduced, params * (micro_batches * PSI - persistent * (micro_batches - 1) * _P))
    more, less = again * micro_batches * _M, persistent * (2 * micro_batches - 1) * _P
    if keep_root_units:
        kept = keep_last_unit * micro_batches * _U
        return Volume(reduced, params * (2 * micro_batches * PSI + more - kept - micro_batches * _R - less))
    if tied:
        table = (1 if keep_last_unit else 2) * micro_batches * _VD
        return Volume(reduced, params * (2 * micro_batches * PSI + table + more - less))
    return Volume(reduced, params * (2 * micro_batches * PSI + more - keep_last_unit * micro_batches * _U - less))


def encoded_volume(*, reductions: int = 1) -> Form:
    """Return the bytes sent of encoded gradients if the calls of a step carry Z over all ranks: each part goes once, in
    an all_to_all, an all_gather or a reduce_scatter. Source: derived."""
    return ring(N) * reductions * _Z


def replica_bytes(replicas: int, *, reductions: int = 1, pairs: bool = False, frozen: bool = False) -> Form:
    """Return hybrid sharding's bytes per rank and step: its shard of the gradients, averaged over n replicas.

    2 (Psi/N) (n-1)/n elements for each reduction, an all_reduce of Psi/N; N ranks hold a replica together. By all
    pairs (n-1) Psi/N.
    Source: derived from MiCS (arXiv 2205.00119) and PyTorch's fully_shard on a 2-D mesh.
    """
    share = ring(form(replicas)) if replicas > 1 else Form()
    return share * _g * all_reduce_volume(replicas, pairs=pairs) * reductions * (TRAINED if frozen else PSI) / N


def all_reduce_volume(ranks: int, *, pairs: bool = False) -> int:
    """Return what an all_reduce moves of its payload, before the factor (N-1)/N.

    2: a reduce_scatter and an all_gather. By all pairs N, for each of N ranks sends the whole to the N-1 others.
    """
    return ranks if pairs else 2


def optimizer_sums(*, all_reduce: int = 2) -> Form:
    """Return the bytes of the all-reduces in which ranks with slices add up F sums of an optimizer
    (`optimizers.exchanged`)."""
    return ring(N) * all_reduce * _c * _F
