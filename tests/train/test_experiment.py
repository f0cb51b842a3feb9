"""From Python: runs, their results, memory that runs out, and the contract on files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zerosim
from zerosim.analysis.advice import run
from zerosim.config import RunConfig
from zerosim.errors import InputError, OutOfMemory
from zerosim.train.plan import peak_of, peak_within

SMALL: dict[str, Any] = dict(layers=1, hidden=16, heads=2, seq=8, steps=3, micro_batch=2, ranks=2)


def test_defaults_that_a_program_may_rely_on() -> None:
    config = RunConfig()
    assert (config.optim.lr_schedule, config.optim.clip_norm, config.optim.decay) == ("constant", 0, "all")
    assert (config.model.dropout, config.model.tie_embeddings) == (0.0, True)


@pytest.mark.bits
def test_a_run_repeats_itself_to_the_bit_and_to_the_event() -> None:
    first, second = (run(RunConfig(**SMALL, dropout=0.1), keep_events=True) for _ in range(2))
    side_by_side = run(RunConfig(**SMALL, dropout=0.1, parallel=2), keep_events=True)
    assert first.losses == second.losses == side_by_side.losses
    assert first.events == second.events == side_by_side.events
    assert first.memory == second.memory == side_by_side.memory


def test_json_is_strict_and_whole() -> None:
    result = run(RunConfig(**SMALL, precision="fp16", initial_scale_power=40, hysteresis=1))
    text = json.dumps(result.to_dict(), allow_nan=False)
    values = json.loads(text)
    assert values["schema"] == 2
    assert values["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    assert values["num_parameters"] == result.num_parameters
    assert values["losses"] == result.mean_losses
    assert values["losses_by_data_rank"] == result.losses
    assert values["skipped"] == [True, True, True]
    assert values["grad_norm"] == [None] * 3  # inf is not JSON
    assert values["loss_scale"] == [2.0**40, 2.0**39, 2.0**38]
    assert [rank["rank"] for rank in values["ranks"]] == [0, 1]
    assert values["ranks"][1]["coordinates"] == {"pp": 0, "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 0}
    memory = values["ranks"][1]["memory"]
    assert set(memory) == {"after_init", "end_of_forward", "end_of_backward", "after_step", "padding", "states", "peak"}
    assert set(memory["peak"]) == {"bytes", "step", "phase", "unit", "by_kind"}
    assert sum(memory["peak"]["by_kind"].values()) == memory["peak"]["bytes"]
    assert set(values["ranks"][0]["traffic"][0]) == {
        "step", "phase", "op", "dtype", "purpose", "axis", "calls", "payload_bytes", "sent_bytes", "received_bytes",
            "modelled_bytes",
    }  # fmt: skip
    assert RunConfig.from_dict(values["config"]) == result.config


@pytest.mark.bits
def test_weights_go_in_and_out_by_name(tmp_path: Path) -> None:
    first = run(RunConfig(**SMALL, precision="fp32"))
    np.savez(tmp_path / "in.npz", **first.weights)
    again = run(
        RunConfig(**{**SMALL, "stage": 1, "ranks": 1}, precision="fp32", weights=str(tmp_path / "in.npz"), lr=1e-30)
    )
    assert "lm_head.weight" not in again.weights
    for name, value in first.weights.items():
        assert again.weights[name].dtype == np.float32
        assert np.allclose(value, again.weights[name], rtol=0, atol=1e-25)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_out_of_memory_says_what_was_live_and_what_would_fit(stage: int) -> None:
    config = RunConfig(stage=stage, steps=2, capacity=3_000_000)
    with pytest.raises(OutOfMemory) as caught:
        run(config)
    error = caught.value
    assert f"rank {error.rank}" in str(error)
    assert sum(error.live.values()) + error.requested > 3_000_000 >= sum(error.live.values())
    assert set(error.live) <= {kind.value for kind in zerosim.Kind}
    assert error.advice is not None
    flags = error.advice.split(" would fit")[0].split()
    asked = {flags[i].removeprefix("--").replace("-", "_"): int(flags[i + 1]) for i in range(0, len(flags), 2)}
    fitting = run(config.replace(**asked))  # the advice was tried: it holds
    assert max(memory.peak.total_bytes for memory in fitting.memory) <= 3_000_000


def test_a_capacity_of_exactly_the_peak_is_enough() -> None:
    for stage in range(4):
        peak = max(memory.peak.total_bytes for memory in run(RunConfig(**SMALL, stage=stage)).memory)
        run(RunConfig(**SMALL, stage=stage, capacity=peak))
        with pytest.raises(OutOfMemory):
            run(RunConfig(**SMALL, stage=stage, capacity=peak - 1))


def test_a_capacity_too_small_for_one_unit_is_out_of_memory_as_any_other() -> None:
    with pytest.raises(OutOfMemory) as caught:
        run(RunConfig(**SMALL, capacity=1000))
    assert caught.value.advice == ""  # it was searched for, and nothing fits


def test_a_pattern_that_matches_nothing_names_the_parameters_that_are_there() -> None:
    for sizes, known in (({"units": 1}, "are units.0.weight$"), ({"units": 2}, "are units.0.weight, units.1.weight$")):
        with pytest.raises(InputError, match=known):
            run(RunConfig(model="flat", params=8, **sizes, freeze="other", steps=1))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_trial_within_a_capacity_ends_where_more_is_asked_for(stage: int) -> None:
    config = RunConfig(**{**SMALL, "steps": None}, stage=stage)
    peak = peak_of(config)
    assert sum(peak_within(config, peak).values()) == peak
    for capacity in (peak - 1, peak // 2, 1000):
        assert capacity < sum(peak_within(config, capacity).values()) <= peak


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"token": np.zeros((1, 4, 9), np.int64)}, "no array named 'tokens'"),
        ({"tokens": np.zeros((1, 4, 9), np.int32)}, "int32"),
        ({"tokens": np.zeros((4, 9), np.int64)}, r"shape \(4, 9\)"),
        ({"tokens": np.zeros((3, 5, 9), np.int64)}, "global batch is 5 rows, expected .* = 4"),
        ({"tokens": np.zeros((3, 4, 8), np.int64)}, r"expected seq \+ 1 = 9"),
        ({"tokens": np.zeros((2, 4, 9), np.int64)}, "2 steps, expected at least 3"),
        ({"tokens": np.full((3, 4, 9), 256, np.int64)}, "256"),
        ({"tokens": np.full((3, 4, 9), -1, np.int64)}, "-1"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "tokens.npz", **arrays)
    with pytest.raises(InputError, match=message):
        run(RunConfig(**SMALL, tokens=str(tmp_path / "tokens.npz")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("ln_f.bias"), "missing ln_f.bias"),
        (lambda w: w.update(extra=np.zeros(3, np.float32)), "unknown extra"),
        (lambda w: w.update({"ln_f.bias": np.zeros(3, np.float32)}), r"ln_f.bias has shape \(3,\), expected \(16,\)"),
        (lambda w: w.update({"ln_f.bias": np.zeros(16, np.int32)}), "ln_f.bias is int32"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    weights = dict(run(RunConfig(**SMALL)).weights)
    change(weights)
    np.savez(tmp_path / "in.npz", **weights)
    with pytest.raises(InputError, match=message):
        run(RunConfig(**SMALL, weights=str(tmp_path / "in.npz")))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), (b"", "is empty"), (b"short", "needs seq"), (bytes([200] * 50), "vocab 128 is too small")],
)
def test_data_files_that_do_not_fit_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        run(RunConfig(**SMALL, vocab=128, data=str(path)))
