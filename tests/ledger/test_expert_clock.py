"""The clock of models with experts: all-to-alls by link, tokens sent once to a node, the host that reads counts."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest

from zerosim.config import plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.device.copies import CONTROL
from zerosim.device.events import Copy, Kernel, Launch, Scope
from zerosim.device.work import GROUPED
from zerosim.grading.waiting import OnPaper
from zerosim.ledger.clock import simulate
from zerosim.ledger.collectives import collective_seconds
from zerosim.ledger.costs import topology
from zerosim.ledger.costs_of import costs_of
from zerosim.ledger.entries import Busy, Entry
from zerosim.ledger.experts import Shares, bytes_by_link, copies_of_row, relayed_seconds
from zerosim.placement.memories import DEVICE, HOST
from zerosim.placement.mesh import Mesh
from zerosim.report.experts import expert_links
from zerosim.train.plan import plan
from zerosim.units import format_bytes

ALL, HALF = Fraction(1), Fraction(1, 2)
H100 = cluster_of(find_hardware("h100-80"))
FREE = replace(H100, collectives=None, latency=0.0, link=100.0, nic=80.0)  # 10 bytes a second for each of 8 GPUs
SMALL: dict[str, Any] = dict(
    model="mixtral", layers=2, hidden=64, heads=4, seq=64, vocab=128, experts=16, top_k=2, expert_ffn=64,
    ranks=16, ep=16, stage=1, recipe="megatron",
)  # fmt: skip


def rows_sent(nbytes: int) -> Launch:
    return Launch(Scope(0), 1, "all_to_all", "bf16", "activations", "ep", tuple(range(16)), 0, nbytes, 0, 0)


@pytest.mark.parametrize(("experts", "top_k", "nodes"), [(8, 1, 2), (8, 2, 2), (8, 3, 4), (12, 4, 3), (4, 2, 4)])
def test_a_token_is_sent_once_to_each_of_its_nodes(experts: int, top_k: int, nodes: int) -> None:
    """The mean over all choices of k experts, by enumeration."""
    each = experts // nodes
    choices = list(combinations(range(experts), top_k))
    needed = sum(len({expert // each for expert in chosen}) for chosen in choices)
    assert copies_of_row(experts, top_k, ALL, nodes) == pytest.approx(needed / (len(choices) * top_k), rel=1e-12)


def test_a_limit_of_groups_limits_the_nodes() -> None:
    """DeepSeek-V3's 8 experts of 256, in at most 4 of 8 groups: 3.62 nodes of 8, not 5.3."""
    assert copies_of_row(256, 8, HALF, 8) * 8 == pytest.approx(copies_of_row(128, 8, ALL, 4) * 8)
    assert copies_of_row(256, 8, HALF, 8) * 8 == pytest.approx(3.62, abs=0.01)
    assert copies_of_row(256, 8, ALL, 8) * 8 == pytest.approx(5.3, abs=0.03)
    assert copies_of_row(4, 2, ALL, 8) == 1.0  # two nodes for an expert


@pytest.mark.parametrize(
    ("to_gpus", "to_nodes", "takes"),
    [
        (1.0, 1.0, 800 / 10),  # the parts of 8 members on the other node, over the own NICs
        (1.0, 0.5, 800 / 2 / 10),
        (1.0, 0.1, 1400 / 100),  # all rows but an eighth over the node's links, which take longer now
        (0.5, 0.05, 1400 / 2 / 100),
    ],
)
def test_the_network_carries_nodes_and_a_nodes_links_gpus(to_gpus: float, to_nodes: float, takes: float) -> None:
    place, inside = topology(range(16), FREE), topology(range(8), FREE)
    assert relayed_seconds(rows_sent(1600), place, FREE, Shares(to_gpus, to_nodes)) == pytest.approx(takes)
    assert relayed_seconds(rows_sent(1600), inside, FREE, Shares(to_gpus, to_nodes)) == pytest.approx(
        1400 * to_gpus / 100
    )
    assert collective_seconds(rows_sent(1600), place, FREE) == pytest.approx(800 / 10)


def test_bytes_of_each_link() -> None:
    place, inside = topology(range(16), FREE), topology(range(8), FREE)
    assert bytes_by_link(1600, place, None) == (700, 800)
    assert bytes_by_link(1600, inside, None) == (1400, 0)
    assert bytes_by_link(1600, place, Shares(0.5, 0.25)) == (700, 200)


def test_a_plan_says_which_links_carry_rows() -> None:
    """In each of 2 layers 64 tokens of 2 rows of 64 bf16 numbers go out, and back, and their gradients too; a weight of
    each row, and its gradient. Of 16 ranks 8 are on the other node."""
    result = plan(plan_config(**SMALL), cluster=H100)
    sent = 2 * 64 * 2 * (4 * 64 + 2) * 2
    inside, across = format_bytes(sent * 7 // 16), format_bytes(sent * 8 // 16)
    assert f"sends {inside} over its node's links and {across} over the network" in expert_links(result, H100)
    assert not expert_links(plan(plan_config(**SMALL | dict(ranks=1, ep=1)), cluster=H100), H100)


def uneven(nbytes: int) -> float:
    return collective_seconds(rows_sent(nbytes), topology(range(8), FREE), FREE)


def test_a_rank_with_more_rows_takes_longer() -> None:
    """Payload is the larger of what a rank sends and receives, so the fullest one's is its own."""
    even = plan(plan_config(**SMALL), keep_events=True)
    skewed = plan(plan_config(**SMALL, routing="zipf:1"), keep_events=True)
    payloads = [
        {e.payload_bytes for e in result.events[0] if isinstance(e, Launch) and e.op == "all_to_all" and e.axis == "ep"}
        for result in (even, skewed)
    ]
    most = [max(sizes) for sizes in payloads]
    assert most[1] > 3 * most[0]
    assert uneven(most[1]) == pytest.approx(uneven(most[0]) * most[1] / most[0])


def of_host(launch: float, copy: float) -> OnPaper:
    class Slow(OnPaper):
        def call(self, event: Any) -> float:
            return launch

        def copy(self, event: Copy) -> float:
            return copy

    return Slow()


def test_a_host_that_reads_counts_launches_nothing_meanwhile() -> None:
    """Two kernels of 10 s are launched in 1 s each. Without a copy the second one follows at once."""
    first, second = (Busy(Scope(0), name, 10.0, 0, 0, launch=1.0, lag=11.0) for name in ("first", "second"))
    read = Copy(Scope(0), DEVICE, HOST, 8, CONTROL)
    shown: dict[str, tuple[float, float]] = {}
    for what, entries in {"runs ahead": [first, second], "reads": [first, read, second]}.items():
        (track,) = simulate({0: list[Entry](entries)}, (0,), Mesh(), of_host(0.5, 0.25)).tracks.values()
        shown[what] = track.end, track.host
    assert shown["runs ahead"] == (21.0, 1.0)
    assert shown["reads"] == (11.0 + 0.25 + 1.0 + 10.0, 1.0 + 0.25 + 1.0)


def test_experts_launched_one_by_one_take_the_driver_a_time_each() -> None:
    kernel = Kernel(Scope(0), GROUPED, "matmul", 2**30, 8, 8, (1024, 512, 1024, 64))
    launches = {
        how: costs_of(plan_config(**SMALL, kernels=how), H100).launch(kernel) for how in ("fused", "eager", "compiled")
    }
    assert launches["fused"] == pytest.approx(64 * 3e-6)
    assert launches["eager"] == pytest.approx(27e-6)
    assert launches["compiled"] == pytest.approx(6.8e-6)


def test_recomputed_experts_are_no_model_flops() -> None:
    time: dict[str, Any] = {}
    for recompute in ("none", "full"):
        time[recompute] = plan(plan_config(**SMALL, recompute=recompute), cluster=H100).time
    assert time["full"].model_flops == time["none"].model_flops
    assert time["full"].hardware_flops > time["none"].hardware_flops


@pytest.mark.parametrize("ranks", [8, 16])
def test_a_dispatcher_that_sends_once_is_faster(ranks: int) -> None:
    sizes = dict(ranks=ranks, ep=ranks, top_k=8, seq=2048, hidden=512)
    one, other = (
        plan(plan_config(**SMALL | sizes, dispatcher=how), cluster=H100).time for how in ("alltoall", "deepep")
    )
    assert one is not None
    assert other is not None
    assert other.exposed["ep"] < one.exposed["ep"]
    assert other.compute < one.compute  # nothing sorts rows
