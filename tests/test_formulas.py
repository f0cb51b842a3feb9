"""The closed forms against the paper's printed numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from zerosim.planner.formulas import BytesPerParameter, model_states, model_states_text, volume

MIXED = BytesPerParameter(2, 2, 12)
FP32 = BytesPerParameter(4, 4, 8)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.40625), (2, 16.640625), (3, 1.875)])
def test_figure_1(stage: int, gigabytes: float) -> None:
    """7.5B parameters on 64 ranks: printed 120, 31.4, 16.6 and 1.9 GB (ZeRO paper, Figure 1)."""
    total = sum(model_states(stage, 7_500_000_000, 64, MIXED).values())
    assert total == Fraction(gigabytes) * 10**9


def test_a_trillion_parameters_on_1024_ranks() -> None:
    """Printed 15.6 GB (Table 1)."""
    assert sum(model_states(3, 10**12, 1024, MIXED).values()) == 15_625_000_000


@pytest.mark.parametrize(
    ("stage", "mixed", "fp32"),
    [(0, "16Ψ", "16Ψ"), (1, "4Ψ + 12Ψ/N", "8Ψ + 8Ψ/N"), (2, "2Ψ + 14Ψ/N", "4Ψ + 12Ψ/N"), (3, "16Ψ/N", "16Ψ/N")],
)
def test_text(stage: int, mixed: str, fp32: str) -> None:
    assert model_states_text(stage, MIXED) == mixed
    assert model_states_text(stage, FP32) == fp32


def test_sgd_without_state_in_fp32_has_nothing_to_partition_in_stage_1() -> None:
    assert model_states_text(1, BytesPerParameter(4, 4, 0)) == "8Ψ"


@pytest.mark.parametrize(("stage", "text"), [(0, "2Ψ"), (1, "2Ψ"), (2, "2Ψ"), (3, "3Ψ")])
def test_volume(stage: int, text: str) -> None:
    """Section 7 of the paper; one rank sends nothing."""
    assert volume(stage).text() == text
    assert volume(stage).sent_bytes(1000, 1, 2, 2) == 0
    assert volume(stage).sent_bytes(1000, 4, 2, 2) == Fraction(3, 4) * int(text[0]) * 2000


def test_volume_of_the_awkward_cases() -> None:
    assert volume(3, tied=True).text() == "3Ψ + 2VD"
    assert volume(2, micro_batches=4).text() == "5Ψ"
    assert volume(3, micro_batches=4).text() == "12Ψ"
    assert volume(1, micro_batches=4).text() == "2Ψ"
    assert volume(3, tied=True, reshard_after_forward=False).text() == "2Ψ"
    assert volume(2).sent_bytes(1000, 2, 2, 4) == Fraction(1, 2) * (2000 + 4000)
