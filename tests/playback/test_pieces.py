"""What travels and what is freed, as data: pieces carry the bytes that ranks sent, frees have their stage's line."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest

import zerosim
from zerosim.config import RunConfig
from zerosim.dtypes import dtype
from zerosim.playback import Recorded, encode, record
from zerosim.playback.frees import COPIES
from zerosim.playback.pieces import hops
from zerosim.train.plan import plan

SMALL: dict[str, Any] = dict(layers=2, hidden=16, heads=2, seq=8, micro_batch=1, steps=1)
WAYS = [
    dict(stage=stage, ranks=4, collective=collective, partition=partition)
    for stage in range(4)
    for collective in ("ring", "direct")
    for partition in ("slices", "owner")
    if stage or partition == "slices"
] + [
    dict(stage=3, ranks=4, tp=2, collective="ring"),
    dict(stage=3, ranks=4, dp_replicate=2),
    dict(stage=2, ranks=4, pp=2, accumulate=2, tie_embeddings=False),
    dict(stage=3, ranks=3, gather="module", collective="ring"),
]  # fmt: skip


@cache
def run_of(**changes: Any) -> dict[str, Any]:
    (run,) = encode(record(RunConfig(**{**SMALL, **changes})))["runs"]
    return run


def launches(run: dict[str, Any]) -> dict[tuple[int, int], list[Any]]:
    """Each rank's launch of each call."""
    return {(event[4], event[1]): event for event in run["events"] if event[0] == 4}


@pytest.mark.parametrize("changes", WAYS, ids=lambda changes: "-".join(map(str, changes.values())))
def test_pieces_carry_what_each_rank_sent(changes: dict[str, Any]) -> None:
    """Every call of model states over a state's own group has pieces, and they are its bytes."""
    run, seen = run_of(**changes), 0
    found = launches(run)
    for call, (number, state, flats) in run["travels"].items():
        group, sent = run["calls"][call][3], Counter[int]()
        for flat in flats:
            states = run["flats"][flat]["states"]
            cut = [one["parts"] for one in (states.get(state, {"whole": True}), *states.values()) if not one["whole"]]
            whole = run["flats"][flat]["numel"]
            parts = cut[0] if cut else [[at * whole // len(group), (at + 1) * whole // len(group)] for at in range(4)]
            for _, source, target, chunk, _ in run["hops"][number]:
                assert source != target
                start, stop = parts[chunk]
                sent[group[source]] += stop - start
        for rank in group:
            event = found[call, rank]
            assert sent[rank] * dtype(run["words"][event[5]]).itemsize == event[7]
            seen += 1
    data = ("dp_shard", "dp_replicate") if "dp_replicate" not in changes else ("dp_shard",)
    due = [call for call, one in enumerate(run["calls"]) if one[2] == "states" and one[1] in data]
    assert sorted(run["travels"]) == due
    assert seen > 0


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_ring_hands_each_sum_on_until_all_are_in_it(n: int) -> None:
    """The last hop of a chunk ends at its owner, with the gradients of all the others."""
    holds = {(member, chunk): {member} for member in range(n) for chunk in range(n)}
    for step, source, target, chunk, parts in hops("reduce_scatter", "ring", n):
        assert len(holds[source, chunk]) == parts == step + 1
        holds[target, chunk] |= holds[source, chunk]
    assert all(holds[owner, owner] == {*range(n)} for owner in range(n))
    has = {member: {member} for member in range(n)}
    for _, source, target, chunk, _ in hops("all_gather", "ring", n):
        assert chunk in has[source]
        has[target].add(chunk)
    assert all(chunks == {*range(n)} for chunks in has.values())
    assert hops("all_gather", "pairs", n) == []


def test_a_free_has_its_sentence_and_its_stages_line() -> None:
    """Of each gathered unit and each whole gradient one; every other buffer that dies has no line."""
    run = run_of(stage=3, ranks=4)
    numel = next(flat for flat in run["flats"] if flat["name"] == "h.0")["numel"]
    said = [sentence for _, sentence, _ in run["frees"]]
    assert said.count(f"Each rank frees {2 * numel:,} B of h.0's gathered parameters and keeps its quarter.") == 2
    assert said.count(f"Each rank frees {2 * numel:,} B of h.0's whole gradient and keeps its quarter.") == 1
    assert sum("lm_head's gathered" in one for one in said) == 2  # the head uses the embedding's buffer
    assert sum("wte's whole gradient" in one for one in said) == 1  # reduced once
    freed = {at: sentence for events, sentence, _ in run["frees"] for at in events}
    lines = Counter[tuple[str, str, bool]]()
    for at, event in enumerate(run["events"]):
        if event[0] == 1 and at in freed:
            file, _, function, text = run["sources"][run["lines"][at]]
            assert file == "parallel/zero3.py"
            lines[function, run["scopes"][event[2]][1], "reshard_after_forward(unit)" in text] += 1
        elif event[0] in (1, 10):
            assert run["lines"][at] == -1
    units = len(run["units"])
    assert lines["Zero3.post_forward", "forward", True] == 4 * units
    assert lines["Zero3.post_backward", "backward", False] == 4 * (units + len(run["flats"]))
    assert lines.total() == len(freed) == 4 * (2 * units + len(run["flats"]))


def test_who_frees_what() -> None:
    assert run_of(stage=0, ranks=4)["frees"] == run_of(stage=1, ranks=4)["frees"] == []
    two = run_of(stage=2, ranks=2)
    assert {what.rpartition(" and ")[2] for _, _, whats in two["frees"] for what in whats} == {"keeps its half"}
    piped = run_of(stage=2, ranks=4, pp=2, accumulate=2, tie_embeddings=False)["frees"]
    assert {sentence[:33] for _, sentence, _ in piped} == {f"Each rank of pipeline stage {at} fre" for at in (0, 1)}
    owner = run_of(stage=3, ranks=4, partition="owner")["frees"]
    assert any("keeps its local shard" in sentence for _, sentence, _ in owner)
    (planned,) = encode(Recorded(plan(RunConfig(stage=3, ranks=4, **SMALL), keep_events=True)))["runs"]
    assert len(planned["frees"]) == len(run_of(stage=3, ranks=4)["frees"])
    assert planned["lines"] == []
    kinds = {event[3]: event[5] for event in two["events"] if event[0] == 0 and event[1] == 0}
    freed = {two["events"][at][3] for events, _, _ in two["frees"] for at in events if two["events"][at][1] == 0}
    assert {two["words"][kinds[id]] for id in freed} <= COPIES.keys()


def test_the_bars_words_name_parts_and_letters() -> None:
    def text(**changes: Any) -> str:
        return str(run_of(**changes)["ranks"][0]["volume"]["text"])

    psi = run_of(stage=3, ranks=4)["parameters"]
    said = text(stage=3, ranks=4)
    assert said.startswith("The formula gives 3Ψ + 2VD for a step, ")
    assert f"Each Ψ on the bar is 3/4 of the {psi:,} parameters, {psi * 2 * 3 // 4:,} B: " in said
    assert f"its own 1/4, {psi // 4:,} parameters, to itself." in said
    assert "VD = 4,096: a tied table" in said
    assert "of this rank's " in text(stage=3, ranks=4, tp=2)
    assert "E = 4,096: a table on the first and the last pipeline stage" in text(stage=1, ranks=4, pp=2, accumulate=2)
    assert text(stage=3, ranks=1) == "The formula gives 0 for a step: nobody else holds the same."


def test_a_limit_is_the_runs_or_the_pages() -> None:
    result = zerosim.run(RunConfig(stage=3, ranks=2, capacity=10**9, **SMALL), keep_events=True)
    assert encode(Recorded(result))["runs"][0]["limit"] == 10**9
    assert encode(Recorded(result, limit=5))["runs"][0]["limit"] == 5
    assert run_of(stage=3, ranks=4)["limit"] is None
