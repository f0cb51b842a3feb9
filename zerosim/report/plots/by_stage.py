"""Bytes per rank by ZeRO stage as stacked bars: held bytes, as in the ZeRO paper's Figure 1, and bytes sent in one
step.

Drawn from counts; the closed forms of the traffic stand beside them as lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from zerosim.analysis import formulas
from zerosim.analysis.compare import control_bytes, last_whole_step
from zerosim.analysis.facts import all_reduce_times
from zerosim.analysis.shares import alike_stages, is_mesh, itemsizes, shares_of
from zerosim.analysis.weights import passes_of
from zerosim.config import RunConfig
from zerosim.errors import InputError, wrong
from zerosim.ledger.memory import MARKS
from zerosim.placement.memories import HOST, NVME
from zerosim.report.plots.bars import Bar, Reference, bars_chart, which_rank
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.style import KIND_PAINTS, OP_PAINTS, Paint
from zerosim.report.plots.words import check_results, limit_words, run_words
from zerosim.report.words import stage_name
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

MOMENTS = {
    "after_init": "after the start, before any step",
    "end_of_forward": "when forward ends",
    "end_of_backward": "when backward ends",
    "after_step": "after the step",
    "peak": "at the peak",
}


OTHER_MEMORIES = {HOST: "on the host", NVME: "on NVMe"}

Reserve = Callable[[RunConfig], int]
"""Bytes reserved for memory outside the program."""
UP_TO_PEAK, OUTSIDE = "up to the peak", "outside the program"
_PAINTS = {
    **KIND_PAINTS,
    UP_TO_PEAK: Paint("#8a9099", "#6f7a86", "\\\\\\"),
    OUTSIDE: Paint("#4a525b", "#b4bdc7", "///"),
}


def memory_bars(
    results: Mapping[str, RunResult], mark: str = "end_of_backward", reserve: Reserve | None = None
) -> list[Bar]:
    """Return live bytes by kind at a mark, on the rank that has the most of them there. One bar per result; for a
    single pipeline one per pipeline stage, equal ones together. With offload one more per other memory. With a
    `reserve` also the bytes that decide whether it fits: the highest peak's excess, and the reserve.

    Raises: InputError for a mark that is not one of `MOMENTS`.
    """
    check_results(results)
    if mark not in MOMENTS:
        raise wrong("mark", f" {mark!r}: expected one of {', '.join((*MARKS, 'peak'))}")
    drawn: list[tuple[Bar, RunResult, Sequence[int]]] = []
    for label, result in results.items():
        held = [(memory.peak if mark == "peak" else memory.marks[mark]).by_kind for memory in result.memory]
        if _is_one_pipeline(results):
            drawn += [(bar, result, ranks) for bar, ranks in _by_pipeline_stage(result, held)]
        else:
            drawn.append((Bar.of(label, dict(enumerate(held))), result, range(len(held))))
        drawn += [(bar, result, ()) for bar in _other_memories(label, result, mark)]
    if reserve is None:
        return [bar for bar, _, _ in drawn]
    return [replace(bar, beyond=_beyond(bar, result, ranks, reserve)) if ranks else bar for bar, result, ranks in drawn]


def _other_memories(label: str, result: RunResult, mark: str) -> Iterator[Bar]:
    """Yield a bar for each memory beside the device's in which model states lie."""
    for name, words in OTHER_MEMORIES.items():
        held = {
            rank: (memory.others[name].peak if mark == "peak" else memory.others[name].marks[mark]).by_kind
            for rank, memory in enumerate(result.memory)
            if name in memory.others
        }
        if held:
            yield Bar.of(f"{label.split(' (')[0]}, {words}", held)


def _beyond(bar: Bar, result: RunResult, ranks: Iterable[int], reserve: Reserve) -> dict[str, int]:
    """Return the excess of these ranks' highest peak over the bar, and the reserve."""
    peak = max(result.memory[rank].peak.total_bytes for rank in ranks)
    parts = {UP_TO_PEAK: peak - bar.total_bytes, OUTSIDE: reserve(result.config)}
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def _is_one_pipeline(results: Mapping[str, RunResult]) -> bool:
    return len(results) == 1 and all(result.layout.mesh.pp > 1 for result in results.values())


def _by_pipeline_stage(result: RunResult, held: Sequence[Mapping[str, int]]) -> Iterator[tuple[Bar, Sequence[int]]]:
    """Return of each pipeline stage the rank that has the most, and its ranks; equal neighbours are one."""
    shares = shares_of(result)
    bars = [Bar.of("", {rank: held[rank] for rank in share.ranks}) for share in shares]
    for run in alike_stages([(bar.parts, bar.alike) for bar in bars]):
        ranks = [rank for stage in run for rank in shares[stage].ranks]
        yield replace(bars[run[0]], label=stage_name(run)), ranks


def memory_figure(
    results: Mapping[str, RunResult],
    *,
    limit: tuple[str, int] | None = None,
    mark: str = "end_of_backward",
    reserve: Reserve | None = None,
) -> Chart:
    """Return one bar per result, named by its key, such as 'ZeRO-1 (P_os)'; padding is counted.

    `limit` is a device's name and memory in bytes; with a `reserve` the peak and the reserve, which decide whether it
    fits, lie behind the held bytes. Raises: InputError for no results, and for an unknown mark.
    """
    bars = memory_bars(results, mark, reserve)
    title, subtitle, notes = f"Bytes per rank {MOMENTS[mark]}", run_words(results), [which_rank(bars, "holds")]
    if _is_one_pipeline(results):
        stage = next(iter(results)).split(" (")[0]
        title, subtitle = f"{title}, by pipeline stage", f"{stage}, {subtitle}"
        is_alike = all(bar.alike for bar in bars)
        notes = [f"Ranks of one stage {'hold the same' if is_alike else 'differ: drawn is the one that holds most'}."]
    if any(bar.beyond for bar in bars):
        notes.append(
            "In brackets, the bytes that decide whether it fits: the highest peak, and the reserve outside the program."
        )
    references = [] if limit is None else [Reference(limit_words(limit), limit[1])]
    return bars_chart(title, subtitle, bars, _PAINTS, notes, references)


def traffic_bars(results: Mapping[str, RunResult]) -> list[Bar]:
    """Return bytes sent for model states by operation, in the last step that was not skipped, by the rank that sends
    most.

    Raises: InputError if every step of a run was skipped.
    """
    check_results(results)
    bars = []
    for label, result in results.items():
        step = last_whole_step(result)
        if step is None:
            raise InputError(f"{label}: every step was skipped, so there is no complete step to draw; run more steps")
        sent: dict[int, dict[str, int]] = {}
        for rank, rows in enumerate(result.traffic):
            sent[rank] = Counter()
            for row in rows:
                if row.step == step and row.purpose == "states":
                    sent[rank][row.op] += row.wire_bytes
        bars.append(Bar.of(label, sent))
    return bars


def traffic_formulas(results: Mapping[str, RunResult]) -> list[Reference]:
    """Return 2Ψ (by all pairs NΨ) and 3Ψ times (N-1)/N in bytes, for one microbatch and no tied table, twice that if
    curvature is estimated after the step; none if runs differ in Ψ, N or dtype, and none with replicas, tensor
    parallelism or a pipeline.

    Source: ZeRO paper, section 7, through `formulas.volume`.
    """
    sizes = {
        (result.num_parameters, result.config.mesh.ranks, *itemsizes(result.config)) for result in results.values()
    }
    configs = [result.config for result in results.values()]
    if len(sizes) != 1 or any(config.mesh.dp_replicate > 1 or is_mesh(config) for config in configs):
        return []
    (size,) = sizes
    if size[1] == 1:
        return []
    passes = max(passes_of(result, last_whole_step(result) or 0) for result in results.values())
    all_reduce = all_reduce_times(configs[0], size[1])
    volumes = [formulas.volume(0, all_reduce=passes * all_reduce), formulas.volume(3, formulas.Schedule(passes))]
    held = dict(zip(("Ψ", "N", "w", "g"), size, strict=True))
    return [Reference(f"formula: {volume}", volume.total.at(held)) for volume in volumes]


def traffic_figure(results: Mapping[str, RunResult]) -> Chart:
    """Return one bar per result, named by its key.

    Raises: InputError for no results, and a run in which every step was skipped.
    """
    bars = traffic_bars(results)
    references = traffic_formulas(results)
    notes = [which_rank(bars, "sends")]
    if references:
        notes.append("Dashed: the formulas times bytes per element and (N-1)/N, for one microbatch and no tied table.")
    elif not any(bar.total_bytes for bar in bars):
        notes = ["One rank sends nothing."]
    if any(result.is_modelled for result in results.values()):
        notes.append("The bytes of native collectives are not visible: their bars are a ring's bytes, modelled.")
    control = max(max(control_bytes(result, last_whole_step(result) or 0)) for result in results.values())
    if control:
        notes.append(f"Norms and overflow flags, at most {format_bytes(control)} per rank, are not drawn.")
    return bars_chart("Bytes sent per rank in one step", run_words(results), bars, OP_PAINTS, notes, references)
