"""Model states: what parameters, gradients and optimizer states cost per rank, by stage.

The ZeRO paper's memory rule (arXiv 1910.02054, sections 3.1 and 5, Figure 1) and what frameworks
add to it. Not traffic, not activations. Psi is the number of parameters, N that of data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from zerosim.analysis.formulas.form import Form, form, group, symbols, total

PSI, N = symbols("Ψ N")
TRAINED, QUANTIZED, QUANTIZED_BYTES, SCALES = symbols("Ψ_t Ψ_q Q Q_s")
KEPT, GRAD_BYTES = symbols("Y g")
STATES = ("param", "grad", "optim")
ZERO_PAPER = "ZeRO paper (arXiv 1910.02054)"
MASTER_BYTES = 4
"""An fp32 number: what the optimizer computes in."""


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """The cost of one parameter: 2 + 2 + 12 in mixed precision with Adam (ZeRO paper, section 3.1).

    `optim` is a mean where it depends on the tensor that the parameter is in (`optimizers.py`).
    """

    param: int
    grad: int
    optim: int | Fraction

    @property
    def total(self) -> int | Fraction:
        return self.param + self.grad + self.optim


def num_moments(optimizer: str, momentum: float) -> int:
    """Return how many numbers an optimizer keeps per parameter: 2 for Adam, 0 or 1 for SGD."""
    if optimizer == "sgd":
        return int(momentum != 0)
    return {"adagrad": 1, "rmsprop": 1, "lion": 1, "adam-sage": 3}.get(optimizer, 2)


def bytes_per_parameter(
    param_bytes: int, grad_bytes: int, moments: int, *, cast_shards: bool = False, masters: bool = True
) -> BytesPerParameter:
    """Return the cost of an optimizer that keeps `moments` numbers per parameter.

    2-byte parameters have an fp32 master beside them, and their moments are fp32 too: K = 4 + 8 = 12
    for Adam (ZeRO paper, section 3.1). Moments of fp32 and fp64 parameters are of their own size.

    With `cast_shards` a rank stores no 2-byte shard: it casts the fp32 master at each gather (FSDP2's
    mixed precision), so that 4 + 4 + 8 bytes with fp32 gradients are 0 + 4 + 12 here. Only stage 3 can.

    Without `masters` 2-byte parameters are all there is, and moments take 2 bytes each: 2 + 2 + 4 (pure bf16); Kahan's
    compensation is one number more.
    """
    if param_bytes == 2 and masters:
        return BytesPerParameter(0 if cast_shards else param_bytes, grad_bytes, MASTER_BYTES * (1 + moments))
    return BytesPerParameter(param_bytes, grad_bytes, param_bytes * moments)


def first_partitioned(kind: str) -> int:
    """Return the first ZeRO stage that divides this model state by N: 1 optim, 2 grad, 3 param (ZeRO paper, section
    5)."""
    return {"optim": 1, "grad": 2, "param": 3}[kind]


class Frozen(NamedTuple):
    """Parameters that are not trained: `each` bytes a parameter. Of those that are `quantized`, Q bytes in all, and
    with `whole_scales` Q_s more on every rank. With `whole_trained` every rank holds all of the others."""

    each: int
    quantized: bool = False
    whole_scales: bool = False
    whole_trained: bool = False


def model_states(stage: int, cost: BytesPerParameter, frozen: Frozen | None = None) -> dict[str, Form]:
    """Return bytes per rank of each model state when backward ends, in Psi and N (ZeRO paper, section 5 and Figure 1).

    Stage 1 divides the optimizer states by N, stage 2 also the gradients, stage 3 also the parameters. `frozen` weights
    have no gradients and no optimizer states: of Psi, Psi_t are trained (arXiv 2106.09685, section 4.2).
    """
    whole = {"param": cost.param * PSI, "grad": cost.grad * PSI, "optim": cost.optim * PSI}
    if frozen is not None:
        whole = {"param": frozen_params(cost, frozen), "grad": cost.grad * TRAINED, "optim": cost.optim * TRAINED}
    source = f"{ZERO_PAPER}, sections 3.1 and 5"
    uncut = dict.fromkeys(STATES, Form())
    if frozen is not None and frozen.whole_trained:
        uncut = {kind: getattr(cost, kind) * TRAINED for kind in STATES}
    held = {
        kind: (whole[kind] - uncut[kind]) / (N if stage >= first_partitioned(kind) else 1) + uncut[kind]
        for kind in STATES
    }
    if frozen is not None and frozen.whole_scales:
        held["param"] = held["param"] + SCALES
    return {kind: held[kind].by(source) for kind in STATES}


def frozen_params(cost: BytesPerParameter, frozen: Frozen) -> Form:
    """Return the bytes of all parameters where some are frozen."""
    params = frozen.each * PSI + (cost.param - frozen.each) * TRAINED
    return params - frozen.each * QUANTIZED + QUANTIZED_BYTES if frozen.quantized else params


def optimizer_step_states(
    stage: int,
    cost: BytesPerParameter,
    frozen: Frozen | None = None,
    *,
    upcast_grads: bool = False,
    sub_group: int = 0,
) -> dict[str, Form]:
    """Return bytes per rank while the optimizer steps: `model_states` and, under 'upcast', fp32 copies of gradients.

    At most `sub_group` elements of these exist at once, plus the rest of the last tensor; 0: all of them.

    DeepSpeed casts the reduced 2-byte gradients of a rank's partition to fp32 before the step. With both
    alive stage 2 is 2Psi + 18Psi/N, which is what its estimator counts (stage_1_and_2.py, edaa722: 2 grads
    16-bit + 4 grads 32-bit + 4 + 8), and stage 3 is 20Psi/N. Its stage 3 estimator says 18Psi/N: the same
    without the 2-byte gradients. Gradients of 4 bytes or more need no copy, nor do those that no step finds.
    """
    each = MASTER_BYTES if upcast_grads and 0 < cost.grad < MASTER_BYTES else 0
    own = (PSI if frozen is None else TRAINED) / (N if stage >= 1 else 1)
    copies = each * (group("least", own, form(sub_group)) if sub_group else own)
    return {**model_states(stage, cost, frozen), "upcast": copies.by("DeepSpeed edaa722, stage_1_and_2.py, stage3.py")}


def after_step_states(
    stage: int,
    cost: BytesPerParameter,
    frozen: Frozen | None = None,
    *,
    persistent_grads: bool = False,
    keep_upcast: bool = False,
) -> dict[str, Form]:
    """Return bytes per rank between two steps. Gradients count only if they, their buffer or fp32 copies outlive it.

    Megatron-LM with Adam: 18Psi, or 6Psi + 12Psi/N, in bf16; 4Psi + 16Psi/N in fp16. DeepSpeed's stage 3: 16Psi/N.
    """
    states = optimizer_step_states(stage, cost, frozen, upcast_grads=keep_upcast)
    return states if persistent_grads else {**states, "grad": Form()}


def reduction_buffers(grad: int, frozen: Frozen | None = None, *, copies: bool = False, numel: int = 0) -> Form:
    """Return bytes per rank of the buffers from which gradients of `grad` bytes are reduced, if they live from start to
    end.

    With `copies` PyTorch's DDP copies each gradient into a bucket. It makes buckets of the parameters that require a
    gradient, no others. DeepSpeed's stage 3 has `numel` elements, on one rank and beside frozen weights too.
    """
    if copies:
        return (grad * (PSI if frozen is None else TRAINED)).by("PyTorch c10d/reducer.cpp, initialize_buckets")
    return (numel * GRAD_BYTES).by("DeepSpeed edaa722, stage3.py")


def late_states(cost: BytesPerParameter, frozen: Frozen | None = None) -> dict[str, Form]:
    """Return bytes per rank that a delayed parameter update adds when backward ends (arXiv 2101.06840, section 5.2):
    the local shard of the previous step's gradients, which the CPU reads meanwhile, and new parameters beside the
    old."""
    own = (PSI if frozen is None else TRAINED) / N
    return {"param": cost.param * own, "grad": cost.grad * own}


def bytes_per_parameter_at(stage: int, ranks: int, cost: BytesPerParameter) -> Fraction:
    """Return bytes per parameter and rank when backward ends: 16, 4 + 12/N, 2 + 14/N, 16/N for Adam in mixed
    precision."""
    return total(model_states(stage, cost).values()).at(Ψ=1, N=ranks)


def padded_numel(numels: Iterable[int], ranks: int) -> int:
    """Return Psi with padding: each of these buffers is cut into N equal slices, N * ceil(numel / N).

    In place of Psi in `model_states` and `Volume.sent_bytes` it gives what every rank holds and sends
    when buffers are cut into slices, to the byte (stage 0 cuts nothing and pads nothing).
    """
    return sum(ranks * -(-numel // ranks) for numel in numels)


def blocked_numel(tensors: Iterable[int], ranks: int, block: int) -> int:
    """Return the same for one buffer that is cut at blocks of B elements of these tensors: N B ceil(sum of ceil(n/B) /
    N).

    Each tensor has its own last block, which is padded. For optimizers with a number for each block (8-bit states).
    Source: derived.
    """
    return ranks * block * -(-sum(-(-numel // block) for numel in tensors) // ranks)
