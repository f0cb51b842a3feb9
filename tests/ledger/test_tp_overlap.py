"""Tensor parallelism's collectives beside products: cases worked by hand, and what must hold of a whole step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zerosim.config import RunConfig
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.run import plan_config
from zerosim.device.events import Launch, Scope, Wait
from zerosim.device.work import DGRAD, LINEAR, WGRAD
from zerosim.errors import InputError
from zerosim.grading.waiting import OnPaper
from zerosim.ledger.clock import simulate
from zerosim.ledger.entries import Busy, Entry
from zerosim.ledger.tp_overlap import overlapped
from zerosim.placement.mesh import Mesh
from zerosim.train.plan import plan, timeline_of

CLUSTERS = [cluster_of(find_hardware(name)) for name in ("a100-80", "h100-80")]
FORWARD, BACKWARD = Scope(0, "forward", "h.0"), Scope(0, "backward", "h.0")


def _call(work: int, op: str, seconds: int, scope: Scope) -> list[Entry]:
    """Waited for at once. On paper a byte takes a second."""
    group = (0, 1, 2, 3)
    launch = Launch(scope, work, op, "bf16", "activations", "tp", group, work, seconds, 0, 0)
    return [launch, Wait(scope, work)]


def _end(entries: list[Entry]) -> float:
    """Of four ranks alike, in four chunks."""
    pace = list(overlapped(entries, 4))
    track = simulate({0: pace}, (0,) * 4, Mesh(tp=4), OnPaper()).last
    assert track.compute == sum(entry.seconds for entry in entries if isinstance(entry, Busy))
    assert track.kernels == sum(isinstance(entry, Busy) for entry in entries)
    return track.end


@pytest.mark.parametrize("seconds", [0, 1, 6, 8, 9, 20])
@pytest.mark.parametrize("kind", [LINEAR, DGRAD, "linear_mxfp8", "linear_dgrad_fp8_blocks"])
def test_a_gather_passes_while_the_chunks_that_are_there_are_multiplied(kind: str, seconds: int) -> None:
    """A product of 8 s in chunks of 2 s: the last one runs when the gather has ended and all others are done."""
    scope = BACKWARD if kind.startswith(DGRAD) else FORWARD
    after: list[Entry] = [Busy(scope, "gelu", 5.0, 0, 0)]
    assert _end([*_call(0, "all_gather", seconds, scope), Busy(scope, kind, 8.0, 7, 7), *after]) == (
        max(6, seconds) + 2 + 5
    )


@pytest.mark.parametrize("seconds", [0, 1, 6, 8, 9, 20])
def test_a_reduce_scatter_begins_behind_the_first_chunk(seconds: int) -> None:
    before: list[Entry] = [Busy(FORWARD, "gelu", 5.0, 0, 0), Busy(FORWARD, LINEAR, 8.0, 7, 7)]
    assert _end([*before, *_call(0, "reduce_scatter", seconds, FORWARD)]) == 5 + max(8, 2 + seconds)


@pytest.mark.parametrize("order", [(DGRAD, WGRAD), (WGRAD, DGRAD), ("linear_dgrad_fp8", "linear_wgrad_fp8")])
@pytest.mark.parametrize(("gather", "scatter"), [(0, 0), (3, 4), (8, 9), (2, 20), (20, 2)])
def test_in_backward_a_gather_runs_beside_dgrad_and_a_scatter_beside_wgrad(
    order: tuple[str, str], gather: int, scatter: int
) -> None:
    products: list[Entry] = [Busy(BACKWARD, kind, 4.0 if kind.startswith(DGRAD) else 6.0, 7, 0) for kind in order]
    calls = _call(0, "all_gather", gather, BACKWARD), _call(1, "reduce_scatter", scatter, BACKWARD)
    assert _end([*calls[0], *products, *calls[1]]) == max(4, gather) + max(6, scatter)
    assert _end([*products, *calls[1]]) == 4 + max(6, scatter)


def test_what_is_no_block_or_no_product_waits_as_before() -> None:
    head, away = Scope(0, "forward", "lm_head"), Scope(0, "forward", "h.0")
    for entries in (
        [*_call(0, "all_gather", 3, head), Busy(head, LINEAR, 8.0, 7, 7)],
        [*_call(0, "all_gather", 3, away), Busy(away, "layer_norm", 8.0, 7, 7)],
        [Busy(away, "layer_norm", 8.0, 7, 7), *_call(0, "all_reduce", 3, away)],
    ):
        assert list(overlapped(entries, 4)) == entries


RUNS: dict[str, dict[str, Any]] = {
    "gpt": dict(),
    "llama": dict(model="llama", recompute="full"),
    "kept": dict(model="llama", keep_gathered=True),
    "pipeline": dict(pp=2, accumulate=4, recompute="selective"),
    "weights apart": dict(pp=2, accumulate=4, pipeline="zb-h1", tie_embeddings=False),
    "stage 3": dict(stage=3, recipe="fsdp2"),
    "modules": dict(stage=3, recipe="deepspeed"),
}


def _config(name: str, *, on: bool) -> RunConfig:
    sizes = dict(model="gpt", layers=4, hidden=1024, heads=8, seq=512, vocab=1024, ranks=8, tp=4, stage=1)
    run = {**sizes, "recipe": "megatron", "sequence_parallel": True, **RUNS[name]}
    return plan_config(**run, tp_comm_overlap=on)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", RUNS)
def test_overlap_hides_waits_alone_and_leaves_the_record_as_it_is(name: str) -> None:
    off, on = (plan(_config(name, on=on), keep_events=True) for on in (False, True))
    assert on.events == off.events
    for cluster in CLUSTERS:
        whole, parted = (timeline_of(result, replace(cluster, host=0.0, contention=0.0)).last for result in (off, on))
        assert parted.end < whole.end
        assert parted.exposed["tp"] < whole.exposed["tp"]
        assert parted.compute == pytest.approx(whole.compute, rel=1e-12)
        assert (parted.kernels, parted.flops, parted.model_flops) == (whole.kernels, whole.flops, whole.model_flops)
        assert [nbytes for _, nbytes in parted.live] == [nbytes for _, nbytes in whole.live]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", RUNS)
def test_overlap_never_makes_a_step_longer_though_kernels_beside_it_do_take_longer(name: str) -> None:
    for cluster in CLUSTERS:
        off, on = (plan(_config(name, on=on), cluster=cluster).time for on in (False, True))
        assert off is not None
        assert on is not None
        assert on.seconds <= off.seconds * (1 + 1e-12)
        assert on.slowed > off.slowed
        whole = timeline_of(plan(_config(name, on=True), keep_events=True), cluster)
        assert on.seconds == pytest.approx(whole.seconds, rel=1e-9)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", RUNS)
def test_stretches_are_put_in_order_as_their_events_are(name: str) -> None:
    config = _config(name, on=True)
    for cluster in CLUSTERS:
        assert plan(config, cluster=cluster).time == plan(config, cluster=cluster, every_block=True).time


def test_overlap_without_rows_to_cut_is_refused() -> None:
    with pytest.raises(InputError, match="tp_comm_overlap: it has no effect without sequence_parallel; pass it too"):
        plan_config(ranks=4, tp=2, tp_comm_overlap=True)
    with pytest.raises(InputError, match="sequence_parallel: has no effect without tp"):
        plan_config(ranks=4, sequence_parallel=True, tp_comm_overlap=True)
