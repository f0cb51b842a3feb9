"""What frameworks hold beside the paper's states in a reduction or a step: the same bits, and the bytes of each."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
from test_shapes import assert_same_record, small

from zerosim.analysis.formulas import BytesPerParameter, optimizer_step_states
from zerosim.device.events import Alloc, Launch
from zerosim.train.run import run

CHOICES: dict[str, dict[str, Any]] = {
    "ddp": dict(stage=0, recipe="ddp", accumulate=2),
    "views": dict(
        stage=0, grad_buckets="views", accumulate=2, tie_embeddings=False
    ),  # a tied table is added at each use
    "gathered by pieces": dict(stage=1, allgather_bucket=100),
    "gathered by pieces, all-reduced": dict(stage=2, allgather_bucket=3, grad_reduction="all_reduce"),
    "sub-groups": dict(stage=3, recipe="deepspeed", sub_group=1000, reduce_bucket=0, clip_norm=0.0),
    "foreach": dict(stage=3, foreach=True, optimizer="adamw"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", CHOICES)
def test_no_bit_changes_and_shapes_leave_the_same_record(name: str) -> None:
    settings = {"ranks": 2, "layers": 1, **CHOICES[name]}
    ours = run(small(**settings), keep_events=True)
    same = ("ranks", "layers", "accumulate", "optimizer", "tie_embeddings")
    paper = run(small(stage=0, **{key: settings[key] for key in same if key in settings}))
    assert ours.losses == paper.losses
    assert all((ours.weights[key] == paper.weights[key]).all() for key in paper.weights)
    assert ours.live_bytes_after == [0] * ours.config.mesh.ranks
    assert_same_record(ours.config, ours)


def test_ddps_buckets_are_two_bytes_a_parameter_more_from_start_to_end() -> None:
    """With views there are only the buckets, and what backward leaves is one weight's gradient at a time."""
    copies, views, paper = (
        run(small(ranks=2, stage=0, grad_buckets=kind)).memory[0] for kind in ("copies", "views", "none")
    )
    psi = run(small(ranks=2, stage=0)).num_parameters
    for name, mark in paper.marks.items():
        assert copies.marks[name].by_kind.get("comm", 0) == 2 * psi
        assert copies.marks[name].total_bytes - mark.total_bytes == 2 * psi
        assert views.marks[name].by_kind["grad"] == 2 * psi
    assert paper.marks["after_step"].by_kind.get("grad", 0) == 0


def test_an_allgather_bucket_is_never_exceeded_and_moves_the_same_bytes() -> None:
    results = [
        run(small(ranks=2, stage=2, steps=1, allgather_bucket=bucket, bucket_bytes=None), keep_events=True)
        for bucket in (0, 101)
    ]
    whole, pieces = results
    assert pieces.sent_bytes(0, 0) == whole.sent_bytes(0, 0)
    into = [e.nbytes for e in pieces.events[0] if isinstance(e, Alloc) and e.kind == "comm"]
    assert max(into) == 2 * 100
    gathers = [e for e in pieces.events[0] if isinstance(e, Launch) and e.op == "all_gather"]
    sizes = [pieces.layout.padded(name) // 2 for name in pieces.layout.flats]
    assert len(gathers) == len(into) == sum(ceil(size / 50) for size in sizes)


def test_a_sub_group_ends_with_what_fills_it() -> None:
    """fp32 copies of one group are there at once; without groups those of all."""
    settings = small(ranks=2, stage=3, layers=3, upcast_grads=True, steps=1)
    result = run(settings.replace(sub_group=2000), keep_events=True)
    sizes = [result.layout.padded(name) // 2 for name in result.layout.flats]
    first = next(sum(sizes[:count]) for count in range(1, len(sizes) + 1) if sum(sizes[:count]) >= 2000)
    assert first < sum(sizes)
    marks, whole = result.memory[0].marks, run(settings).memory[0].marks
    copied = {"groups": first, "all": sum(sizes)}
    for name, held in (("groups", marks), ("all", whole)):
        assert held["gradients_upcast"].total_bytes - held["end_of_backward"].total_bytes == 4 * copied[name]
    cost = BytesPerParameter(2, 2, 12)
    for sub_group, copied in ((100, 100), (300, 250)):
        form = optimizer_step_states(3, cost, upcast_grads=True, sub_group=sub_group)["upcast"]
        assert form.at(Ψ=1000, N=4) == 4 * copied


@pytest.mark.parametrize(
    ("optimizer", "count"),
    [
        (dict(optimizer="adamw"), 1),
        (dict(optimizer="adam", weight_decay=0.1), 2),
        (dict(optimizer="adam"), 1),
        (dict(optimizer="sgd", momentum=0.9), 0),
        (dict(optimizer="sgd", weight_decay=0.1), 1),
    ],
    ids=str,
)
def test_foreach_holds_arrays_of_the_own_slices_size_while_it_steps(optimizer: dict[str, Any], count: int) -> None:
    result = run(small(ranks=2, stage=2, steps=1, foreach=True, **optimizer), keep_events=True)
    temporaries = [
        e.nbytes for e in result.events[0] if isinstance(e, Alloc) and e.kind == "temp" and e.scope.phase == "optimizer"
    ]
    own = sum(result.layout.padded(name) // 2 for name in result.layout.flats)
    plain = run(small(ranks=2, stage=2, steps=1, **optimizer), keep_events=True)
    others = [
        e.nbytes for e in plain.events[0] if isinstance(e, Alloc) and e.kind == "temp" and e.scope.phase == "optimizer"
    ]
    assert sum(temporaries) - sum(others) == 4 * own * count
