"""Published memory calculators, which disagree on the same question: each one's formula for model states.

The formulas are as in their sources at the named commits; this module does not judge them. Buffers
that a calculator adds by default are included, activations are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from zerosim.analysis.formulas.estimators import accelerate_training, deepspeed_stage_2, deepspeed_stage_3
from zerosim.analysis.formulas.states import BytesPerParameter, bytes_per_parameter_at

Rule = Callable[[int, int, int, int], Fraction | None]
"""(stage, parameters, ranks, parameters of the largest layer) -> bytes per rank, or None if the calculator has no
answer."""


@dataclass(frozen=True, slots=True)
class Calculator:
    """One calculator: its name, the source of its formula, what it counts, and the formula."""

    name: str
    source: str
    counts: str
    rule: Rule

    def model_states(self, stage: int, num_parameters: int, ranks: int, largest_layer: int = 0) -> Fraction | None:
        """Return the bytes of model states per rank with Adam in mixed precision; None if it has no answer."""
        return self.rule(stage, num_parameters, ranks, largest_layer)


def calculators() -> tuple[Calculator, ...]:
    """Return all calculators, the paper's own rule first."""
    return (
        Calculator(
            "ZeRO paper",
            "arXiv 1910.02054, Figure 1",
            "2 + 2 + 12 bytes: fp16 parameters and gradients, fp32 master and two moments",
            lambda stage, psi, ranks, largest: _staged(stage, psi, ranks, grad=2),
        ),
        Calculator(
            "DeepSpeed estimator, code",
            "deepspeedai/DeepSpeed edaa722, runtime/zero/stage_1_and_2.py and stage3.py",
            "stages 2 and 3 only: 2 + 18/N and 18/N, with fp32 gradients; stage 3 adds 4 bytes of the largest layer",
            _deepspeed_code,
        ),
        Calculator(
            "DeepSpeed estimator, docs",
            "deepspeedai/DeepSpeed edaa722, docs/code-docs/source/memory.rst",
            "stages 2 and 3 only: 4 + 16/N and 18/N; its stage 2 no longer says what the code does",
            _deepspeed_docs,
        ),
        Calculator(
            "EleutherAI cookbook",
            "EleutherAI/cookbook 827ee3b, calc_transformer_mem",
            "fp32 gradients by default; a bucket of 5e8 elements from stage 1 on; in stage 3 1e9 live parameters",
            _eleuther,
        ),
        Calculator(
            "llm-analysis",
            "cli99/llm-analysis d841e40",
            "gradients in the master's dtype, 4 bytes; its stage 3 adds a prefetched layer, left out here",
            lambda stage, psi, ranks, largest: _staged(stage, psi, ranks, grad=4),
        ),
        Calculator(
            "Megatron-LM theoretical",
            "NVIDIA/Megatron-LM d98e8a6, training/theoretical_memory_usage.py",
            "18 bytes with fp32 gradients; 6 + 12/N with the distributed optimizer; no stage 2 or 3",
            lambda stage, psi, ranks, largest: None if stage >= 2 else _staged(stage, psi, ranks, grad=4),
        ),
        Calculator(
            "mlsysim 0.3.0",
            "mlsysim 0.3.0, engine/solvers/training.py",
            "2 + 2 + 12 bytes and a bucket of 5% of the rank's gradients; no gathered layer",
            _mlsysim,
        ),
        Calculator(
            "accelerate estimate-memory",
            "huggingface/accelerate 16cb6eb, commands/estimate.py, fp16",
            "the largest of its parts (Adam's 8 bytes), not their sum; knows no ranks",
            lambda stage, psi, ranks, largest: Fraction(max(accelerate_training(4 * psi, "float16").values())),
        ),
    )


def _staged(stage: int, psi: int, ranks: int, *, grad: int) -> Fraction:
    """Return the plain rule with Adam's 12 bytes: each kind is divided from its ZeRO stage on."""
    return psi * bytes_per_parameter_at(stage, ranks, BytesPerParameter(2, grad, 12))


def _deepspeed_code(stage: int, psi: int, ranks: int, largest: int) -> Fraction | None:
    if stage < 2:
        return None
    if stage == 2:
        return Fraction(deepspeed_stage_2(psi, ranks, cpu_offload=False).gpu)
    return Fraction(deepspeed_stage_3(psi, largest, ranks, cpu_offload=False).gpu)


def _deepspeed_docs(stage: int, psi: int, ranks: int, largest: int) -> Fraction | None:
    if stage < 2:
        return None
    return 4 * psi + Fraction(16 * psi, ranks) if stage == 2 else 4 * largest + Fraction(18 * psi, ranks)


def _eleuther(stage: int, psi: int, ranks: int, largest: int) -> Fraction:
    bucket = 2 * 500_000_000 if stage >= 1 else 0
    live = 2 * 1_000_000_000 if stage == 3 else 0
    return _staged(stage, psi, ranks, grad=4) + bucket + live


def _mlsysim(stage: int, psi: int, ranks: int, largest: int) -> Fraction:
    bucket = Fraction(2 * psi, ranks if stage >= 2 else 1) / 20
    return _staged(stage, psi, ranks, grad=2) + bucket
