"""Collectives as they were measured: the tables' own times, what follows from them, and what holds for all of them."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from zerosim.config.presets.cluster import Cluster, cluster_of
from zerosim.config.presets.collective_tables import CollectiveTables
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.presets.machine_file import Machine, Measured
from zerosim.config.presets.nodes import find_node
from zerosim.device.events import Launch, Scope
from zerosim.ledger.collectives import collective_seconds
from zerosim.ledger.costs import topology
from zerosim.ledger.machine_costs import MachineCosts
from zerosim.ledger.nccl import nccl_seconds

MEASURED = tomllib.loads((Path(__file__).parents[1] / "measured/collectives.toml").read_text("utf-8"))
MIB = 2**20
CLUSTERS = {name: cluster_of(find_hardware(name)) for name in ("dgx1-v100", "a100-80", "h100-80", "b200")}
PCIE = cluster_of(find_hardware("a100-pcie"))
VERBS = ("all_gather", "reduce_scatter", "all_reduce", "pairs", "all_to_all", "broadcast", "reduce", "send", "recv")


def launch(op: str, nbytes: float, group: Sequence[int] = ()) -> Launch:
    op, algorithm = ("all_reduce", op) if op == "pairs" else (op, "direct")
    return Launch(Scope(0), 1, op, "bf16", "states", "dp_shard", tuple(group), 0, int(nbytes), 0, 0, None, algorithm)


def seconds(op: str, group: Sequence[int], cluster: Cluster, nbytes: float) -> float:
    return collective_seconds(launch(op, nbytes), topology(group, cluster), cluster)


# -- the tables -------------------------------------------------------------------------------------------------------
def test_a_call_takes_what_it_was_measured_to_take() -> None:
    """From 4 MiB on. Below, a few of XLA's runs took longer than ones of more bytes."""
    rows = [(name, *row, MEASURED[part]["mib"]) for name, part in (("h100-80", "h100"), ("b200", "b200"))
            for row in MEASURED[part]["rows"]]  # fmt: skip
    gpus = {"A100": "a100-80", "V100": "dgx1-v100"}
    rows += [
        (gpus[gpu], "all_reduce", n, us, MEASURED["vtrain"]["mib"]) for gpu, n, us, _ in MEASURED["vtrain"]["rows"]
    ]
    for name, verb, n, times, sizes in rows:
        for mib, us in zip(sizes, times, strict=True):
            if mib >= 4:
                assert seconds(verb, range(n), CLUSTERS[name], mib * MIB) == pytest.approx(us * 1e-6, rel=1e-4)


def test_between_two_payloads_a_power_law_below_the_first_its_time_and_beyond_the_last_more() -> None:
    h100 = CLUSTERS["h100-80"]
    assert seconds("all_gather", range(8), h100, 2 * MIB) == pytest.approx((31.1 * 47.1) ** 0.5 * 1e-6, rel=1e-4)
    assert seconds("all_gather", range(8), h100, 8) == pytest.approx(18.6e-6)
    assert seconds("all_gather", range(8), h100, 4096 * MIB) == pytest.approx(2 * 5343.4e-6, rel=1e-3)


def linear(per_byte: float, least: float = 100e-6) -> Measured:
    return Measured(tuple((float(size), least + per_byte * (size - 100)) for size in (100, 1000, 10000)))


TABLES = CollectiveTables("made up", "", 1e9, {"all_reduce": {2: linear(1e-6), 8: linear(2e-6)}}, {})
FLAT = replace(CLUSTERS["a100-80"], link=1e9, node_gpus=16, collectives=TABLES)


@pytest.mark.parametrize(
    ("op", "members", "nbytes", "latency", "like", "payload"),
    [
        ("all_reduce", 8, 1000, 1, 8, 1000),
        ("all_gather", 8, 2000, 10.8 / 15, 8, 1000),  # half as many steps; it sends as much of twice the payload
        ("all_to_all", 8, 2000, 10.8 / 15, 8, 1000),
        ("broadcast", 8, 1750, 10.8 / 15, 8, 1000),  # all of it where an all-reduce sends 2 (N-1)/N
        ("send", 2, 1000, 7.2 / 7.8, 2, 1000),  # of two an all-reduce sends its payload once
        ("recv", 8, 1000, 7.2 / 7.8, 2, 1000),
        ("pairs", 8, 250, 7.2 / 15, 8, 1000),  # all of it to each of seven, in one step
        ("all_reduce", 16, 1750 / 1.875, 24.6 / 15, 8, 1000),  # the nearest number of ranks
        ("all_reduce", 3, 1000 * 3 / 4, 9 / 7.8, 2, 1000),
    ],
)
def test_what_was_not_measured_sends_as_much_and_has_its_own_latency(
    op: str, members: int, nbytes: float, latency: float, like: int, payload: float
) -> None:
    of = TABLES.calls["all_reduce"][like]
    expected = 100e-6 * latency + of.seconds(payload) - 100e-6
    assert seconds(op, range(members), FLAT, nbytes) == pytest.approx(expected, rel=2e-3)


def test_transfer_goes_with_the_links_and_latency_does_not() -> None:
    took = seconds("all_reduce", range(8), FLAT, 1000)
    assert seconds("all_reduce", range(8), replace(FLAT, link=2e9), 1000) == pytest.approx((took + 100e-6) / 2)
    assert seconds("all_reduce", range(8), replace(FLAT, latency=0.0), 1000) == pytest.approx(took - 100e-6)
    free = replace(FLAT, link=float("inf"), latency=0.0)
    assert seconds("all_reduce", range(8), free, 1000) == 0


@pytest.mark.parametrize("gpu", ["h100-80", "b200"])
def test_how_far_off_a_verb_is_that_follows_from_all_reduce(gpu: str) -> None:
    """All-gather and reduce-scatter, told from the all-reduces alone: a figure for A100, where nobody measured them."""
    own = CLUSTERS[gpu]
    assert own.collectives is not None
    only = replace(own, collectives=replace(own.collectives, calls={"all_reduce": own.collectives.calls["all_reduce"]}))
    calls = [
        (launch(verb, mib * MIB), topology(range(n), own))
        for verb in ("all_gather", "reduce_scatter")
        for n in (2, 4, 8)
        for mib in (0.25, 1, 4, 16, 64, 256, 1024)
    ]
    took = [collective_seconds(*call, own) for call in calls]
    followed = off([collective_seconds(*call, only) for call in calls], took)
    assert followed < 0.15
    assert followed < off([nccl_seconds(*call, own) for call in calls], took) / 2


def off(modelled: list[float], measured: list[float]) -> float:
    """The mean of what the two differ by."""
    return sum(abs(one / other - 1) for one, other in zip(modelled, measured, strict=True)) / len(measured)


# -- where a group stands ---------------------------------------------------------------------------------------------
def test_a_group_that_strides_over_a_box_without_links_shares_them() -> None:
    """Eight A100 PCIe: (0, 2, 4, 6) stands beside one group like it, (0, 4) beside three."""
    nbytes, rates = 1024 * MIB, MEASURED["fits"]["strided_GBps"]
    assert [topology(group, PCIE).stride for group in (range(4), (0, 2, 4, 6), (0, 4), (3,), (0, 8))] == [1, 2, 4, 1, 1]
    for group, stride, n in (((0, 2, 4, 6), "2", 4), ((0, 4), "4", 2)):
        speeds = {verb: rates[verb][stride] * 1e9 for verb in ("all_gather", "reduce_scatter")}
        sent = nbytes * (n - 1) / n
        for verb, speed in speeds.items():
            assert seconds(verb, group, PCIE, nbytes) == pytest.approx(sent / speed, rel=0.01)
        both = sum(sent / speed for speed in speeds.values())
        assert seconds("all_reduce", group, PCIE, nbytes) == pytest.approx(both, rel=0.01)
    assert seconds("all_gather", range(8), PCIE, nbytes) == pytest.approx(nbytes * 7 / 8 / 13.49e9, rel=0.01)
    assert seconds("all_gather", (0, 1), PCIE, nbytes) == pytest.approx(nbytes / 2 / 20.6e9, rel=0.01)
    a100 = CLUSTERS["a100-80"]  # a switch: where a group stands does not matter
    assert seconds("all_gather", (0, 4), a100, nbytes) == seconds("all_gather", (0, 1), a100, nbytes)


def test_pairs_and_quads_of_a_dgx_1_are_as_its_links_are() -> None:
    dgx1, dgx2 = CLUSTERS["dgx1-v100"], cluster_of(find_hardware("v100-32"))
    for n, busbw in ((2, 22.55), (4, 85.36), (8, 134.51)):
        sent = 1024 * MIB * 2 * (n - 1) / n
        assert seconds("all_reduce", range(n), dgx1, 1024 * MIB) == pytest.approx(sent / busbw / 1e9, rel=0.01)
    assert seconds("all_reduce", (0, 1), dgx2, 1024 * MIB) < seconds("all_reduce", (0, 1), dgx1, 1024 * MIB) / 5


def test_between_nodes_a_call_takes_no_less_than_its_part_inside_one() -> None:
    h100 = CLUSTERS["h100-80"]
    inside = seconds("all_reduce", range(8), h100, MIB)
    assert seconds("all_reduce", range(16), replace(h100, nic=float("inf")), MIB) >= inside
    everywhere = replace(h100, collectives=None)
    far = 1024 * MIB
    assert seconds("all_gather", range(16), h100, far) == pytest.approx(
        seconds("all_gather", range(16), everywhere, far)
    )
    assert seconds("send", (7, 8), h100, MIB) == seconds("send", (7, 8), everywhere, MIB)


# -- what holds for all of them ---------------------------------------------------------------------------------------
GROUPS = (
    (0, 1),
    (0, 4),
    range(4),
    (0, 2, 4, 6),
    range(8),
    range(3),
    range(16),
    range(0, 64, 8),
    range(24),
    (0, 1, 8, 9),
)


@pytest.mark.parametrize("name", [*CLUSTERS, "a100-pcie", "v100-32"])
@pytest.mark.parametrize("verb", VERBS)
def test_more_bytes_never_end_sooner_and_a_faster_link_never_later(verb: str, name: str) -> None:
    cluster = PCIE if name == "a100-pcie" else cluster_of(find_hardware(name))
    draw = random.Random(f"{verb} {name}")
    faster = (
        replace(cluster, link=1.3 * cluster.link),
        replace(cluster, nic=2 * cluster.nic),
        replace(cluster, latency=0.5),
    )
    groups = [group for group in GROUPS if len(group) == 2] if verb in ("send", "recv") else GROUPS
    for group in groups:
        sizes = sorted(int(2 ** draw.uniform(3, 33)) for _ in range(60))
        times = [seconds(verb, group, cluster, size) for size in sizes]
        assert all(time > 0 for time in times)
        assert all(before <= after * (1 + 1e-12) for before, after in pairwise(times))
        for other in faster:
            assert all(
                seconds(verb, group, other, size) <= time * (1 + 1e-12) for size, time in zip(sizes, times, strict=True)
            )
        assert seconds(verb, group, cluster, 0) == 0
    assert seconds(verb, (3,), cluster, 100) == 0


# -- a machine that was measured --------------------------------------------------------------------------------------
CURVE = Measured(((1.0, 1.0), (100.0, 100.0)))
"""One second for each byte that a rank of two sends, at least 1."""
MACHINE = Machine(
    "bf16", "shm", 2, 2, 0.0, "", CURVE, CURVE, {}, dict.fromkeys(("all_gather", "all_reduce", "send"), CURVE)
)


def machine_seconds(op: str, group: Sequence[int], cluster: Cluster, nbytes: int = 8) -> float:
    return MachineCosts(MACHINE, cluster).collective(launch(op, nbytes, group))


def test_a_measured_machine_moves_a_rings_bytes() -> None:
    cluster = replace(CLUSTERS["a100-80"], node_gpus=2, link=1.0, nic=1.0)
    assert machine_seconds("all_gather", (0, 1), cluster) == pytest.approx(8)
    assert machine_seconds("all_gather", range(4), cluster) == pytest.approx(8 * (3 / 4) / (1 / 2))
    node = replace(cluster, node_gpus=4)
    assert machine_seconds("pairs", range(4), node) == pytest.approx(8 * 3)  # all of it to each of 3
    slow = replace(cluster, nic=0.25)
    assert machine_seconds("all_gather", range(4), slow) == pytest.approx(1 + 6 / 0.25)  # a latency, 6 bytes over NICs
    assert machine_seconds("recv", (0, 1), cluster) == pytest.approx(8)
    assert machine_seconds("all_to_all", range(4), node) == machine_seconds("all_gather", range(4), node)


def test_between_measured_machines_each_rank_sends_its_parts_over_its_own_share_of_the_nics() -> None:
    """Four ranks on two machines: a rank's parts for the two others there pass half of 0.25 bytes a second."""
    slow = replace(CLUSTERS["a100-80"], node_gpus=2, link=1.0, nic=0.25)
    assert machine_seconds("all_to_all", range(4), slow) == pytest.approx(1 + 2 * 2 / 0.125)
    assert machine_seconds("pairs", range(4), slow) == pytest.approx(1 + 2 * 8 / 0.125)
    assert machine_seconds("all_to_all", range(4), slow) > machine_seconds("all_gather", range(4), slow)


def test_a_bridge_carries_what_goes_between_its_two_gpus() -> None:
    """GPUs 0 and 1, 2 and 3. A larger group, or another pair, goes over PCIe."""
    nbytes, device = 1024 * MIB, find_hardware("rtx3090")
    bridged = cluster_of(device, node=find_node("2xrtx3090-nvlink"), node_gpus=4)
    plain = cluster_of(device)
    assert (bridged.pair, plain.pair) == (45e9, 0)  # 20 of 25 GB/s of a line of 56.25
    for op in VERBS[:3]:
        of = {group: seconds(op, group, bridged, nbytes) for group in ((0, 1), (2, 3), (1, 2), (0, 2), (0, 1, 2, 3))}
        assert of[0, 1] == of[2, 3] == pytest.approx(seconds(op, (0, 1), plain, nbytes) * 24 / 45, rel=0.01)
        assert all(of[group] == seconds(op, group, plain, nbytes) for group in ((1, 2), (0, 2), (0, 1, 2, 3)))
    assert not topology((3, 4), bridged).bridged
