"""Intervals of measured memory: their classes, what is said of a plan that fits, when it is uncertain."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from zerosim.analysis.interval import FEWEST, Interval, Measured, interval
from zerosim.analysis.memory_interval import (
    ADAPTERS,
    ALLOCATED,
    DEVICE,
    FULL,
    LORA,
    QLORA,
    MemoryClass,
    memory_class,
    memory_interval,
    read_peaks,
)
from zerosim.cli.main import main
from zerosim.config import plan_config
from zerosim.config.presets.hardware import find_hardware
from zerosim.report.memory import Certainty, certainty
from zerosim.report.verdict import Limit
from zerosim.units import format_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))

from memory_errors import SCENARIOS

PLAN = ["plan", "--model", "gpt2", "--ranks", "8", "--recipe", "megatron", "--stage", "1", "--gpu", "a100-80", "--json"]
LORAS = MemoryClass("fsdp1", LORA, ALLOCATED)


def test_classes_are_merged_over_what_adapters_lie_on_and_no_further() -> None:
    few = [Measured("s", LORAS, 0.0)] * (FEWEST - 1)
    assert interval(LORAS, few) is None
    found = interval(LORAS, [*few, Measured("s", LORAS._replace(trained=QLORA), 0.1)])
    assert found is not None
    assert (found.of, found.rows) == (LORAS._replace(trained=ADAPTERS), FEWEST)
    for other in (LORAS._replace(trained=FULL), LORAS._replace(framework="fsdp2"), LORAS._replace(number=DEVICE)):
        assert interval(LORAS, [Measured("s", other, 0.0)] * 99) is None


def test_a_class_is_read_off_the_configuration() -> None:
    config = plan_config(model="llama3-8b", ranks=8, stage=1, recipe="megatron", attention="flash")
    assert memory_class(config, ALLOCATED) == MemoryClass("megatron", FULL, ALLOCATED)
    one = plan_config(model="llama3-8b", ranks=1, stage=0, recipe="ddp", lora_rank=8, base="nf4", attention="flash")
    assert memory_class(one, DEVICE) == MemoryClass("one GPU", QLORA, DEVICE)
    assert memory_interval(config.replace(recipe="paper"), ALLOCATED) is None


def test_the_table_has_every_measured_file() -> None:
    """test_check.py plans their rows."""
    assert {row.scenario for row in read_peaks()} == {path.stem for path in SCENARIOS}
    assert all(math.isfinite(row.log_ratio) for row in read_peaks())


def sure(peak: int, low: float, high: float) -> Certainty:
    limit = Limit("a100-80", 85_000_000_000, find_hardware("a100-80"), 1_000_000_000)
    return Certainty(peak, limit, 1_000_000_000, Interval(low, high, 9, LORAS), None)


def test_a_plan_is_uncertain_exactly_if_the_upper_end_does_not_fit() -> None:
    assert sure(80_000_000_000, 0.99, 1.05).doubts == []  # exactly what is left
    (doubt,) = sure(80_000_000_001, 0.99, 1.05).doubts
    assert doubt.startswith("uncertain: it fits by the count, but measured runs like it allocated up to 1.050")
    assert sure(80_000_000_001, 0.99, 1.05).to_dict()["uncertain"] is True
    (line,) = sure(50_000_000_000, 0.99, 1.05).lines()
    assert line == (
        "8 of 10 measured runs like this one allocated 0.990 to 1.050 of the count: 49.5 GB to 52.5 GB (9 of FSDP1, "
        "LoRA)."
    )


def test_no_gpu_no_interval() -> None:
    config = plan_config(model="llama3-8b", ranks=8, recipe="megatron", stage=1)
    assert certainty(config, None, 10**9) is None
    assert certainty(config.replace(allocator="caching"), Limit("", 10**11, find_hardware("a100-80")), 10**9) is None


def test_a_plan_says_where_measured_runs_lie(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "-"]) == 0
    out, err = capsys.readouterr()
    values = json.loads(out)
    found = values["certainty"]
    assert found["allocated_low"] <= found["allocated_high"]
    assert found["class"] == {"framework": "megatron", "trained": FULL, "number": "allocated"}
    assert found["rows"] >= FEWEST
    assert found["uncertain"] is False
    assert "8 of 10 measured runs like this one allocated" in " ".join(err.split())


def test_close_to_the_limit_the_caching_allocator_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    main([*PLAN, "-"])
    need = json.loads(capsys.readouterr().out)
    tight = str(need["peak_bytes"] + need["reserve_bytes"])
    assert main([*PLAN, "-", "--limit", tight]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["fits"] is True
    assert found["certainty"]["uncertain"] is True
    assert "uncertain: it fits by the count, but the caching allocator is refused" in " ".join(err.split())


def test_with_all_a_plan_says_what_the_caching_allocator_would_reserve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN[:-1], "--all"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert main([*PLAN, "-", "--allocator", "caching"]) == 0
    reserved = max(rank["memory"]["peak"]["reserved_bytes"] for rank in json.loads(capsys.readouterr().out)["ranks"])
    said = f"PyTorch's caching allocator would reserve {format_bytes(reserved)} (--allocator caching)."
    assert said in page
