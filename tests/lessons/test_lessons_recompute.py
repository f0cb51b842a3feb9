"""Bytes kept and flops done under each recompute: against closed forms, and against one another."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from zerosim.analysis.formulas import block_activations
from zerosim.config import PLAN_DEFAULTS, RunConfig
from zerosim.device.events import Alloc, Kernel, Scope
from zerosim.errors import InputError
from zerosim.lessons.recompute import choices, choices_table, flops_of

CONFIG = RunConfig(stage=0, ranks=1, layers=3, dropout=0.1, **PLAN_DEFAULTS)


def test_flops_are_added_by_phase_and_kind_of_unit() -> None:
    def kernel(phase: str, unit: str, flops: int) -> Kernel:
        return Kernel(Scope(0, phase, unit, 0), "k", "vector", flops, 0, 0)

    found = flops_of(
        [
            kernel("forward", "h.0", 1),
            kernel("forward", "h.11", 10),
            kernel("forward", "lm_head", 100),
            kernel("backward", "loss", 1000),
            kernel("backward", "h.3", 10_000),
            kernel("optimizer", "h.3", 100_000),
            Alloc(Scope(), 1, 8, 8, "temp", 0),
        ]
    )
    assert (found.forward_blocks, found.forward_rest) == (11, 100)
    assert (found.backward_blocks, found.backward_rest) == (10_000, 1000)
    assert (found.forward, found.backward, found.total) == (111, 11_000, 11_111)


def test_bytes_are_those_of_the_published_count() -> None:
    none, flash, selective, full = choices(CONFIG)
    s, b, h, a = CONFIG.model.seq, CONFIG.data.micro_batch, CONFIG.model.hidden, CONFIG.model.heads
    for choice in (none, selective, full):
        assert choice.block_bytes == block_activations(s, b, h, a, recompute=choice.recompute)
    assert flash.block_bytes == 34 * s * b * h + 4 * a * s * b  # its log-sum-exp, fp32


def test_full_recompute_costs_one_forward_of_the_blocks() -> None:
    none, flash, selective, full = choices(CONFIG)
    again = full.flops.backward_blocks - none.flops.backward_blocks
    assert again == none.flops.forward_blocks
    assert full.flops.backward_rest == none.flops.backward_rest
    # The scores and what is made of them: two products of 2s²bh flops each.
    s, b, h = CONFIG.model.seq, CONFIG.data.micro_batch, CONFIG.model.hidden
    core = 4 * s * s * b * h * CONFIG.model.layers
    assert selective.flops.backward - none.flops.backward == core
    assert flash.flops.backward - none.flops.backward == core // 2


def test_the_table_shows_the_extra_work_and_a_model_without_blocks_is_refused() -> None:
    found = choices(CONFIG)
    console = Console(file=io.StringIO(), width=140)
    console.print(choices_table(found))
    full = found[-1]
    extra = 100 * (full.flops.total - found[0].flops.total) / found[0].flops.total
    line = next(line for line in console.file.getvalue().splitlines() if line.startswith("full"))  # type: ignore[attr-defined]
    assert line.split()[2] == f"{full.block_bytes:,}"
    assert line.split()[-1] == f"{extra:.1f}"
    with pytest.raises(InputError, match="block"):
        choices(RunConfig(model="flat", params=1000, ranks=1, stage=0))
