"""Host memory and drives are a node's, and its ranks share them: what one leaves, another takes."""

from __future__ import annotations

from typing import Any

import pytest

from zerosim.analysis.expect.largest import fits
from zerosim.cli.main import main
from zerosim.comm.runtime import World, node_pools, other_memories
from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.presets.nodes import find_node
from zerosim.device.node import CALLED, NodePool, Share, pools_of
from zerosim.errors import OutOfMemory
from zerosim.placement.memories import HOST, NVME
from zerosim.train.plan import plan
from zerosim.train.run import run

UNEQUAL: dict[str, Any] = dict(
    stage=3, ranks=3, steps=1, accumulate=1, micro_batch=1, layers=2, hidden=16, heads=2, seq=8, partition="owner",
    offload="optimizer=host",
)  # fmt: skip
"""Owners of whole units: no two ranks hold as much."""


def host_peaks(result: Any) -> list[int]:
    return [memory.host_peak_bytes for memory in result.memory]


@pytest.mark.parametrize("parallel", [1, 3])
def test_unequal_ranks_take_what_others_leave(parallel: int) -> None:
    """The sum of what they hold is enough, to the byte, where an equal part is too little for the largest."""
    config = RunConfig(**UNEQUAL, parallel=parallel)
    peaks = host_peaks(run(config))
    need = sum(peaks)
    assert max(peaks) > need // 3
    assert host_peaks(run(config.replace(host_memory=need))) == peaks
    with pytest.raises(OutOfMemory) as caught:
        run(config.replace(host_memory=need - 1))
    error = caught.value
    assert (error.exit_code, error.memory, error.capacity) == (3, HOST, need - 1)
    assert "node 0 is out of host memory" in str(error)
    assert sum(error.held.values()) + error.requested > need - 1
    assert set(error.held) <= {0, 1, 2}


def test_a_plan_refuses_what_a_run_refuses() -> None:
    config = plan_config(**UNEQUAL)
    peaks = host_peaks(plan(config))
    assert peaks == host_peaks(run(RunConfig(**UNEQUAL)))
    assert host_peaks(plan(config.replace(host_memory=sum(peaks)))) == peaks
    with pytest.raises(OutOfMemory) as caught:
        plan(config.replace(host_memory=sum(peaks) - 1))
    assert caught.value.held == dict(enumerate(peaks))
    assert all(f"rank {rank} holds" in str(caught.value) for rank in range(3))


def test_ranks_of_another_node_take_nothing_from_this_one() -> None:
    config = RunConfig(**UNEQUAL | dict(ranks=4, partition="slices", ranks_per_node=2))
    result = run(config)
    nodes = result.nodes
    assert [list(node.host) for node in nodes] == [[0, 1], [2, 3]]
    fullest = max(node.host_bytes for node in nodes)
    assert fullest < sum(host_peaks(result))
    run(config.replace(host_memory=fullest))
    with pytest.raises(OutOfMemory, match=r"node [01] is out of host memory"):
        run(config.replace(host_memory=fullest - 1))


def test_one_rank_stands_for_many_and_its_node_adds_up_all() -> None:
    fields = UNEQUAL | dict(ranks=24, hidden=20, partition="slices", offload="optimizer=nvme,params=nvme")
    cluster = cluster_of(find_hardware("v100-32"), node=find_node("dgx-2"))
    some, every = (plan(plan_config(**fields), cluster=cluster, every_rank=every_rank) for every_rank in (False, True))
    assert len(some.ran) < len(every.ran) == 24
    assert some.nodes == every.nodes
    assert [len(node.host) for node in some.nodes] == [16, 8]
    for node in every.nodes:
        assert node.host_bytes == sum(every.memory[rank].host_peak_bytes for rank in node.host)
        assert node.nvme_bytes == sum(every.memory[rank].others[NVME].peak.total_bytes for rank in node.nvme)


def test_a_thousand_ranks_are_64_nodes_alike() -> None:
    config = plan_config(model="gpt2", ranks=1024, stage=3, offload="optimizer=host")
    result = plan(config, cluster=cluster_of(find_hardware("v100-32"), node=find_node("dgx-2")))
    nodes = result.to_dict()["nodes"]
    assert sum(row["stands_for"] for row in nodes) == 64
    assert nodes[0]["host_peak_bytes"] == sum(host_peaks(result)[:16])


def test_a_node_that_is_too_small_is_said_with_what_each_rank_holds(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--stage 3 --ranks 20 --ranks-per-node 10 --layers 2 --hidden 16 --heads 2 --steps 1 --host-memory 50KB"
    for verb in ("run", "plan"):
        assert main([verb, *words.split(), "--offload", "optimizer=host"]) == 3
        shown = capsys.readouterr().err
        first, *table = shown.splitlines()
        assert "node 0 is out of host memory" in first
        assert "50.0 KB" in first
        assert any(line.startswith("Most bytes held on the node") for line in table)


def test_a_node_that_is_too_small_fits_on_no_device() -> None:
    config = plan_config(**UNEQUAL)
    need = sum(host_peaks(plan(config)))
    assert not fits(config.replace(host_memory=need - 1), 10**12)
    assert fits(config.replace(host_memory=need), 10**12)


def test_a_rank_s_part_is_the_most_that_it_held() -> None:
    pool = NodePool("node 0", 100)
    one, other = Share(pool, 0), Share(pool, 1)
    assert one.reserve(1, 60) == 60
    one.release(1)
    assert other.reserve(2, 40) == 40
    assert other.reserve(3, 1) is None
    assert one.reserve(4, 60) == 60  # its own, given back before
    assert pool.held == {0: 60, 1: 40}


def test_processes_have_equal_parts_because_they_do_not_see_each_other() -> None:
    shared = pools_of(6, 4, {HOST: 100, NVME: None})
    assert shared[0] is shared[3] is not shared[4]
    assert (shared[4][HOST].name, shared[4][HOST].capacity, shared[4][NVME].capacity) == ("node 1", 100, None)
    apart = node_pools(World(6, transport="mpi", node_ranks=4, others={HOST: 100}))
    assert [pools[HOST].capacity for pools in apart] == [25] * 6
    assert len({id(pools[HOST]) for pools in apart}) == 6
    assert set(other_memories(World(6), 5, apart[5])) == set(CALLED)
    assert "rank 5's equal part of node 1" in apart[5][HOST].name
