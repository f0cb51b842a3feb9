"""What a kernel, a collective and a message cost: cases worked by hand from the constants and the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from zerosim.config.presets.cluster import Cluster, Curve, cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.presets.machine_file import Machine, Measured
from zerosim.device.events import Kernel, Launch, Scope
from zerosim.errors import InputError
from zerosim.ledger.costs import collective_seconds, kernel_seconds, topology

A100 = cluster_of(find_hardware("a100-80"))  # 8 to a node


def seconds(op: str, group: Sequence[int], cluster: Cluster, nbytes: int = 8, algorithm: str = "direct") -> float:
    call = Launch(Scope(0), 1, op, "bf16", "states", "dp_shard", (), 0, nbytes, 0, 0, None, algorithm)
    return collective_seconds(call, topology(group, cluster), cluster)


@pytest.mark.parametrize(
    ("op", "group", "us"),
    [
        ("all_gather", range(8), 6.6 + 7 * 0.6),  # a ring of 8: 7 steps, none of them between nodes
        ("all_gather", range(16), 6.6 + 14 * 0.6 + 2.7),  # of 16 in two nodes: 15 steps, one of which crosses
        ("all_gather", range(24), 6.6 + 21 * 0.6 + 2 * 2.7),
        ("all_to_all", range(8), 6.6 + 7 * 0.6),  # 7 members, one after the other
        ("all_to_all", range(16), 6.6 + 8 * 2.7),  # 8 of them in the other node; those of its own meanwhile
        ("all_reduce", range(8), 6.6 + 14 * 0.6),  # twice as many steps
        ("all_reduce", (0, 8), 6.6 + 2 * 2.7),  # a tree crosses as often, at 5.0 each
        ("all_reduce", range(16), 6.8 + 14 * 0.6 + 2 * 5.0),  # a tree: 7 steps in a node, one across, there and back
        ("all_reduce", range(0, 64, 8), 6.8 + 6 * 5.0),  # 8 nodes of one: 3 levels, there and back
        ("send", (0, 1), 6.6 + 0.6),
        ("send", (0, 8), 6.6 + 2.7),
        ("pairs", range(8), 6.6 + 0.6),
        ("pairs", range(16), 6.6 + 2.7),  # within and across side by side
    ],
)  # fmt: skip
def test_latencies_count_steps_and_crossings(op: str, group: Sequence[int], us: float) -> None:
    """Bytes take no time here, so NCCL's LL protocol is the cheapest."""
    free = replace(A100, link=inf, nic=inf)
    name, algorithm = ("all_reduce", op) if op == "pairs" else (op, "direct")
    assert seconds(name, group, free, algorithm=algorithm) == pytest.approx(us * 1e-6)


@pytest.mark.parametrize(
    ("op", "group", "nbytes", "us"),
    [
        ("all_gather", range(8), 8, 10.8 + 7 / 0.5),  # LL carries half of the bandwidth, with the lowest latency
        ("all_to_all", range(8), 80, 8.4 + 7 * 3.4 + 70),
        ("all_to_all", range(16), 160, 14 + 8 * 4 + 80 / 0.92),  # 8 parts of 10 bytes over a GPU's share of NICs
        ("all_gather", range(8), 24, 14 + 7 * 1.9 + 21 / 0.92),  # LL128
        ("all_gather", range(8), 80, 8.4 + 7 * 3.4 + 70),  # Simple
        ("all_reduce", range(0, 64, 8), 20, 14 + 6 * 8.5 + 35 / 0.92**2),  # LL128 on a tree
    ],
)
def test_the_cheapest_protocol_carries_its_share(op: str, group: Sequence[int], nbytes: int, us: float) -> None:
    """Every link carries a byte per microsecond. Each of n ranks sends (n-1)/n of a payload, in an all-reduce twice."""
    assert seconds(op, group, replace(A100, link=1e6, nic=8e6), nbytes) == pytest.approx(us * 1e-6)


def test_an_unknown_verb_has_no_cost() -> None:
    with pytest.raises(InputError, match="unknown collective 'all_gathr': expected one of all_gather, "):
        seconds("all_gathr", range(8), A100)


def test_a_ring_is_as_slow_as_the_slowest_link_that_it_uses() -> None:
    slow = replace(A100, latency=0.0, link=10e9)  # a GPU's share of its node's NICs is 24 GB/s
    assert seconds("all_gather", range(16), slow, 16 * 10**9) == pytest.approx(15 / 10)
    assert seconds("all_gather", (0, 8), slow, 16 * 10**9) == pytest.approx(8 / 24)  # no two of them share a node


@pytest.mark.parametrize(
    ("name", "engine", "flops", "nbytes", "takes"),
    [
        ("linear", "matmul", 1000, 8, 10 / 0.5),  # 10 s at the peak
        ("linear", "matmul", 1000, 400, 40 / 0.8),  # 40 s of memory traffic
        ("add", "vector", 1000, 8, 0.8 / 0.8),  # its arithmetic is free
        ("flash_attention", "matmul", 1000, 8, 5 / 0.25),  # half of the products, at no more than `flash`
        ("free", "vector", 0, 0, 0.0),
    ],
)
def test_a_kernel_takes_the_longer_of_arithmetic_and_memory(
    name: str, engine: str, flops: int, nbytes: int, takes: float
) -> None:
    matmul, memory = Curve(((1.0, 0.5),), 0.5), Curve(((1.0, 0.8),), 0.8)
    cluster = replace(A100, peak_flops=100.0, hbm=10.0, matmul=matmul, memory=memory, flash=0.25)
    kernel = Kernel(Scope(0), name, engine, flops, nbytes // 2, nbytes // 2)
    assert kernel_seconds(kernel, cluster) == pytest.approx(takes)


def test_a_measured_collective_moves_a_rings_bytes() -> None:
    """The measurement: 2 ranks, 1 s per byte that a rank sends, at least 1 s."""
    measured = Measured(((1.0, 1.0), (100.0, 100.0)))
    calls = dict.fromkeys(("all_gather", "all_reduce", "send"), measured)
    machine = Machine("bf16", "shm", 2, 2, 0.0, "", measured, measured, {}, calls)
    cluster = replace(A100, machine=machine, node_gpus=2, link=1.0, nic=1.0)
    assert seconds("all_gather", (0, 1), cluster) == pytest.approx(8)
    assert seconds("all_gather", range(4), cluster) == pytest.approx(8 * (3 / 4) / (1 / 2))
    node = replace(cluster, node_gpus=4)
    assert seconds("all_reduce", range(4), node, algorithm="pairs") == pytest.approx(8 * 3)  # all of it to each of 3
    slow = replace(cluster, nic=0.25)
    assert seconds("all_gather", range(4), slow) == pytest.approx(1 + 6 / 0.25)  # 6 bytes over the NIC and a latency
    assert seconds("recv", (0, 1), cluster) == pytest.approx(8)
    assert seconds("all_to_all", range(4), cluster) == seconds("all_gather", range(4), cluster)  # whose curve it takes
