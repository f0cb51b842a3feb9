"""ZeRO stages of one configuration side by side, each a plan: a GPU's bytes, whether it fits, seconds, traffic."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column

from zerosim.analysis.changes import sent
from zerosim.config.presets.cluster import Cluster
from zerosim.errors import InputError
from zerosim.report import words
from zerosim.report.interval import implausible, three_figures
from zerosim.report.look import Adaptive, Grid, Stack, prose, right, titled
from zerosim.report.names import KINDS, STAGES, counted, kind_words, listed
from zerosim.report.notebook import InNotebook
from zerosim.report.plan import BAR, SMALL
from zerosim.report.tables import kept_text, mesh_text, set_aside_text
from zerosim.report.time import step_values, times_table
from zerosim.report.verdict import Limit, Planned, assumed, device_text
from zerosim.report.warnings import warnings_of, warnings_text
from zerosim.units import format_bytes, format_count

UNUSED = "unused inside the allocator"


class StagePlans(InNotebook):
    """Plans by ZeRO stage; an InputError stands for a stage that cannot be planned. At least one was planned.

    `why_shapes` says why nothing was trained, if the user did not ask for that.
    """

    def __init__(
        self,
        outcomes: Mapping[int, Planned | InputError],
        limit: Limit | None = None,
        cluster: Cluster | None = None,
        why_shapes: str = "",
    ) -> None:
        self.outcomes, self.limit, self.cluster, self.why_shapes = dict(outcomes), limit, cluster, why_shapes
        self.plans = {stage: out for stage, out in outcomes.items() if isinstance(out, Planned)}
        self.configs = {stage: plan.result.config for stage, plan in self.plans.items()}
        self.fitting = [stage for stage, plan in self.plans.items() if plan.fits(limit)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        configs = list(self.configs.values())
        yield Stack(
            Stack(
                prose(self._answer(), "bold green" if self.fitting else "bold red") if self.limit else None,
                prose(self._about()),
                prose(self.why_shapes) if self.why_shapes else None,
                close=True,
            ),
            self._memory_bars(),
            self._time_bars(),
            self._kinds_table(),
            times_table(configs[0], self._times(), self.cluster),
            self._traffic_table(),
            mesh_text(configs[-1]),
            kept_text(configs[-1]),
            set_aside_text(*configs),
            prose(assumed(configs[-1], self.limit), "dim"),
            warnings_text(self._warnings()),
        )

    def _answer(self) -> str:
        """Return which ZeRO stages fit on the device."""
        assert self.limit is not None
        where = f"on {device_text(self.limit)}"
        if not self.fitting:
            least = min(self.plans, key=lambda stage: self.plans[stage].total_bytes(self.limit))
            return f"No stage fits {where}. {STAGES[least]} takes the least: {self._room(least)}."
        rest = [stage for stage in self.plans if stage not in self.fitting]
        does = f"{_named(self.fitting)} fit{'s' * (len(self.fitting) == 1)} {where}"
        return f"{does}, {_named(rest).lower()} {'does' if len(rest) == 1 else 'do'} not." if rest else f"{does}."

    def _about(self) -> str:
        """Return what was planned, and the recipe, which is one for all stages unless `usual` was asked for."""
        plan = next(iter(self.plans.values())).result
        config, of = plan.config, f" of {self.limit.name}" if self.limit is not None and self.limit.name else ""
        mesh = f": {shape}" if (shape := words.shape(config)) else ""
        recipes = {stage: config.parallel.recipe for stage, config in self.configs.items()}
        recipe = f"recipe {config.parallel.recipe} at each"
        if len(set(recipes.values())) > 1:
            recipe = f"recipes {listed([f'{name} at {stage}' for stage, name in recipes.items()])}"
        return (
            f"{words.model_name(config)}: stages {listed(list(self.outcomes))} on "
            f"{counted(config.mesh.ranks, 'rank')}{of}{mesh}, {recipe}. "
            f"{format_count(plan.num_parameters)} parameters, {config.tokens:,} tokens a step."
        )

    def _room(self, stage: int) -> str:
        """Return how much of the device is free or missing; nothing without a device."""
        if self.limit is None:
            return ""
        room = self.limit.nbytes - self.plans[stage].total_bytes(self.limit)
        least = "at least " if self.plans[stage].refusal is not None else ""
        return f"{least}{format_bytes(abs(room))} {'free' if room >= 0 else 'short'}"

    def _memory_bars(self) -> RenderableType:
        taken = {stage: plan.total_bytes(self.limit) for stage, plan in self.plans.items()}
        grid = Grid("stage", right("bytes"), Column("bar"), Column("room", overflow="fold"), has_header=False)
        for stage, out in self.outcomes.items():
            if isinstance(out, InputError):
                grid.add(STAGES[stage], None, None, f"cannot be planned: {out}")
                continue
            room, bar = self._room(stage), _bar(taken[stage], taken.values())
            does = "fits, " if self.limit is not None and stage in self.fitting else ""
            grid.add(STAGES[stage], format_bytes(taken[stage]), bar, does + room)
        has_reserve = self.limit is not None and any(map(self.limit.reserve, self.configs.values()))
        title = "What each GPU takes: the peak" + " and what is reserved" * has_reserve
        return titled(title, Adaptive(grid, grid.without("bar")))

    def _time_bars(self) -> RenderableType | None:
        values = {stage: step_values(self.configs[stage], time, self.cluster) for stage, time in self._times().items()}
        seconds = {stage: own["step_s"] for stage, own in values.items() if own is not None}
        if not seconds:
            return None
        grid = Grid("stage", right("seconds"), Column("bar"), right("tokens"), right("sent"), has_header=False)
        for stage, own in values.items():
            if own is not None:
                nbytes = format_bytes(round(sum(sent(self.plans[stage].result).values())))
                speed = f"{three_figures(own['tokens_per_s'])} tokens/s"
                bar = _bar(seconds[stage], seconds.values())
                grid.add(STAGES[stage], f"{three_figures(seconds[stage])} s", bar, speed, nbytes)
        return titled("A step, modelled, and what each GPU sends in it", Adaptive(grid, grid.without("bar")))

    def _kinds_table(self) -> RenderableType:
        held: dict[int, dict[str, int]] = {}
        for stage, plan in self.plans.items():
            rank = plan.fullest
            held[stage] = {**rank.peak.by_kind, UNUSED: rank.reserved_bytes - rank.peak.total_bytes}
        grid = self._grid("kind")
        kinds = [kind for kind in (*KINDS, UNUSED) if any(own.get(kind) for own in held.values())]
        small = [kind for kind in kinds if all(own.get(kind, 0) < SMALL * sum(own.values()) for own in held.values())]
        for kind in kinds:
            if kind not in small:
                grid.add(kind_words(kind), *(own.get(kind) or None for own in held.values()))
        if small:
            grid.add("everything else", *(sum(own.get(kind, 0) for kind in small) for own in held.values()))
        grid.rule()
        grid.add("peak", *(plan.fullest.reserved_bytes for plan in self.plans.values()), style="bold")
        if self.limit is not None and any(reserves := [self.limit.reserve(one) for one in self.configs.values()]):
            grid.add("reserved (estimated)", *reserves)
        return titled("What the peak is made of, on the fullest GPU", Adaptive(grid.short()))

    def _traffic_table(self) -> RenderableType | None:
        found = {stage: sent(plan.result) for stage, plan in self.plans.items()}
        grid = self._grid("operation", "axis")
        for op, axis in dict.fromkeys(key for own in found.values() for key in own):
            grid.add(op, axis, *(own.get((op, axis)) for own in found.values()))
        if not any(found.values()):
            return None
        grid.rule()
        grid.add("total", None, *(sum(own.values()) or None for own in found.values()), style="bold")
        axes = {axis for own in found.values() for _, axis in own}
        body = grid.short() if len(axes) > 1 else grid.short().without("axis")
        note = "Counted: the mean over ranks, without norms and overflow flags."
        return titled("What each GPU sends in a step", Adaptive(body, body.joined("operation", "axis")), note)

    def _grid(self, *names: str) -> Grid:
        return Grid(*names, *(right(f"{stage}\n{STAGES[stage]}") for stage in self.plans))

    def _times(self) -> dict[int, Any]:
        times = {stage: plan.result.time for stage, plan in self.plans.items()}
        return {stage: time for stage, time in times.items() if time is not None}

    def _warnings(self) -> list[str]:
        """Return each warning once, with its ZeRO stages if it is not for all."""
        found: dict[str, list[int]] = {}
        for stage, config in self.configs.items():
            taken = self.plans[stage].fullest.reserved_bytes if stage in self.fitting else None
            said = warnings_of(config, self.limit, self.cluster, taken)
            values = step_values(config, time, self.cluster) if (time := self.plans[stage].result.time) else None
            if values is not None and self.cluster is not None:
                said += [text.rstrip(".")] if (text := implausible(values["mfu"], self.cluster)) else []
            for text in said:
                found.setdefault(text, []).append(stage)
        return [text if len(of) == len(self.plans) else f"{_named(of).lower()}: {text}" for text, of in found.items()]


def _named(stages: Sequence[int]) -> str:
    """Return 'Stage 3', 'Stages 0, 1 and 2'."""
    return f"Stage{'s' * (len(stages) > 1)} {listed(stages)}"


def _bar(value: float, of: Collection[float]) -> str:
    """Return a bar; the longest stands for the largest of all values."""
    return "█" * round(BAR * value / max(of))
