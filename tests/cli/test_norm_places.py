"""A family of each place of norms, in all that shows a run: stepper, player, pictures, exports, formulas, tables."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_files import NORM_PLACES, small

import zerosim
from zerosim.analysis.checks import checks, formulas_agree
from zerosim.cli.main import main
from zerosim.config import RunConfig, plan_config
from zerosim.ledger.memory import MemoryLedger
from zerosim.playback import Recorded, decode, encode
from zerosim.report.plots.history import read_history
from zerosim.stepper import debug

RUN = ["--ranks", "2", "--seq", "8", "--micro-batch", "2", "--steps", "1"]
each_family = pytest.mark.parametrize("family", NORM_PLACES)
NORMS = {
    "qwen3": ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"),
    "gemma2": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "olmo2": ("self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "post_feedforward_layernorm"),
    "gpt_neox": ("input_layernorm", "post_attention_layernorm"),
    "cohere": ("input_layernorm",),
}
"""Names of the norms in a block, as transformers has them."""


def config(family: str, folder: Path, **changes: Any) -> RunConfig:
    values: dict[str, Any] = dict(stage=3, ranks=2, seq=8, micro_batch=2, steps=1)
    return RunConfig(model=small(family, folder), **{**values, **changes})


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.bits
@each_family
def test_a_stepped_run_is_the_run_and_its_norms_have_their_names(family: str, tmp_path: Path) -> None:
    asked = config(family, tmp_path)
    expected = zerosim.run(asked, keep_events=True)
    with debug(asked) as world:
        world.next(count=400)
        before = [len(view.events) for view in world.ranks]
        world.next(count=30)
        world.back(30)
        assert [len(view.events) for view in world.ranks] == before
        names = [name for name in world.ranks[0].parameters if "norm" in name and ".layers.0." in name]
        assert sorted(name.partition(".layers.0.")[2] for name in names) == sorted(
            f"{norm}.{kind}"
            for norm in NORMS[family]
            for kind in ("weight", "bias")
            if kind == "weight" or family == "gpt_neox"
        )
        rows = world.ownership().of("layers.0")
        assert {row.rank for row in rows} == {0, 1}
        result = world.finish()
    assert result.events == expected.events
    assert result.losses == expected.losses
    assert all(np.array_equal(result.weights[name], values) for name, values in expected.weights.items())


@each_family
def test_player_picture_and_plan_have_the_runs_bytes(family: str, tmp_path: Path) -> None:
    asked = config(family, tmp_path)
    result = zerosim.run(asked, keep_events=True)
    (records,) = decode(encode(Recorded(result)))
    for rank, events in records.items():
        memory = MemoryLedger()
        memory.read(events)
        assert memory.peak == result.memory[rank].peak
        assert memory.marks == result.memory[rank].marks
    history = read_history(result.events[0], None)
    assert (history.peak.nbytes, history.peak.scope) == (
        result.memory[0].peak.total_bytes,
        result.memory[0].peak.scope,
    )
    plan = zerosim.plan(asked)
    assert plan.memory[0] == result.memory[0]
    assert plan.saved == result.saved
    assert formulas_agree(checks(plan))


@each_family
def test_exports_have_the_plans_bytes(family: str, tmp_path: Path) -> None:
    words, snapshot, trace = ["--model", small(family, tmp_path), *RUN], tmp_path / "m.pickle", tmp_path / "t.json"
    assert main(["export", "memory", *words, "-o", str(snapshot)]) == 0
    assert main(["export", "trace", "--gpu", "a100-80", *words, "-o", str(trace)]) == 0
    entries = pickle.loads(snapshot.read_bytes())["device_traces"][0]
    named = {frame["name"] for entry in entries for frame in entry["frames"]}
    assert {"embed_tokens" if family != "gpt_neox" else "embed_in", "layers.0", "layers.1", "lm_head"} <= named
    events = json.loads(trace.read_text("utf-8"))["traceEvents"]
    kernels = {event["name"] for event in events if event["ph"] == "B"}
    norm = "layer_norm" if family in ("gpt_neox", "cohere") else "rms_norm"
    assert {norm, f"{norm}_backward"} <= kernels


@each_family
def test_no_words_call_its_block_a_gpts(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", small(family, tmp_path), *RUN]
    explained = shown(capsys, "explain", *words)
    assert "a GPT's block keeps" in explained
    assert f"Blocks of {family} keep other tensors. A plan counts what" in explained
    assert "a block keeps 2sbh" in shown(capsys, "explain", *words, "--recompute", "full")
    planned = shown(capsys, "plan", *words, "--all", "--attention", "eager")
    assert f"because the paper's block is a GPT's, not {family}'s" in planned
    assert "Formulas and counts agree." in planned


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen3", "statistics of q 128 4asb head_norm statistics of k 64 2asb"),  # of 2 heads, and of 1
        ("olmo2", "statistics of q 64 4sb head_norm statistics of k 64 4sb"),
    ],
)
def test_statistics_of_norms_of_heads_have_their_unit(
    family: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in shown(capsys, "plan", "--model", small(family, tmp_path), *RUN, "--all")


@each_family
def test_stages_are_compared_and_drawn(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", small(family, tmp_path), *RUN]
    compared = shown(capsys, "compare", *words)
    assert "Final weights of stages 0, 1, 2 and 3: bit-identical ✓" in compared
    assert "✗" not in compared
    numbers = shown(capsys, "plot", "memory", *words[:-2], "-o", str(tmp_path / "m.svg"), "--json", "-")
    for stage, bar in enumerate(json.loads(numbers)["bars"]):
        plan = zerosim.plan(plan_config(model=str(tmp_path), ranks=2, seq=8, micro_batch=2, stage=stage))
        assert bar["bytes"] == dict(plan.memory[0].marks["end_of_backward"].by_kind)
