"""Memory-centric tiling (`nn/tiles.py`): the same model within rounding, with 1/T of a map on the device at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_shapes import assert_same_record

from zerosim.analysis.checks import checks
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.device.device import Kind
from zerosim.device.events import Alloc, Event, Free, Launch
from zerosim.train.plan import plan
from zerosim.train.run import run

SIZES: dict[str, Any] = dict(
    layers=2, hidden=16, heads=4, seq=8, micro_batch=1, steps=2, ranks=3, stage=3, gather="module", precision="fp64"
)
CASES: list[dict[str, Any]] = [
    dict(accumulate=2, clip_norm=0.1),
    dict(recompute="full", dropout=0.1, prefetch=2),
    dict(model="llama", kv_heads=2, recompute="selective:mlp,layernorm,attn_proj"),
    dict(ranks=4, pp=2, accumulate=2, pipeline="zb-h1"),
    dict(ranks=4, dp_replicate=2, partition="owner", prefetch_elements=300),
]


def config(**fields: Any) -> RunConfig:
    return RunConfig(**{**SIZES, **fields})


@pytest.mark.quick(1)
@pytest.mark.parametrize("tiles", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_are_the_map_within_rounding_and_what_they_send_is_its_form(case: dict[str, Any], tiles: int) -> None:
    """By SGD, whose step is the gradient: Adam would turn the rounding of a gradient of zero into a step of 1."""
    fields = case | dict(optimizer="sgd", lr=0.5)
    whole, tiled = run(config(**fields)), run(config(**fields, tiles=tiles))
    np.testing.assert_allclose(tiled.losses, whole.losses, rtol=1e-13, atol=0)
    assert list(tiled.weights) == list(whole.weights)
    for name, values in whole.weights.items():
        np.testing.assert_allclose(tiled.weights[name], values, rtol=0, atol=1e-12, err_msg=name)
    assert tiled.live_bytes_after == [0] * tiled.config.mesh.ranks
    for stage in range(tiled.config.mesh.pp):
        assert all(check.agrees for check in [*checks(tiled)[stage].states, *checks(tiled, 1)[stage].sent])


@pytest.mark.quick(1)
@pytest.mark.parametrize("fields", [CASES[1], CASES[2], dict(offload="params=host,optimizer=host", precision="bf16")])
def test_shapes_leave_the_record_of_a_real_run(fields: dict[str, Any]) -> None:
    assert_same_record(config(**fields, tiles=2))


def test_weights_go_in_and_out_under_the_maps_names(tmp_path: Path) -> None:
    trained, file = run(config(tiles=4)).weights, tmp_path / "weights.npz"
    np.savez(file, **trained)
    again = run(config(tiles=2, lr=1e-300, optimizer="sgd", steps=1, weights=str(file))).weights
    for name, values in trained.items():
        np.testing.assert_array_equal(again[name], values, err_msg=name)


def most_gathered(events: list[Event]) -> int:
    """The most bytes of gathered parameters of blocks that are live at a time."""
    live, most = dict[int, int](), 0
    for event in events:
        if isinstance(event, Alloc) and event.kind == Kind.UNSHARDED_PARAM and event.scope.unit.startswith("h."):
            live[event.id] = event.nbytes
        elif isinstance(event, Free):
            live.pop(event.id, None)
        most = max(most, sum(live.values()))
    return most


@pytest.mark.parametrize("tiles", [1, 2, 4, 8])
def test_a_tile_of_a_map_is_gathered_at_a_time(tiles: int) -> None:
    """The largest map has 4 h^2 weights and 4 h biases, in 2 bytes each."""
    h = 64
    events = plan(config(hidden=h, ranks=2, steps=1, precision="bf16", tiles=tiles), keep_events=True).events[0]
    assert most_gathered(events) == 2 * (4 * h * h + 4 * h) // tiles
    launched = [e.scope.unit for e in events if isinstance(e, Launch) and ".c_fc" in e.scope.unit]
    tile = ["h.0.mlp.c_fc"] if tiles == 1 else [f"h.0.mlp.c_fc.tile{i}" for i in range(tiles)]
    assert [unit for unit in dict.fromkeys(launched) if unit.startswith("h.0")] == tile


@pytest.mark.quick(1)
@pytest.mark.parametrize(("tiles", "thousands"), [(1, 8), (2, 16), (4, 32), (16, 64)])
def test_the_papers_widths_need_no_buffer_above_2_gib(tiles: int, thousands: int) -> None:
    """Figure 6b: the largest width that trains where no piece of memory above 2 GB is free, by number of tiles."""
    h = thousands * 1024
    wide = config(layers=1, hidden=h, heads=64, seq=16, ranks=16, steps=1, precision="fp16", tiles=tiles)
    events = plan(wide, keep_events=True).events[0]
    of_maps = [
        e.nbytes for e in events if isinstance(e, Alloc) and e.scope.unit.startswith("h.") and "c_" in e.scope.unit
    ]
    kinds = {e.nbytes for e in events if isinstance(e, Alloc) and e.kind == Kind.UNSHARDED_PARAM}
    assert 8 * h * h // tiles in kinds
    assert max(of_maps) <= 2**31


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--stage 3 --tiles 4", "choose gather module"),
        ("--stage 2 --tiles 4", "stage"),
        ("--stage 3 --gather module --tiles 3", "choose a divisor of"),
        ("--stage 3 --gather module --tiles 2 --tp 2", "leave one of them out"),
        ("--stage 3 --gather module --tiles 2 --lora-rank 4", "need whole maps"),
        ("--stage 3 --gather module --tiles 2 --optimizer adafactor", "choose adam"),
        ("--stage 3 --gather module --tiles 0", "1"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--ranks", "2", "--steps", "1", *flags.split()]) == 2
    assert said in capsys.readouterr().err
