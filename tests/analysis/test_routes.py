"""How tokens spread over experts: a run notes each choice, and a plan's assumption is what a run of it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerosim.analysis.experts_routes import Routes, assumed_routes, routes_of
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.train.run import run

BASE: dict[str, Any] = dict(
    model="llama", layers=2, hidden=16, heads=2, seq=8, experts=4, top_k=2, ranks=4, ep=2, stage=1, steps=2,
    accumulate=2, micro_batch=1,
)  # fmt: skip
MESHES: dict[str, dict[str, Any]] = {
    "ep": {},
    "one rank's experts": dict(ep=1),
    "sp": dict(tp=2, sequence_parallel=True, etp=1),
    "tp": dict(tp=2, ep=1),
    "cp": dict(cp=2),
    "pp": dict(pp=2),
    "recompute": dict(recompute="full", bias_rate=0.01),
}

WORDS = "plot experts --model llama --layers 2 --experts 4 --top-k 2 --ranks 2 --ep 2 --seq 8 --steps 1"


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_a_run_notes_every_choice_of_every_block_once(mesh: dict[str, Any]) -> None:
    config = RunConfig(**BASE | mesh)
    result = run(config)
    routes = routes_of(config, result.routed.chosen)
    assert list(routes.rows) == ["layers.0", "layers.1"]
    assert {sum(rows) for rows in routes.rows.values()} == {2 * config.tokens * len(result.steps)}
    assert result.to_dict()["routed"]["chosen"].keys() == result.routed.chosen.keys()


@pytest.mark.parametrize("routing", ["even", "zipf:1"])
@pytest.mark.parametrize("mesh", ["ep", "sp", "cp"])
def test_what_is_assumed_is_what_a_run_of_it_does(mesh: str, routing: str) -> None:
    config = RunConfig(**BASE | MESHES[mesh] | {"routing": routing, "steps": 1})
    assert routes_of(config, run(config).routed.chosen) == assumed_routes(config)


def test_the_fullest_rank_has_several_experts() -> None:
    routes = Routes({"layers.0": (6, 0, 1, 1)}, ep=2)
    assert routes.by_rank("layers.0") == (6, 2)
    assert routes.imbalance("layers.0") == 3.0
    assert routes.imbalance("layers.0", ranks=True) == 1.5


def test_a_heat_map_of_a_run_and_of_an_assumption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = WORDS.split()
    for more in ([], ["--routing", "zipf:1"]):
        assert main([*words, *more, "-q", "-o", str(tmp_path / "a.svg"), "--json", str(tmp_path / "a.json")]) == 0
        values = json.loads((tmp_path / "a.json").read_text("utf-8"))
        assert values["ep"] == 2
        assert [len(block["experts"]) for block in values["blocks"]] == [4, 4]
        assert "Tokens by expert" in (tmp_path / "a.svg").read_text("utf-8")
    assert main(["plot", "experts", "-o", str(tmp_path / "b.svg")]) == 2
    assert "gpt: has no experts; pass --experts 8 --top-k 2" in capsys.readouterr().err
