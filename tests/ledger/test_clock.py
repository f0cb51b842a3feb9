"""The clock: what must hold on any hardware, exact cases, and measured steps."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from zerosim.analysis.formulas import bubble
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster, cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.run import plan_config
from zerosim.device.events import COMPUTE, Copy, Kernel, Launch, Scope, Wait
from zerosim.errors import InputError
from zerosim.grading.waiting import OnPaper
from zerosim.ledger.clock import Timeline, simulate, step_time
from zerosim.ledger.collectives import collective_seconds
from zerosim.ledger.costs import topology
from zerosim.ledger.costs_of import costs_of
from zerosim.ledger.entries import Busy, Entry
from zerosim.ledger.pace import PaceLedger
from zerosim.ledger.tracks import Track
from zerosim.parallel.pipeline import SCHEDULES
from zerosim.placement.mesh import Mesh
from zerosim.placement.stages import Chunks
from zerosim.report.time import step_lines
from zerosim.train.plan import plan, timeline_of

A100 = cluster_of(find_hardware("a100-80"))
SMALL: dict[str, Any] = dict(model="gpt", layers=4, hidden=64, heads=4, seq=32, vocab=128)
MESHES: dict[str, dict[str, Any]] = {
    "zero-3": dict(ranks=3, stage=3, accumulate=2),
    "prefetched": dict(ranks=4, stage=3, recipe="fsdp2"),
    "two buffers": dict(ranks=4, stage=2, reduce_bucket=30_000, reduce_buffers=2),
    "hybrid": dict(ranks=8, stage=3, dp_replicate=2),
    "tensor": dict(ranks=4, stage=1, tp=2, sequence_parallel=True),
    "chunks": dict(ranks=4, stage=1, tp=2, sequence_parallel=True, tp_comm_overlap=True, cuda_graphs=True),
    "side stream": dict(ranks=4, stage=3, recipe="deepspeed", reduce_bucket=30_000, accumulate=2),
    "pipeline": dict(ranks=8, stage=1, tp=2, pp=2, accumulate=5),
    "interleaved": dict(ranks=2, stage=1, pp=2, accumulate=4, pipeline="interleaved"),
    "on the host": dict(ranks=2, stage=2, tp=2, recompute="full", partition_activations=True, cpu_checkpointing=True),
}


def small(**settings: Any) -> RunConfig:
    return plan_config(**{**SMALL, **settings})


def planned(config: RunConfig, cluster: Cluster, *, every_rank: bool = False) -> Timeline:
    return timeline_of(plan(config, keep_events=True, every_rank=every_rank), cluster)


@pytest.mark.parametrize("name", MESHES)
def test_causes_come_first_and_no_second_is_lost(name: str) -> None:
    timeline = planned(small(**MESHES[name]), A100)
    for track in timeline.tracks.values():
        assert sum(
            [track.compute, track.slowed, track.bubble, track.host, track.copies, *track.exposed.values()]
        ) == pytest.approx(track.end)
        streams = defaultdict(list)
        for span in track.spans:
            streams[span.stream].append(span)
            assert 0 <= span.start <= span.stop <= track.end
        for spans in streams.values():
            assert all(first.stop <= second.start + 1e-15 for first, second in pairwise(spans))
        assert streams[COMPUTE][0].start == 0
        busy = sum(span.stop - span.start for span in streams[COMPUTE] if span.name != "wait")
        assert busy == pytest.approx(track.compute)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MESHES)
def test_ranks_that_stand_for_others_take_as_long_as_all_of_them(name: str) -> None:
    config = small(**MESHES[name])
    few, every = planned(config, A100), planned(config, A100, every_rank=True)
    for rank, track in few.tracks.items():
        assert track.end == pytest.approx(every.tracks[rank].end, rel=1e-12)
    assert few.seconds == pytest.approx(every.seconds, rel=1e-12)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", MESHES)
def test_a_faster_link_never_makes_a_step_longer(name: str) -> None:
    config = small(**MESHES[name])
    slow = replace(A100, node_gpus=2)
    for faster in (
        replace(slow, link=2 * slow.link),
        replace(slow, nic=4 * slow.nic),
        replace(slow, pcie=2 * slow.pcie),
        replace(slow, latency=0.0),
    ):
        assert planned(config, faster).seconds <= planned(config, slow).seconds + 1e-12


def test_links_without_limits_leave_compute_alone() -> None:
    free = replace(A100, link=inf, nic=inf, pcie=inf, latency=0.0, host=0.0)
    timeline = planned(small(ranks=4, stage=3), free)
    assert all(track.end == track.compute for track in timeline.tracks.values())


def test_where_nothing_overlaps_the_time_is_the_sum() -> None:
    """The paper's stage 3 waits for each collective where it is launched."""
    result = plan(small(ranks=4, stage=3), keep_events=True)
    free = replace(A100, host=0.0)
    places = topology((0, 1, 2, 3), free)
    collectives = [
        collective_seconds(event, places, free)
        for event in result.events[0]
        if isinstance(event, Launch) and event.scope.step == 0
    ]
    track = planned(small(ranks=4, stage=3), free).tracks[0]
    assert sum(track.exposed.values()) == pytest.approx(sum(collectives))
    assert track.end == pytest.approx(track.compute + sum(collectives))


def test_prefetch_hides_what_the_paper_waits_for() -> None:
    settings = dict(ranks=4, stage=3, hidden=512, seq=256, micro_batch=4)
    waits = [sum(planned(small(**settings, prefetch=n), A100).last.exposed.values()) for n in (0, 1, 2)]
    assert waits[0] > max(waits[1:])
    assert min(waits) > 0  # what begins a forward or backward has nothing before it


class BytePerSecond(OnPaper):
    """Copies take a second a byte too; kernels lose a share to collectives in flight."""

    def __init__(self, contention: float = 0.0) -> None:
        self.contention = contention

    def copy(self, copy: Copy) -> float:
        return float(copy.nbytes)


class SlowHost(OnPaper):
    """A launch takes 2 s, and a graph as long as is said."""

    def __init__(self, graph: float) -> None:
        self.graph = graph

    def launch(self, kernel: Kernel) -> float:
        return 2.0


def _broadcast(sequence: int, nbytes: int) -> Launch:
    return Launch(Scope(0), sequence, "broadcast", "bf16", "states", "dp_shard", (0, 1), sequence, nbytes, 0, 0)


def _busy(seconds: float) -> Busy:
    return Busy(Scope(0), "", seconds, 0, 0)


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize(
    ("computes", "bubble", "exposed"),
    [
        (2, 3, 3),  # waits 2 s for the first broadcast, 3 s for the late rank, 1 s for the second broadcast
        (5, 2, 1),  # the first broadcast is over
        (7.5, 0, 0.5),  # the second one runs
        (9, 0, 0),
    ],
)
def test_a_bubble_is_the_wait_for_a_late_rank_alone(computes: float, bubble: float, exposed: float, early: int) -> None:
    """The first broadcast takes 4 s. The second takes 1 s and starts at 7 s, when the late rank launches it."""
    late = 1 - early
    paces: dict[int, list[Entry]] = {
        early: [_broadcast(0, 4), _broadcast(1, 1), _busy(computes), Wait(Scope(0), 1)],
        late: [_broadcast(0, 4), _busy(7), _broadcast(1, 1), Wait(Scope(0), 1)],
    }
    tracks = simulate(paces, (0, 1), Mesh(dp_shard=2), BytePerSecond(), keep_spans=True).tracks
    assert (tracks[early].bubble, tracks[early].exposed.get("dp_shard", 0)) == (bubble, exposed)
    assert (tracks[late].bubble, tracks[late].exposed["dp_shard"]) == (0, 1)
    assert (tracks[early].end, tracks[late].end) == (max(8, computes), 8)
    for track in tracks.values():
        calls = [(span.start, span.stop) for span in track.spans if span.stream == "dp_shard"]
        assert calls == [(0, 4), (7, 8)]
        waits = [span.bubble for span in track.spans if span.name == "wait"]
        assert all(stop - start == track.bubble and stop == 7 for start, stop in waits)


def _launched(seconds: float, launch: float) -> Busy:
    return Busy(Scope(0), "", seconds, 0, 0, 1, launch, launch + seconds)


def test_the_device_runs_behind_its_host() -> None:
    """A launch takes 2 s. The device waits for each of many short kernels; a long one hides those of the next."""
    short, long = _launched(1, 2), _launched(5, 2)
    for entries, host, end in (
        ([short] * 3, 4, 7),  # launched at 2, 4 and 6 s
        ([long, short, short], 2, 9),  # the long one runs from 2 to 7 s; all are launched at 6 s
        ([long, short, short, short, short], 2, 11),  # the last is launched at 10 s, when the one before it ends
    ):
        (track,) = simulate({0: entries}, (0,), Mesh(), BytePerSecond()).tracks.values()
        assert (track.host, track.end) == (host, end)
        assert track.end == track.compute + track.host


@pytest.mark.parametrize("seed", range(20))
def test_kernels_that_are_one_entry_end_as_single_ones_do(seed: int) -> None:
    draw = random.Random(seed)
    single = [_launched(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(draw.randint(1, 12))]
    cut = draw.randint(0, len(single))
    ends = set()
    for entries in (single, [_joined(part) for part in (single[:cut], single[cut:]) if part]):
        (track,) = simulate({0: entries}, (0,), Mesh(), BytePerSecond()).tracks.values()
        ends.add((track.end, track.host, track.compute))
    assert len(ends) == 1


def _joined(entries: list[Busy]) -> Busy:
    together = entries[0]
    for entry in entries[1:]:
        together = together.then(entry)
    return together


def test_kernels_beside_a_collective_take_longer() -> None:
    """A quarter longer, of the 6 s of a broadcast: kernels do 4.8 s of work meanwhile; those of 4 s take 5."""
    for computes, slowed, end in ((8, 1.2, 11.2), (4, 1, 8), (0, 0, 8)):
        entries: list[Entry] = [_busy(2), _broadcast(0, 6), _busy(computes), Wait(Scope(0), 0)]
        paces = dict.fromkeys(range(2), entries)
        for track in simulate(paces, (0, 1), Mesh(dp_shard=2), BytePerSecond(contention=0.25)).tracks.values():
            assert (track.slowed, track.end) == (pytest.approx(slowed), pytest.approx(end))
            assert track.compute == 2 + computes


def test_copies_of_a_direction_queue_and_compute_waits_for_what_comes_back() -> None:
    out, back = Copy(Scope(0), "device", "host", 4, "offload"), Copy(Scope(0), "host", "device", 3, "offload")
    entries: list[Entry] = [out, _busy(1), out, back, _busy(5), out]
    (track,) = simulate({0: entries}, (0,), Mesh(), BytePerSecond(), keep_spans=True).tracks.values()
    copies = [(span.stream, span.start, span.stop) for span in track.spans if span.name == "copy"]
    to, fro = "device to host", "host to device"
    assert copies == [(to, 0, 4), (to, 4, 8), (fro, 1, 4), (to, 9, 13)]
    assert (track.copies, track.compute, track.end) == (3, 6, 9)


def test_tracks_are_in_the_order_of_ranks_and_of_equal_ends_the_lowest_is_the_last() -> None:
    ends = {8: 2.0, 1: 2.0, 3: 1.0}
    paces = {rank: [_busy(end)] for rank, end in ends.items()}
    timeline = simulate(paces, [8, 3, 1] * 3, Mesh(dp_shard=9), BytePerSecond())
    assert list(timeline.tracks) == [1, 3, 8]
    assert timeline.last.rank == 1
    assert Timeline({8: Track(8, 2.0), 1: Track(1, 2.0)}).last.rank == 1


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_forwards_and_backwards_on_free_links_wait_p_minus_1_over_m(name: str, seed: int) -> None:
    draw = random.Random(seed)
    stages, chunks = draw.randint(2, 5), {"interleaved": draw.randint(2, 3), "zb-v": 2}.get(name, 1)
    batches, lie = stages * draw.randint(1 if chunks == 1 else 2, 4), Chunks(stages, chunks, turns_back=name == "zb-v")
    free = replace(A100, link=inf, nic=inf, latency=0.0, host=0.0)
    entries = {stage: _entries(SCHEDULES[name](stages, stage, batches, chunks), stage, lie) for stage in range(stages)}
    timeline = simulate(entries, range(stages), Mesh(pp=stages), costs_of(small(), free))
    for track in timeline.tracks.values():
        ideal = 3 * batches * chunks
        assert Fraction(round(timeline.seconds) - ideal, ideal) == bubble(name).at(p=stages, m=batches, v=chunks)
        assert track.compute == ideal


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_reductions_of_a_pipeline_delay_no_message_and_are_no_bubble(name: str, stage: int) -> None:
    """Every message arrives when it does without data parallelism. Each pipeline stage begins to reduce as soon as it
    has drained, and waits for all that its reductions take."""
    sizes = dict(SMALL, layers=8, stage=stage, accumulate=8, pipeline=name, tie_embeddings=False)
    cluster = replace(A100, host=0.0)
    alone, shared = (planned(plan_config(**sizes, pp=4, ranks=4 * copies), cluster) for copies in (1, 2))
    for rank, track in shared.tracks.items():
        assert _messages(track) == pytest.approx(_messages(alone.tracks[rank // 2]), rel=1e-12)
        spans = [span for span in track.spans if span.scope.phase == "backward"]
        drained = max(span.stop for span in spans if span.name not in ("wait", "reduce_scatter", "all_reduce"))
        reductions = [span for span in track.spans if span.stream == "dp_shard"]
        assert reductions[0].start == pytest.approx(drained, rel=1e-12)
        assert track.exposed["dp_shard"] == pytest.approx(sum(span.stop - span.start for span in reductions))


def _messages(track: Track) -> list[float]:
    return [span.stop for span in track.spans if span.name in ("send", "recv")]


def _entries(actions: list[Any], stage: int, chunks: Chunks) -> list[Entry]:
    """A forward takes 1, a backward 2 or 1 and 1; a message goes between any two stages that follow one another."""
    entries: list[Entry] = []
    sequence: dict[tuple[int, int, str], int] = defaultdict(int)
    work = 0

    def message(op: str, pair: tuple[int, int], scope: Scope) -> None:
        nonlocal work
        work += 1
        number = sequence[(*pair, scope.phase)]
        sequence[(*pair, scope.phase)] += 1
        entries.append(Launch(scope, work, op, "bf16", "activations", "pp", pair, number, 8, 8, 8))
        if op == "recv":
            entries.append(Wait(scope, work))

    for action in actions:
        scope = Scope(0, "forward" if action.sends > 0 else "backward", "", action.slot)
        number, ahead = chunks.number(stage, action.chunk), action.sends
        before, after = (
            chunks.stage(other) if ahead and 0 <= other <= chunks.last else stage
            for other in (number - ahead, number + ahead)
        )
        if before != stage:
            message("recv", (before, stage), scope)
        entries.append(Busy(scope, "", float(action.length), 0, 0))
        if after != stage:
            message("send", (stage, after), scope)
    return entries


@pytest.mark.quick(1)
@pytest.mark.parametrize("schedule", [*SCHEDULES, ""])
def test_a_long_step_takes_what_two_short_ones_say(schedule: str) -> None:
    cut = dict(pp=2, pipeline=schedule) if schedule else dict(stage=3, prefetch=1)
    config = small(ranks=2, accumulate=12, recompute="full", **cut)
    short = plan(config, cluster=A100)
    assert short.extended_from is not None
    assert short.time is not None
    whole = step_time(planned(config, A100), short.stands_for)
    assert short.time.seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert short.time.hardware_flops == whole.hardware_flops
    assert short.time.kernels == whole.kernels
    assert short.time.model_flops == whole.model_flops


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_model_flops_are_2205_05198s(recompute: str) -> None:
    """72 B L s h^2 (1 + s/6h + v/12hL), whatever is computed again; full recompute adds a forward of the blocks."""
    layers, s, h, v, ranks, batch = 3, 64, 32, 256, 2, 3
    config = small(layers=layers, seq=s, hidden=h, vocab=v, ranks=ranks, micro_batch=batch, recompute=recompute)
    time = plan(config, cluster=A100).time
    assert time is not None
    blocks = 72 * Fraction(ranks * batch * layers * s * h**2) * (1 + Fraction(s, 6 * h))
    head = Fraction(72 * ranks * batch * s * h * v, 12)
    assert time.model_flops == blocks + head
    again = {"none": 0, "selective": 4 * ranks * batch * layers * s * s * h, "full": blocks / 3}[recompute]
    assert time.hardware_flops == blocks + head + again


@pytest.mark.parametrize("tuned", [{}, {"freeze": "h.0,wte"}, {"lora_rank": 2, "lora_target": "all-linear"}])
def test_model_flops_are_those_of_the_gradients_that_are_made(tuned: dict[str, Any]) -> None:
    """Without recompute every product counts. Recompute adds none, nor do the scores that FlashAttention remakes."""
    times = [
        plan(small(ranks=2, **tuned, **how), cluster=A100).time
        for how in ({}, {"recompute": "full"}, {"attention": "flash"}, {"recompute": "full", "attention": "flash"})
    ]
    assert times[0] is not None
    assert times[0].model_flops == times[0].hardware_flops
    assert {time.model_flops for time in times if time is not None} == {times[0].hardware_flops}


def test_a_plan_says_where_the_host_decides(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--model", "llama3-8b", "--layers", "2", "--ranks", "8", "--seq", "4096"]
    for words, short in ((["--ranks", "1"], True), (large, False)):
        main(["plan", "--gpu", "h100-80", "--all", *words])
        said = " ".join(capsys.readouterr().out.split())
        assert "Time of a step" in said
        assert ("The host decides how long the step takes" in said) == short


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (dict(ranks=4, stage=1, dp_replicate=4), "averages over replicas"),
        (dict(ranks=4, stage=3, dp_replicate=2), "averages over replicas"),
        (dict(ranks=4, stage=3), "ZeRO's collectives"),
        (dict(ranks=4, tp=2), "tensor parallelism's collectives"),
        (dict(ranks=2, pp=2, accumulate=2), "the neighbouring pipeline stage"),
    ],
)
def test_every_wait_has_a_cause_in_words(mesh: dict[str, Any], words: str) -> None:
    said = " ".join(step_lines(plan(small(**mesh), cluster=A100), A100))
    assert f"% waits for {words}" in said
    assert "along" not in said


def test_a_block_with_a_cuda_graph_costs_its_host_one_launch() -> None:
    """Four launches take 8 s, a graph 3. Kernels of the head and of the step are launched one by one."""
    costs = SlowHost(graph=3)
    for unit, phase, left in (
        ("h.0", "forward", [2, 1, 0, 0]),
        ("h.0.mlp.c_fc", "backward", [2, 1, 0, 0]),
        ("lm_head", "forward", [2] * 4),
        ("", "optimizer", [2] * 4),
    ):
        pace = PaceLedger(costs, detail=True)
        pace.read([Kernel(Scope(0, phase, unit), name, "vector", 0, 1, 1) for name in "abcd"])
        assert [entry.launch for entry in pace.entries if isinstance(entry, Busy)] == left


@pytest.mark.slow
def test_cuda_graphs_take_from_the_host_alone_and_never_make_a_step_longer(capsys: pytest.CaptureFixture[str]) -> None:
    h100 = cluster_of(find_hardware("h100-80"))
    for mesh in ({}, *MESHES.values()):
        for kernels in ("eager", "compiled", "fused"):
            runs = ({**mesh, "kernels": kernels, "cuda_graphs": on} for on in (False, True))
            single, graphs = (planned(small(**run), h100).last for run in runs)
            assert graphs.end <= single.end
            assert (graphs.compute, graphs.kernels) == (single.compute, single.kernels)
    assert graphs.host < 0.2 * single.host
    capsys.readouterr()
    for more, is_said in (([], True), (["--cuda-graphs"], False)):
        main(["plan", "--gpu", "h100-80", "--ranks", "1", *more])
        assert ("The host decides how long the step takes" in " ".join(capsys.readouterr().out.split())) == is_said


def test_a_small_llama_is_faster_compiled_and_no_slower_with_graphs() -> None:
    """Llama-3.2-1B on one B200, 512 tokens, full recompute; forward and backward (stas00/ml-engineering 744d01e). What
    is modelled is printed beside what was measured: a direction is held, nothing is fitted."""
    sizes = dict(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256, seq=512, attention="flash")
    run = dict(model="llama", ranks=1, stage=0, recipe="ddp", precision="bf16-pure", recompute="full", **sizes)
    measured = {"eager": 48.8, "compiled": 12.6, "with graphs": 8.1}
    modelled = []
    for name, (words, milliseconds) in zip(("eager", "compiled", "compiled"), measured.items(), strict=True):
        config = plan_config(**run, kernels=name, cuda_graphs=words == "with graphs")
        spans = planned(config, cluster_of(find_hardware("b200"))).last.spans
        modelled.append(1e3 * max(span.stop for span in spans if span.scope.phase == "backward"))
        print(f"{words}: measured {milliseconds} ms, modelled {modelled[-1]:.1f} ms")
    assert modelled[0] > modelled[1] >= modelled[2]


def test_what_the_clock_refuses() -> None:
    lonely: list[Entry] = [
        Launch(Scope(0), 1, "all_reduce", "bf16", "states", "dp_shard", (0, 1), 0, 8, 8, 8),
        Wait(Scope(0), 1),
    ]
    with pytest.raises(InputError, match="rank 0 waits for a call that another rank never makes"):
        simulate({0: lonely, 1: []}, [0, 1], Mesh(dp_shard=2), BytePerSecond())
    with pytest.raises(InputError, match="node_gpus 0"):
        cluster_of(find_hardware("a100-80"), node_gpus=0)
