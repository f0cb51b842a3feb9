"""Small programs in the cells of notebooks 07 and 10: against closed forms, NumPy and one another."""

from __future__ import annotations

from typing import Any

import pytest

from zerosim.analysis.formulas import block_activations
from zerosim.config import PLAN_DEFAULTS, RunConfig
from zerosim.device.events import Alloc, Kernel, Scope
from zerosim.train.plan import plan

CONFIG = RunConfig(stage=0, ranks=1, layers=3, dropout=0.1, **PLAN_DEFAULTS)
PHASES = ("forward", "backward")


def kernel(phase: str, unit: str, flops: int) -> Kernel:
    return Kernel(Scope(0, phase, unit, 0), "k", "vector", flops, 0, 0)


EVENTS = [
    kernel("forward", "h.0", 1),
    kernel("forward", "h.11", 10),
    kernel("forward", "lm_head", 100),
    kernel("backward", "loss", 1000),
    kernel("backward", "h.3", 10_000),
    kernel("optimizer", "h.3", 100_000),
    Alloc(Scope(), 1, 8, 8, "temp", 0),
]


# -- notebook 07 -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def choices(defined: Any) -> dict[str, Any]:
    """Bytes (of a block, of all, at the peak) and flops by choice of recompute and attention, for a small model."""
    names = defined("07", "01") | {"gpt2": CONFIG}
    found: dict[str, Any] = defined("07", "11", "11a", **names)
    return found


def test_flops_are_added_by_phase_and_kind_of_unit(choices: dict[str, Any]) -> None:
    found = choices["flops_of"](EVENTS)
    assert [found[phase, "blocks"] for phase in PHASES] == [11, 10_000]
    assert [found[phase, "rest"] for phase in PHASES] == [100, 1000]


def test_bytes_are_those_of_the_published_count(choices: dict[str, Any]) -> None:
    s, b, h, a = CONFIG.model.seq, CONFIG.data.micro_batch, CONFIG.model.hidden, CONFIG.model.heads
    for (recompute, attention), ((block, _, _), _) in choices["options"].items():
        flash = 34 * s * b * h + 4 * a * s * b  # its log-sum-exp, fp32
        eager = block_activations(s, b, h, a, recompute=recompute)
        assert block == (flash if attention == "flash" else eager)


def test_full_recompute_costs_one_forward_of_the_blocks(choices: dict[str, Any]) -> None:
    none, flash, selective, full = (flops for _, flops in choices["options"].values())
    assert full - none == {("backward", "blocks"): none["forward", "blocks"]}
    # The scores and what is made of them: two products of 2s²bh flops each.
    s, b, h = CONFIG.model.seq, CONFIG.data.micro_batch, CONFIG.model.hidden
    core = 4 * s * s * b * h * CONFIG.model.layers
    assert selective - none == {("backward", "blocks"): core}
    assert flash - none == {("backward", "blocks"): core // 2}


def test_the_table_shows_the_extra_work(choices: dict[str, Any]) -> None:
    (none_bytes, none), _, _, (_, full) = choices["options"].values()
    extra = (
        100 * (full.total() - none.total()) / sum(none[phase, who] for phase in PHASES for who in ("blocks", "rest"))
    )
    first, *_, last = choices["lines"]
    assert first[2:5] == none_bytes
    assert last[-1] == f"{extra:.1f}"


# -- notebook 10 -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def claims(defined: Any) -> dict[str, Any]:
    found: dict[str, Any] = defined("10", "01", "03", "13", "29", "35", "41")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_split_mlp_is_the_whole_one(ranks: int, claims: dict[str, Any]) -> None:
    done = claims["split_mlp"](6, 16, ranks)  # asserts its output and its weights
    assert done.sent_bytes[0] * ranks == 2 * (ranks - 1) * 6 * 16 * 8  # a ring's all_reduce of fp64


def test_readings_of_a_run(claims: dict[str, Any]) -> None:
    assert claims["flops"](EVENTS, *PHASES) == 11_111
    assert claims["flops"](EVENTS, "backward", unit="h.") == 10_000
    flat = plan(RunConfig(model="flat", params=4096, units=4, ranks=4, stage=3))
    assert claims["volume"](flat) == 3
    once = 2 * 4096 * 3 // 4
    assert claims["sent_by_phase"](flat) == {
        "forward: all_gather": once,
        "backward: all_gather": once,
        "backward: reduce_scatter": once,
    }
