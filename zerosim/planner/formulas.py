"""Closed forms, each with its source. Imports nothing of the simulator: formula and count check each other.

Bytes are exact integers (a `Fraction` where N does not divide Psi). N is the number of data-parallel
ranks, Psi the number of parameters, U the parameters of the last unit, V*D those of a tied table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

STATES = ("param", "grad", "optim")


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """What one parameter costs: 2 + 2 + 12 in mixed precision with Adam (ZeRO paper, section 3.1)."""

    param: int
    grad: int
    optim: int

    @property
    def total(self) -> int:
        return self.param + self.grad + self.optim


def bytes_per_parameter(param_bytes: int, grad_bytes: int, moments: int) -> BytesPerParameter:
    """The cost of an optimizer that keeps `moments` numbers per parameter: 2 for Adam, 0 or 1 for SGD.

    2-byte parameters have an fp32 master beside them, and their moments are fp32 too: K = 4 + 8 = 12
    for Adam (ZeRO paper, section 3.1). Moments of fp32 and fp64 parameters are of their own size.
    """
    if param_bytes == 2:
        return BytesPerParameter(param_bytes, grad_bytes, 4 + 4 * moments)
    return BytesPerParameter(param_bytes, grad_bytes, param_bytes * moments)


def first_partitioned(kind: str) -> int:
    """The first stage that divides this model state by N: 1 optim, 2 grad, 3 param (ZeRO paper, section 5)."""
    return {"optim": 1, "grad": 2, "param": 3}[kind]


def model_states(stage: int, num_parameters: int, ranks: int, cost: BytesPerParameter) -> dict[str, Fraction]:
    """Bytes per rank of each model state when backward ends (ZeRO paper, section 5 and Figure 1).

    Stage 1 divides the optimizer states by N, stage 2 also the gradients, stage 3 also the parameters.
    """
    return {
        "param": Fraction(cost.param * num_parameters, ranks if stage >= 3 else 1),
        "grad": Fraction(cost.grad * num_parameters, ranks if stage >= 2 else 1),
        "optim": Fraction(cost.optim * num_parameters, ranks if stage >= 1 else 1),
    }


def model_states_text(stage: int, cost: BytesPerParameter) -> str:
    """The formula in words of Psi and N, such as '4Psi + 12Psi/N'."""
    kept = [cost.param] * (stage < 3) + [cost.grad] * (stage < 2) + [cost.optim] * (stage < 1)
    cut = cost.total - sum(kept)
    terms = [f"{sum(kept)}Ψ"] if kept else []
    terms += [f"{cut}Ψ/N"] if cut else []
    return " + ".join(terms) or "0"


def state_text(stage: int, kind: str, cost: BytesPerParameter) -> str:
    """One model state's term of that formula, such as '12Psi/N'."""
    each = {"param": cost.param, "grad": cost.grad, "optim": cost.optim}[kind]
    if not each:
        return "0"
    return f"{each}Ψ/N" if stage >= first_partitioned(kind) else f"{each}Ψ"


def padded_numel(numels: Iterable[int], ranks: int) -> int:
    """Psi with padding: each of these buffers is cut into N equal slices, N * ceil(numel / N).

    In place of Psi in `model_states` and `Volume.sent_bytes` it gives what every rank holds and sends
    when buffers are cut into slices, to the byte (stage 0 cuts nothing and pads nothing).
    """
    return sum(ranks * -(-numel // ranks) for numel in numels)


@dataclass(frozen=True, slots=True)
class Volume:
    """Elements that cross the wire per rank and step, before the factor (N-1)/N.

    `grads` and `params` are multiples of Psi, apart because gradients travel in their own dtype.
    `tied` counts the extra gathers of a tied buffer of V*D elements, `kept` the gathers that are
    saved by keeping the last unit, of U elements.
    """

    grads: Fraction
    params: Fraction
    tied: int
    kept: int = 0

    def text(self) -> str:
        """All of it, such as '3Psi + 2VD'."""
        return _terms(self.grads + self.params, self.tied, self.kept)

    def grads_text(self) -> str:
        return _terms(self.grads, 0, 0)

    def params_text(self) -> str:
        return _terms(self.params, self.tied, self.kept)

    def sent_bytes(
        self,
        num_parameters: int,
        ranks: int,
        param_bytes: int,
        grad_bytes: int,
        tied_numel: int = 0,
        kept_numel: int = 0,
    ) -> Fraction:
        """Bytes sent per rank and step, the mean over ranks: the volume times (N-1)/N."""
        return self.sent_grad_bytes(num_parameters, ranks, grad_bytes) + self.sent_param_bytes(
            num_parameters, ranks, param_bytes, tied_numel, kept_numel
        )

    def sent_grad_bytes(self, num_parameters: int, ranks: int, grad_bytes: int) -> Fraction:
        """The part that reduces gradients."""
        return Fraction(ranks - 1, ranks) * self.grads * num_parameters * grad_bytes

    def sent_param_bytes(
        self, num_parameters: int, ranks: int, param_bytes: int, tied_numel: int = 0, kept_numel: int = 0
    ) -> Fraction:
        """The part that gathers parameters."""
        numel = self.params * num_parameters + self.tied * tied_numel - self.kept * kept_numel
        return Fraction(ranks - 1, ranks) * numel * param_bytes


def volume(
    stage: int,
    *,
    micro_batches: int = 1,
    tied: bool = False,
    reshard_after_forward: bool = True,
    keep_last_unit: bool = False,
) -> Volume:
    """Traffic per step (ZeRO paper, section 7; accumulation and tying derived from the schedule).

    Stages 0 and 1 reduce once a step. Stage 2 reduces every micro-batch. Stage 3 also gathers every
    parameter in forward and again in backward, a tied buffer (the table at the start is the head at
    the end) once more in each. Keeping the last unit saves its gather in backward, which is one of the
    tied buffer's where there is one: 3 Psi less one unit. Keeping every unit (FSDP's
    reshard_after_forward=False) saves all of backward's: 2 Psi.
    """
    if stage == 0:
        return Volume(Fraction(2), Fraction(0), 0)
    if stage == 1:
        return Volume(Fraction(1), Fraction(1), 0)
    if stage == 2:
        return Volume(Fraction(micro_batches), Fraction(1), 0)
    grads = Fraction(micro_batches)
    if not reshard_after_forward:
        return Volume(grads, grads, 0)
    if not tied:
        return Volume(grads, 2 * grads, 0, micro_batches if keep_last_unit else 0)
    return Volume(grads, 2 * grads, (1 if keep_last_unit else 2) * micro_batches)


def _terms(psi: Fraction, tied: int, kept: int) -> str:
    def times(count: Fraction | int, name: str) -> str:
        return name if count == 1 else f"{count}{name}"

    text = times(psi, "Ψ") if psi else "0"
    text += f" + {times(tied, 'VD')}" if tied else ""
    return text + (f" - {times(kept, 'U')}" if kept else "")
