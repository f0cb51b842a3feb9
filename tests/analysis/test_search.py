"""Searches by trial, with trials that answer from a table: what is tried, in which order, and when a search ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from zerosim.analysis.cheapest import changes, cheapest_fit, cheapest_fits
from zerosim.analysis.meshes import ladders
from zerosim.analysis.search import MOST_MODELS, Trial, Tried, in_whole_nodes, largest_models, most_that_fits
from zerosim.config import RunConfig, plan_config
from zerosim.config.known import known_models
from zerosim.errors import InputError, OutOfMemory
from zerosim.train.plan import peak_within

SMALL: dict[str, Any] = dict(layers=1, hidden=16, heads=2, seq=8)


def config(**changes: Any) -> RunConfig:
    return RunConfig(**{**SMALL, "stage": 0, "ranks": 2, "micro_batch": 4, **changes})


class Trials:
    """Remembers what it was asked. A configuration needs `states` / its stage's share and `rest` per row."""

    def __init__(self, states: int, rest: int) -> None:
        self.states, self.rest = states, rest
        self.asked: list[RunConfig] = []

    def __call__(self, config: RunConfig, capacity: int) -> Mapping[str, int]:
        self.asked.append(config)
        share = config.mesh.ranks if config.parallel.zero_stage else 1
        return {"param": self.states // share, "activation": self.rest * config.data.micro_batch}


def needs(nbytes: Callable[[RunConfig], int], room: int, reserve: int = 0) -> Trial:
    """Return a trial on devices of that many bytes, of which a reserve is kept."""

    def trial(asked: RunConfig) -> Tried:
        peak = nbytes(asked)
        return Tried(asked, peak, reserve, too_small=("device",) * (peak + reserve > room))

    return trial


def peak(nbytes: int) -> Any:
    return lambda changed, capacity: {"param": nbytes}


def test_what_fills_a_device_to_the_last_byte_fits() -> None:
    assert cheapest_fit(config(), 1000, peak(1000)) == "--loss in-place would fit: its peak is 1.00 KB of 1.00 KB"
    assert cheapest_fit(config(), 1000, peak(1001)) is None


def test_a_change_that_leaves_too_much_beside_the_states_does_not_end_the_search() -> None:
    """Fewer rows may still help: only more ranks cannot."""
    trials = Trials(states=0, rest=100)
    found = cheapest_fit(config(stage=3, loss="chunked"), 200, trials)
    assert found is not None
    assert found.startswith("--micro-batch 2 --accumulate 2 would fit")
    assert [asked.data.micro_batch for asked in trials.asked] == [4, 4, 2]  # flash, selective, fewer rows


def test_more_ranks_are_tried_until_the_rest_alone_is_too_much() -> None:
    too_much = Trials(states=10_000, rest=101)
    assert cheapest_fit(config(stage=3, micro_batch=1), 100, too_much) is None
    assert [asked.mesh.ranks for asked in too_much.asked if asked.mesh.ranks > 2] == [4]
    just_enough = Trials(states=10_000, rest=100)  # with no states it would fit: every number of ranks is tried
    assert cheapest_fit(config(stage=3, micro_batch=1), 100, just_enough) is None
    assert [asked.mesh.ranks for asked in just_enough.asked if asked.mesh.ranks > 2] == [4, 8, 16, 32, 64]


def test_a_list_of_parts_is_followed_by_whole_blocks() -> None:
    for own, more in (("none", ["selective", "full"]), ("selective:mlp", ["full"]), ("full:2", ["full"]), ("full", [])):
        start = config(recompute=own, layers=2)
        tried = dict.fromkeys(changed.memory.recompute for changed, _ in changes(start))
        assert [name for name in tried if name != own] == more
        assert [one.memory.recompute for one in next(iter(ladders(start.replace(ranks=1), 4, 8)))] == [own, *more]


def test_changes_come_in_the_order_of_their_price_and_none_is_the_run_itself() -> None:
    start = config(micro_batch=4, accumulate=3)
    tried = list(changes(start))
    assert all(changed != start for changed, _ in tried)
    assert [flags for _, flags in tried] == [
        "--loss in-place", "--stage 1", "--stage 2", "--stage 3", "--attention flash", "--loss chunked",
        "--recompute selective",
        "--micro-batch 2 --accumulate 6", "--micro-batch 1 --accumulate 12", "--recompute full",
        "--stage 3 --micro-batch 2 --accumulate 6", "--stage 3 --micro-batch 1 --accumulate 12",
        *(words for least in ("--stage 3 --attention flash", "--stage 3 --attention flash --recompute full")
          for words in (least, f"{least} --micro-batch 2 --accumulate 6", f"{least} --micro-batch 1 --accumulate 12")),
        *(f"{ways} --micro-batch 1 --cp 2 --accumulate 24"
          for ways in ("--attention flash", "--stage 3 --attention flash --recompute full")),
        *(f"--stage 3 --attention flash --recompute full --micro-batch 1{accumulate} --ranks {ranks}"
          for ranks, accumulate in ((4, " --accumulate 6"), (8, ""), (16, " --accumulate 1"), (32, " --accumulate 1"),
                                    (64, " --accumulate 1"))),
    ]  # fmt: skip


def test_offload_comes_after_what_the_device_can_do_and_before_more_devices() -> None:
    """Where a node says what it has; what is offloaded already stays so, and goes no nearer to the device."""
    start, on_host = config(micro_batch=1, stage=2), "--offload optimizer=host"

    def tried(*memories: str, **own: str) -> list[str]:
        asked = list(changes(start.replace(**own), memories))
        assert all(changed.offload.where for changed, flags in asked if "offload" in flags or own)
        return [flags for _, flags in asked if "--offload" in flags and "--recompute" not in flags]

    alone = [on_host, f"--stage 3 {on_host}", f"--stage 3 {on_host},params=host"]
    assert tried() == tried("nvme") == []
    assert tried("host") == alone
    assert tried("host", "nvme") == [*alone, "--stage 3 --offload optimizer=nvme,params=nvme"]
    assert tried("host", "nvme", offload="optimizer=host") == alone[2:] + tried("host", "nvme")[3:]
    order = [flags for _, flags in changes(start, ("host",))]
    last = max(at for at, flags in enumerate(order) if "--offload" in flags)
    assert order.index(on_host) > order.index("--recompute full")
    assert all("--ranks" in flags for flags in order[last + 1 :])
    least = "--stage 3 --offload optimizer=host --attention flash --recompute full"
    assert least in order


def test_a_change_that_other_options_exclude_is_passed_over_and_a_weaker_one_takes_its_place() -> None:
    """Whole blocks are not recomputed beside --offload-activations; stage 3 has no --overlap-param-gather."""
    tried = [flags for _, flags in changes(config(offload_activations=True, micro_batch=1))]
    assert not any("--recompute full" in flags for flags in tried)
    assert "--stage 3 --attention flash --recompute selective" in tried
    assert all("--recompute selective" in flags for flags in tried if "--ranks" in flags)
    tried = [flags for _, flags in changes(config(overlap_param_gather=True, stage=1, micro_batch=1))]
    assert {flags.split()[1] for flags in tried if "--stage" in flags} == {"2"}
    assert "--stage 2 --attention flash --recompute full" in tried


def test_what_has_no_effect_after_a_change_goes_with_it() -> None:
    live = config(stage=3, prefetch_elements=10, max_live=100)
    tried = {flags: changed for changed, flags in changes(live)}
    assert tried["--prefetch-elements 0 --max-live 0"] == live.replace(prefetch_elements=0, max_live=0)


def test_more_ranks_have_as_few_microbatches_as_a_pipeline_can_group() -> None:
    """Groups of 3 on 2 pipeline stages: of 4 microbatches one would be left alone."""
    grouped = config(layers=4, pp=2, stage=1, accumulate=6, pipeline="interleaved", micro_batch_group=3, micro_batch=1)
    counts = {changed.mesh.ranks: changed.data.accumulate for changed, _ in changes(grouped)}
    assert [counts[ranks] for ranks in (4, 8, 16)] == [3, 3, 3]


def test_a_trial_that_refuses_a_change_does_not_end_the_search() -> None:
    def trial(asked: RunConfig, capacity: int) -> Mapping[str, int]:
        if asked.data.accumulate > 1:
            raise InputError("accumulate 2: a plan would record too many events")
        return {"activation": 100 * asked.data.micro_batch, "param": 100 if asked.mesh.ranks == 2 else 0}

    assert [tip.split(" would")[0] for tip in cheapest_fits(config(micro_batch=2), 120, trial)] == [
        "--stage 3 --attention flash --recompute full --micro-batch 1 --ranks 4"
    ]


def test_what_another_memory_refuses_does_not_fit() -> None:
    def trial(asked: RunConfig, capacity: int) -> Mapping[str, int]:
        if asked.offload.memory_of("params") == "device" and asked.offload.is_on:
            raise OutOfMemory("the host is full", memory="host")
        return {"param": 1 if asked.offload.is_on else 100}

    found = cheapest_fits(config(), 50, trial, memories=("host", "nvme"))
    assert found[0].startswith("--stage 3 --offload optimizer=host,params=host would fit")


def test_nothing_is_advised_that_is_set_already() -> None:
    """Every flag changes something."""
    start = config(stage=3, micro_batch=1, recompute="full", attention="flash", loss="in-place", accumulate=4)
    expected = ["--cp 2 --accumulate 8", "--accumulate 2 --ranks 4", "--accumulate 1 --ranks 8"]
    assert [flags for _, flags in changes(start)][:3] == expected
    most = config(stage=3, ranks=65536, micro_batch=1, recompute="full", attention="flash", loss="in-place", seq=7)
    assert list(changes(most)) == []
    assert not any("--stage" in flags for _, flags in changes(config(stage=1, own_grads_only=True)))  # of stage 1 alone


def test_a_leaner_loss_is_advised_where_logits_decide() -> None:
    """A small model with a large vocabulary and long rows: the logits and their gradient are most of the peak."""
    start = plan_config(
        model="gpt", layers=2, hidden=64, heads=2, seq=512, vocab=50_000, micro_batch=2, stage=3, ranks=2,
        attention="flash", recompute="full",
    )  # fmt: skip
    logits = 2 * 2 * 512 * 50_000
    peak = {loss: sum(peak_within(start.replace(loss=loss), None).values()) for loss in ("lean", "in-place", "chunked")}
    assert 2 * logits > 0.8 * peak["lean"]
    assert peak["lean"] > peak["in-place"] > peak["chunked"]
    advised = [
        cheapest_fit(start.replace(loss=own), room, peak_within)
        for own, room in ((None, peak["lean"] - 1), ("torch", peak["in-place"] - 1), ("in-place", peak["in-place"] - 1))
    ]
    assert [(words or "").split(" would")[0] for words in advised] == [
        "--loss in-place", "--loss chunked", "--loss chunked"
    ]  # fmt: skip
    assert not any("--loss" in flags for _, flags in changes(start.replace(loss="chunked")))
    few = start.replace(micro_batch=1, seq=64)  # no more tokens than the model is wide
    assert not any("chunked" in flags for _, flags in changes(few))
    assert all("--loss chunked" in flags for _, flags in changes(start) if "--ranks" in flags)


def test_the_cheapest_changes_are_those_that_fit_beside_the_reserve_and_none_contains_another() -> None:
    """Stage 1 alone fits, so nothing with a higher stage is listed; half the rows fit too, and fewer are not."""
    trials = Trials(states=600, rest=100)  # 400 of activations at 4 rows
    assert cheapest_fits(config(), 700, trials) == [
        "--stage 1 would fit: its peak is 700 B of 700 B",
        "--micro-batch 1 --accumulate 4 would fit: its peak is 700 B of 700 B",
    ]
    assert [words.split(" would")[0] for words in cheapest_fits(config(), 700, trials, reserve=lambda asked: 1)] == [
        "--stage 3 --micro-batch 2 --accumulate 2"
    ]


def test_a_change_keeps_the_global_batch_while_it_can() -> None:
    start = config(micro_batch=6, accumulate=2)
    assert start.global_batch == 24
    for changed, flags in changes(start):
        assert changed.global_batch == max(1, 24 // changed.mesh.ranks) * changed.mesh.ranks, flags
        for word, value in zip(flags.split()[::2], flags.split()[1::2], strict=True):
            assert str(changed.to_dict()[word.removeprefix("--").replace("-", "_")]) == value, flags


@pytest.mark.parametrize("edge", [1, 2, 3, 4, 5, 7, 8, 9, 100, 127, 128, 129])
def test_a_search_finds_the_edge(edge: int) -> None:
    found = most_that_fits(config(), "micro_batch", needs(lambda asked: 10 * asked.data.micro_batch, 10 * edge))
    assert found.best is not None
    assert found.beyond is not None
    assert (found.best.value, found.best.peak_bytes, found.beyond.value) == (edge, 10 * edge, edge + 1)
    trial = needs(lambda asked: -(-1000 * edge // asked.mesh.ranks), 1000)
    ranks = most_that_fits(config(stage=3), "ranks", trial)
    assert ranks.best is not None
    assert ranks.best.value == edge
    assert (ranks.beyond.value if ranks.beyond else 0) == edge - 1


def test_what_is_kept_beside_the_peak_moves_the_edge() -> None:
    trial = needs(lambda asked: 1200 // asked.mesh.ranks, 600, reserve=100)
    found = most_that_fits(config(stage=3, ranks=1), "ranks", trial)
    assert found.best is not None
    assert found.beyond is not None
    assert (found.best.value, found.best.peak_bytes, found.best.reserve_bytes, found.beyond.value) == (3, 400, 100, 2)
    assert [tried.taken_bytes for tried in sorted(found.tried, key=lambda tried: tried.value)][:2] == [1300, 700]


def test_a_search_ends_at_the_highest_value_and_below_the_lowest() -> None:
    found = most_that_fits(config(), "seq", needs(lambda asked: 1, 10))
    assert found.best is not None
    assert (found.best.value, found.beyond) == (10**8, None)
    assert found.best.value == max(tried.value for tried in found.tried)
    nothing = most_that_fits(config(), "seq", needs(lambda asked: 11, 10))
    assert (nothing.best, [tried.value for tried in nothing.tried]) == (None, [1])
    assert most_that_fits(config(stage=3), "ranks", needs(lambda asked: 11, 10)).best is None


def test_a_longer_row_brings_a_longer_table_and_a_shorter_one_keeps_it() -> None:
    found = most_that_fits(config(positions=16), "seq", needs(lambda asked: asked.model.seq, 40))
    tables = {tried.value: tried.config.model.positions for tried in found.tried}
    assert tables == {seq: max(seq, 16) for seq in tables}
    assert min(tables) < 16 < max(tables)


@pytest.mark.parametrize(
    ("field", "mesh", "values"),
    [
        ("ranks", {"ranks": 4, "tp": 2, "pp": 2, "layers": 2}, {4, 8}),
        ("layers", {"ranks": 2, "pp": 2, "layers": 4, "balance_ends": True}, {0, 2, 4, 6}),
        ("seq", {"ranks": 2, "tp": 2, "sequence_parallel": True}, {2, 4, 6, 8}),
    ],
)
def test_searches_keep_to_what_a_mesh_divides(field: str, mesh: dict[str, Any], values: set[int]) -> None:
    """Only multiples are tried: the others could not be run."""
    asked = config(**{"stage": 1, **mesh})

    def nbytes(changed: RunConfig) -> int:
        got: int = changed.value(field)
        return 100 * got if field != "ranks" else 4800 // got

    found = most_that_fits(asked, field, needs(nbytes, 600))
    assert found.best is not None
    assert {tried.value for tried in found.tried} <= values | {8, 10, 14, 16}
    assert found.best.value == max(values) if field == "ranks" else 6


@pytest.mark.parametrize("edge", [1, 2, 5, 8, 12, 37, 100])
def test_a_search_passes_over_refused_values_and_finds_the_edge_of_the_others(edge: int) -> None:
    """Only multiples of 3 can be planned, up to 63."""

    def nbytes(asked: RunConfig) -> int:
        if asked.data.micro_batch % 3 or asked.data.micro_batch > 63:
            raise InputError(f"micro_batch {asked.data.micro_batch}: choose another one", field="micro_batch")
        return asked.data.micro_batch

    found = most_that_fits(config(micro_batch=3), "micro_batch", needs(nbytes, edge))
    assert {tried.value % 3 for tried in found.tried} == {0}
    assert (found.best and found.best.value) == (min(edge, 63) // 3 * 3 or None)
    assert (found.beyond and found.beyond.value) == (None if edge > 63 else edge // 3 * 3 + 3)
    assert found.refusal.startswith("--micro-batch 6" if edge > 63 else "--micro-batch ")


def test_a_search_tries_ranks_that_fill_nodes_and_secondary_shards() -> None:
    for given, ranks in (
        ({"ranks_per_node": 6}, 18),
        ({"secondary_shard": 4}, 16),
        ({"ranks_per_node": 2, "tp": 2}, 14),
    ):
        asked, trial = config(stage=3, ranks=12, **given), needs(lambda asked: 1400 // asked.mesh.ranks, 100)
        found = most_that_fits(asked, "ranks", trial)
        assert found.best is not None
        assert found.best.value == ranks
        whole = in_whole_nodes(asked, found, 8, trial)
        assert whole.whole_nodes is not None
        assert whole.whole_nodes.value == {18: 24}.get(ranks, 16)


def test_a_search_whose_own_value_is_refused_says_so() -> None:
    def trial(asked: RunConfig) -> Tried:
        raise InputError(f"freeze 'nothing': matches no parameter, of {asked.data.micro_batch} rows")

    with pytest.raises(InputError, match="matches no parameter, of 4 rows"):
        most_that_fits(config(micro_batch=4), "micro_batch", trial)


def test_candidates_are_meshes_that_the_model_can_be_cut_for() -> None:
    meshes = {
        (c[0].mesh.tp, c[0].mesh.pp, c[0].mesh.shards, c[0].parallel.zero_stage)
        for c in ladders(config(layers=2, heads=2, vocab=257, ranks=4), 4, 8)
    }
    assert {mesh[:3] for mesh in meshes} == {(1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1)}  # not tp 4, not pp 4
    assert {stage for *mesh, stage in meshes if mesh == [1, 2, 2]} == {1, 2, 3}
    odd = ladders(config(layers=2, vocab=257, ranks=4), 4, 8)
    assert all(c[0].parallel.pad_vocab == (c[0].mesh.tp > 1) for c in odd)


def test_ranks_that_fill_nodes_are_the_next_ones_that_the_mesh_divides() -> None:
    def found(edge: int, node: int, **mesh: Any) -> tuple[int, int] | None:
        asked = config(stage=3, ranks=mesh.get("tp", 1), hidden=32, heads=16, **mesh)
        trial = needs(lambda asked: 1000 // asked.mesh.ranks, edge)
        searched = most_that_fits(asked, "ranks", trial)
        whole = in_whole_nodes(asked, searched, node, trial)
        assert whole.tried[: len(searched.tried)] == searched.tried
        return (whole.best.value, whole.whole_nodes.value) if whole.best and whole.whole_nodes else None

    assert found(334, 8) == (3, 8)
    assert found(100, 8) == (10, 16)
    assert found(125, 8) == (8, 8)
    assert found(100, 4, tp=2) == (10, 12)
    assert found(100, 4, tp=8) == (16, 16)
    assert found(0, 8) == (1001, 1008)


@pytest.mark.slow  # builds every model
def test_the_largest_model_is_sought_among_all_that_have_a_name() -> None:
    """From the largest down, until the first few fit."""
    nothing = largest_models(RunConfig(), needs(lambda asked: 1, 0))
    assert nothing.best is None
    assert {one.config.model.name for one in nothing.tried} == set(known_models())
    numels = [one.value for one in nothing.tried]
    assert numels == sorted(numels, reverse=True)
    third = nothing.tried[2].config
    some = largest_models(RunConfig(), needs(lambda asked: asked.model.layers * 100, third.model.layers * 100))
    fitting = [one for one in some.tried if one.fits]
    assert some.best == fitting[0]
    assert len(fitting) == MOST_MODELS
    assert some.tried[-1].fits
