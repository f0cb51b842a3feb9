"""Traffic of the model states: elements and bytes that a rank sends per step, by stage.

The ZeRO paper's communication analysis (arXiv 1910.02054, section 7) and what schedules of
frameworks change about it. Not the traffic of tensor or pipeline parallelism, not time.

Psi is all parameters and N the ranks, with hybrid sharding those of one replica; the other letters: `letters.py`.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from zerosim.analysis.formulas.form import Form, form, ring, symbols
from zerosim.analysis.formulas.states import PSI, QUANTIZED, QUANTIZED_BYTES, TRAINED, ZERO_PAPER, N

_VD, _U, _R, _P, _M, _F, _w, _g, _c = symbols("VD U R P M F w g c")
_B, _Z = symbols("B Z")
ZERO_VOLUME = f"{ZERO_PAPER}, section 7"


class Volume(NamedTuple):
    """Bytes that a rank sends per step, the mean over ranks: of gradients, and of parameters. Their `elements` are the
    paper's volume, without the factor (N-1)/N."""

    grads: Form
    params: Form = Form()

    @property
    def total(self) -> Form:
        return self.grads + self.params

    def __str__(self) -> str:
        """All of its elements, such as '3Ψ + 2VD'."""
        return str(self.total.elements)


class Schedule(NamedTuple):
    """How often stage 3 gathers in a step.

    micro_batches          forwards and backwards of a step; twice as many with an estimate of curvature
    tied                   the table at the start is the head at the end: VD elements are gathered once more in each
    reshard_after_forward  False: every unit stays gathered until its backward (FSDP), which saves all of backward's
    keep_last_unit         the last unit, U elements, stays gathered: where a buffer is tied, that buffer
    keep_root_units        units outside the blocks, R elements with the tied table once, are gathered once a microbatch
                           and freed when backward ends (FSDP2's root). A last unit among them makes U = 0
    persistent             P elements are gathered once, after the optimizer step, and stay (DeepSpeed's
                           stage3_param_persistence_threshold). R counts none of them. Leave out `tied` if the table is
                           among them
    again                  by leaf module: M elements of modules that recompute runs a second time are gathered for that
                           too (DeepSpeed fetches a module before each forward)
    kept                   in a pipeline: how often U elements stay gathered for the next use
    """

    micro_batches: int = 1
    tied: bool = False
    reshard_after_forward: bool = True
    keep_last_unit: bool = False
    keep_root_units: bool = False
    persistent: bool = False
    again: bool = False
    kept: int = 0


ONCE = Schedule()


def volume(stage: int, schedule: Schedule = ONCE, *, all_reduce: int = 2) -> Volume:
    """Return the traffic per step of the paper's ZeRO stages (section 7; accumulation and tying derived).

    Stages 0 and 1 reduce once a step. Stages 2 and 3 reduce every microbatch. Stage 3 also gathers every parameter in
    forward and again in backward. `all_reduce` is what an all_reduce moves of Psi (`all_reduce_volume`).
    """
    if stage == 0:
        return Volume(reduced(all_reduce))
    reductions = schedule.micro_batches if stage > 1 else 1
    return Volume(reduced(reductions), gathered(schedule) if stage == 3 else published())


def reduced(times: int | Form = 1) -> Form:
    """Return the bytes of gradients that are reduced `times` times. An all-reduce counts `all_reduce_volume` times:
    early and default DeepSpeed put whole gradients on every rank in stages 1 and 2, 3 Psi with the gathers."""
    return (ring(N) * _g).by(ZERO_VOLUME) * times * PSI


def published(times: int = 1) -> Form:
    """Return the bytes of parameters that stages 1 and 2 gather `times` times: after the update, or in each forward."""
    return (ring(N) * _w).by(ZERO_VOLUME) * times * PSI


def gathered(schedule: Schedule) -> Form:
    """Return the bytes of stage 3's gathers: 2 Psi for each microbatch, in forward and in backward, and what its
    schedule adds and saves (derived from the schedule)."""
    m, each = schedule.micro_batches, (ring(N) * _w).by(ZERO_VOLUME)
    if not schedule.reshard_after_forward:
        return each * (m * PSI - schedule.persistent * (m - 1) * _P)
    elements, again = 2 * m * PSI, schedule.again * m * _M
    if schedule.keep_root_units:
        elements = elements + again - schedule.keep_last_unit * m * _U - m * _R
    elif schedule.tied:
        elements = elements + (1 if schedule.keep_last_unit else 2) * m * _VD + again
    else:
        elements = elements + again - schedule.keep_last_unit * m * _U
    return each * (elements - schedule.persistent * (2 * m - 1) * _P - schedule.kept * _U)


def gathered_beside_frozen(
    schedule: Schedule, *, quantized: bool = False, wide: Fraction = Fraction(1), whole: bool = False
) -> Form:
    """Return the same if Psi_t of Psi are trained: all of Psi for forward, and for backward B elements, those of units
    that it comes through and that are not gathered already (2106.09685; derived). `quantized`: of Psi, Psi_q parameters
    are Q bytes, which are gathered as they are (2305.14314; derived). Trained ones are `wide` times as wide as others,
    and B and the letters of single buffers count them so. `whole` ones lie on every rank."""
    wide = Fraction(0) if whole else wide
    m, each = schedule.micro_batches, (ring(N) * _w).by(ZERO_VOLUME)
    second = m * (schedule.again * _M + schedule.tied * _VD)
    published = schedule.persistent * (1 - m) * _P
    codes = ring(N) * m * (QUANTIZED_BYTES - _w * QUANTIZED) if quantized else Form()
    return each * (m * (PSI + (wide - 1) * TRAINED + _B) + second + published) + codes - each * schedule.kept * _U


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


def optimizer_sums(*, all_reduce: int | Form = 2) -> Form:
    """Return the bytes of the all-reduces in which ranks with slices add up F sums of an optimizer
    (`optimizers.exchanged`)."""
    return ring(N) * all_reduce * _c * _F
