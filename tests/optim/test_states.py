"""Optimizer states by weight: a whole optimizer's states are assembled from those of all ranks, and cut for another
number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from zerosim.config import RunConfig
from zerosim.dtypes import fp32
from zerosim.optim.by_name import make_optimizer
from zerosim.optim.optimizer import Add, Optimizer, Step
from zerosim.optim.states import StateArray, by_weight
from zerosim.placement.assemble import Piece, assemble
from zerosim.placement.layout import Layout
from zerosim.placement.partition import Slice, whole
from zerosim.placement.spec import FlatSpec
from zerosim.placement.split import take
from zerosim.tensor.flat import Flat
from zerosim.train.build import declare
from zerosim.train.run import run

States = dict[tuple[int, str], dict[str, Any]]
"""Every rank's arrays of states, by flat buffer and name."""

SMALL: dict[str, Any] = {"layers": 2, "hidden": 48, "heads": 4, "seq": 8, "steps": 2, "precision": "fp32"}


class Watched:
    """An optimizer whose states are kept after every step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.cut, self.foreach_temporaries = optimizer.cut, 0
        self.states: States = {}

    def arrays(self, spec: FlatSpec, own: Slice, dtype: Any) -> Any:
        return self.optimizer.arrays(spec, own, dtype)

    def step(self, flat: Flat, now: Step, add: Add) -> None:
        self.optimizer.step(flat, now, add)
        to_host = flat.device.backend.to_host
        self.states[flat.device.rank, flat.name] = {name: to_host(one.array) for name, one in flat.states.items()}


def trained(config: RunConfig) -> tuple[Layout, Watched]:
    watched = Watched(make_optimizer(config.optim, config.tokens))
    return run(config, optimizer=watched).layout, watched


def arrays_of(watched: Watched, flat: FlatSpec, own: Slice) -> list[StateArray]:
    return list(watched.arrays(flat, own, fp32))


def layout_of(layout: Layout, watched: Watched) -> Layout:
    """A buffer for each state of each weight, on its weight's pipeline stages."""
    flats, stages = list[FlatSpec](), [list[str]() for _ in layout.stages]
    for flat in layout.flats.values():
        arrays = {array.name: array for array in arrays_of(watched, flat, whole(flat.numel))}
        for mine, places in by_weight([*arrays.values()], flat, whole(flat.numel)):
            own = [FlatSpec(one.name, (one,)) for one in (arrays[name].spec(mine.weight) for name in places)]
            flats += own
            for names, of in zip(stages, layout.stages, strict=True):
                names += [one.name for one in own] if flat.name in of else []
    return Layout(layout.mesh, flats, layout.rows(next(iter(layout.flats))), stages)


def taken(layout: Layout, watched: Watched, states: States) -> Iterator[Piece]:
    """The pieces of every weight's states on all ranks."""
    for (rank, name), arrays in states.items():
        flat, own = layout.flats[name], layout.own(rank, name)
        known = {array.name: array for array in arrays_of(watched, flat, own)}
        for mine, places in by_weight([*known.values()], flat, own):
            for state, at in places.items():
                start, stop = known[state].numbers(mine)
                spec = known[state].spec(mine.weight)
                yield Piece(rank, spec.name, Slice(start, stop, spec.numel), arrays[state][at])


def cut(layout: Layout, watched: Watched, of: Mapping[str, Any]) -> States:
    """The arrays of all ranks of a layout, cut from whole states; padding is zero."""
    found: States = {}
    for rank in range(layout.mesh.world_size):
        for name in layout.stages[layout.mesh.index(rank, "pp")]:
            flat, own = layout.flats[name], layout.own(rank, name)
            arrays = {array.name: array for array in arrays_of(watched, flat, own)}
            values = dict[str, Any]()
            for mine, places in by_weight([*arrays.values()], flat, own):
                for state, at in places.items():
                    spec, (start, stop) = arrays[state].spec(mine.weight), arrays[state].numbers(mine)
                    local = take(of[spec.name], spec.cuts(layout.mesh, rank)).reshape(-1)[start:stop]
                    values.setdefault(state, np.zeros(arrays[state].numel, local.dtype))[at] = local
            if own.size:
                found[rank, name] = values
    return found


def assembled(layout: Layout, watched: Watched, states: States) -> dict[str, Any]:
    return assemble(layout_of(layout, watched), taken(layout, watched, states))


def same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


CASES: list[dict[str, Any]] = [
    {"optimizer": "adamw"},
    {"optimizer": "adamw", "tp": 2, "pp": 2, "accumulate": 2, "model": "llama", "kv_heads": 1},
    {"optimizer": "adam8bit"},
    {"optimizer": "adam8bit", "tp": 2},
    {"optimizer": "adafactor"},
    {"optimizer": "adafactor-hf", "momentum": 0.9},
    {"optimizer": "muon", "partition": "owner"},
    {"optimizer": "sgd", "momentum": 0.9, "gather": "module"},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_states_of_n_ranks_are_assembled_and_cut_for_m(changes: dict[str, Any]) -> None:
    """Of 4 data ranks for 3, and back: every array has the bits and the length that it had."""
    each = changes.get("tp", 1) * changes.get("pp", 1)
    four, three = (RunConfig(**SMALL, **changes, stage=3, ranks=ranks * each) for ranks in (4, 3))
    layout, watched = trained(four)
    states = assembled(layout, watched, watched.states)
    assert any(values.any() for values in states.values())
    other = declare(three).layout
    others = cut(other, watched, states)
    assert same(assembled(other, watched, others), states)
    back = cut(layout, watched, states)
    for place, arrays in watched.states.items():
        spec, own = layout.flats[place[1]], layout.own(*place)
        known = {array.name: array for array in arrays_of(watched, spec, own)}
        assert {name: values.size for name, values in arrays.items()} == {n: a.numel for n, a in known.items()}
        assert same({n: v for n, v in back[place].items() if v.size}, {n: v for n, v in arrays.items() if v.size})


@pytest.mark.parametrize("changes", [CASES[0], CASES[2], CASES[6]], ids=str)
def test_shards_are_assembled_into_what_one_rank_has_whole(changes: dict[str, Any]) -> None:
    """At stage 0 each rank has all states: those that stage 3's shards make, bit for bit."""
    whole_states, shards = (
        assembled(*found, found[1].states)
        for found in (trained(RunConfig(**SMALL, **changes, stage=stage, ranks=4)) for stage in (0, 3))
    )
    assert same(whole_states, shards)
