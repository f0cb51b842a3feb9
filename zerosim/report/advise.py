"""The page of `zerosim advise`: plans that differ in kind, each with its certainty, speed, price and launch files; what
was tried; and if nothing fits, the smallest changes with which it would."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from zerosim.analysis.advise import Advice, Proposed
from zerosim.analysis.meshes import mesh_values
from zerosim.analysis.offload_ways import other_memories
from zerosim.analysis.search import Tried
from zerosim.analysis.step_interval import step_interval
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.dialects.kinds import DIALECTS
from zerosim.dialects.writing import Written, write
from zerosim.errors import InputError
from zerosim.report import words
from zerosim.report.fit import above_published, mesh_flags
from zerosim.report.interval import band, implausible, interval_words, not_ranked, three_figures
from zerosim.report.look import Adaptive, Grid, Stack, prose, right, titled
from zerosim.report.memory import Certainty
from zerosim.report.names import STAGES, counted, listed
from zerosim.report.time import speed_text, step_values
from zerosim.report.verdict import Limit, assumed, verdict
from zerosim.report.warnings import warnings_of
from zerosim.units import format_bytes, format_count

KINDS = {
    "simplest": "Simplest: data parallelism alone",
    "fastest": "Fastest",
    "offloaded": "With states in the nodes' other memory",
    "longest rows": "Longest rows",
    "largest batch": "Largest batch in one pass",
}
WRITERS = {
    "deepspeed": ("deepspeed",),
    "hf-deepspeed": ("accelerate",),
    "fsdp1": ("accelerate",),
    "ddp": ("accelerate",),
    "megatron": ("megatron",),
    "fsdp2": ("torchtitan-toml", "accelerate", "fsdp2"),
}
"""The kinds of files for each recipe, the most usual first."""


TOLD = ("loss", "recompute", "offload", "lora_rank", "base", "dp_replicate", "cp", "micro_batch", "accumulate", "seq")
"""Options of a plan that people have to set elsewhere if its launch file cannot say them."""


class Price(NamedTuple):
    """The tokens to train on, and what a GPU costs for an hour; None for what was not said."""

    tokens: float | None = None
    per_gpu_hour: float | None = None
    currency: str = ""


class Launch(NamedTuple):
    """A plan's launch files: their kind, the folder and the name of the first one, and what is in them."""

    kind: str
    folder: str
    name: str
    made: Written


class Page(NamedTuple):
    """The advice, how sure each plan is, the device, the words that every command has, and each plan's launch files
    (or why no framework's file can say it)."""

    config: RunConfig
    batch: int
    advice: Advice
    sure: Sequence[Certainty | None]
    limit: Limit
    cluster: Cluster | None
    price: Price
    same: Sequence[str]
    launches: Sequence[Launch | str]
    all: bool = False

    def stack(self) -> Stack:
        config, plans = self.config, self.advice.plans
        device = f"{counted(config.mesh.ranks, 'GPU')} of {self.limit.name or format_bytes(self.limit.nbytes)}"
        rank = config.value("lora_rank")
        trains = f", adapters of rank {rank}" if rank else ""
        about = f"{words.model_name(config)}{trains} on {device}"
        if not plans:
            return Stack(*self._nothing(about), self._groups())
        parts: list[Any] = [Stack(prose(self._answer(), "bold green"), prose(f"{about}."), close=True)]
        for plan, sure, launch in zip(plans, self.sure, self.launches, strict=True):
            parts.append(self._plan(plan, sure, launch))
        stopped = "Stopped: there may be better plans." if not self.advice.ended else ""
        return Stack(
            *parts,
            prose(stopped, "bold red") if stopped else None,
            self._groups(),
            prose(assumed(plans[0].tried.config, self.limit, self.cluster), "dim") if self.all else None,
            prose("More: --all (assumptions), --json FILE (every figure), --write DIR (every plan's files).", "dim"),
        )

    def _answer(self) -> str:
        """Return how many plans there are and how fast the fastest one is."""
        timed = [plan.tried for plan in self.advice.plans if plan.kind not in ("longest rows", "largest batch")]
        speeds = [values["tokens_per_s"] for tried in timed if (values := self._speed(tried))]
        best = f", at up to {three_figures(max(speeds))} tokens/s" if speeds else ""
        return f"It fits: {counted(len(self.advice.plans), 'plan')}{best}."

    def _speed(self, tried: Tried) -> dict[str, Any] | None:
        return None if tried.time is None else step_values(tried.config, tried.time, self.cluster)

    def _plan(self, plan: Proposed, sure: Certainty | None, launch: Launch | str) -> Stack:
        tried, config = plan.tried, plan.tried.config
        what = KINDS[plan.kind]
        if plan.kind == "longest rows":
            what += f": {config.model.seq:,} tokens"
        if plan.kind == "largest batch":
            what += f": {counted(config.data.micro_batch, 'row')} on each GPU"
        stage = STAGES[config.parallel.zero_stage]
        shape = words.shape(config)
        lines = [f"{config.parallel.recipe}, {stage}{f', {shape}' if shape else ''}."]
        lines.append(verdict(config, self.limit, tried.peak_bytes))
        lines += [*(sure.lines() if sure else ())]
        if (values := self._speed(tried)) and self.cluster is not None and tried.time is not None:
            of = step_interval(config, tried.time, self.cluster)
            lines.append(speed_text(values, "" if of is None else interval_words(of, tried.time.seconds)))
            lines += [text] if (text := implausible(config, values["mfu"], self.cluster)) else []
            lines += [text] if (text := self._cost(tried, values)) else []
            lines += ["Its range overlaps the simplest plan's."] if self._is_no_faster(plan) else []
            beyond = above_published(self.advice.beyond, tried, self.cluster) if plan.kind == "fastest" else ""
            lines += [beyond] if beyond else []
        tokens = f"{counted(config.global_batch, 'row')} of {config.model.row_tokens:,} tokens"
        lines.append(f"It forces a global batch of {tokens}, {config.tokens:,} tokens a step.")
        if plan.relief is not None:
            less, flags, price = plan.relief
            freed = format_bytes(tried.peak_bytes - less.peak_bytes)
            lines.append(f"If it is a little short: {_named(flags)} frees {freed}. Its price: {price}.")
        warnings = [*warnings_of(config, self.limit, self.cluster, tried.peak_bytes), *(sure.doubts if sure else ())]
        lines += [f"Warning: {text}." for text in warnings]
        if isinstance(launch, str):
            lines.append(f"No launch file: {launch}.")
        elif beside := [name for name in launch.made.rest if name in TOLD]:
            lines.append(f"Its file cannot say {listed(beside)}: set it in your training script.")
        return Stack(prose(what, "bold"), *map(prose, lines), prose(self._command(config, launch), "cyan"), close=True)

    def _is_no_faster(self, plan: Proposed) -> bool:
        """Return whether the fastest plan cannot be told from the simplest one."""
        first, cluster = self.advice.plans[0], self.cluster
        if plan.kind != "fastest" or first.kind != "simplest" or cluster is None:
            return False
        times = [(one.tried.config, one.tried.time) for one in (first, plan)]
        return not_ranked([band(config, time, cluster) for config, time in times if time is not None]) > 0

    def _command(self, config: RunConfig, launch: Launch | str) -> str:
        """Return the command that plans this and writes its files."""
        seq = [f"--seq {config.model.seq}"] if config.model.seq != self.config.model.seq else []
        parts = ["zerosim plan", *self.same, *seq, mesh_flags(config)]
        writes = [] if isinstance(launch, str) else [f"--write {launch.kind} {shlex.quote(launch.name)}"]
        return " ".join([*parts, *writes])

    def _least_command(self) -> str:
        """Return the command that plans the least that was tried, to which a change's flags are added."""
        assert self.advice.least is not None
        return self._command(self.advice.least.config, "")

    def _cost(self, tried: Tried, values: dict[str, Any]) -> str:
        """Return the hours and the price of the tokens to train on, or the price of a billion."""
        tokens, each, currency = self.price
        if tokens is None and each is None:
            return ""
        costs = self._costs(tried, values, tokens or 1e9)
        paid = f" cost {_money(costs['cost'], currency)}" if each is not None else ""
        if tokens is None:
            return f"A billion tokens{paid}."
        took = f"{format_count(int(tokens))} tokens take {_hours(costs['hours'])}, "
        return f"{took}{three_figures(costs['gpu_hours'])} GPU-hours{', and' * bool(paid)}{paid}."

    def _nothing(self, about: str) -> list[Any]:
        least, fixes = self.advice.least, self.advice.fixes
        assert least is not None
        short = verdict(least.config, self.limit, least.peak_bytes)
        if least.taken_bytes <= self.limit.nbytes:
            short += " But PyTorch's caching allocator leaves gaps, and is refused."
        found: list[Any] = [
            Stack(prose("Nothing fits.", "bold red"), prose(f"{about}. {mesh_flags(least.config)} takes the least."),
                  prose(short), close=True)
        ]  # fmt: skip
        stopped = [] if self.advice.ended else [prose("Stopped: other changes may fit too.", "bold red")]
        if not fixes:
            return [*found, *(stopped or [prose("No change that was tried makes it fit.")])]
        grid = Grid("with", "flags", right("peak"), "price")
        for fix in fixes:
            grid.add(fix.name, fix.flags, format_bytes(fix.tried.peak_bytes), fix.price)
        note = "Each was planned, beside the flags above."
        if not other_memories(self.config, self.cluster):
            note += " Host memory is unknown: --host-memory SIZE tries offload."
        return [*found, titled("Smallest changes that fit", Adaptive(grid, grid.without("price")), note), *stopped]

    def _groups(self) -> Any:
        """Return what was tried: each recipe and ZeRO stage with its cuts, and why it is not the answer."""
        if not self.advice.groups:
            return None
        grid = Grid("recipe", "ZeRO", "cuts", right("ways"), right("too much memory"), right("tokens/s, estimated"))
        rows = sorted(self.advice.groups, key=lambda group: group.seconds or float("inf"))
        for group in rows if self.all else rows[:8]:
            tokens = self.batch * self.config.model.row_tokens
            speed = three_figures(tokens / group.seconds) if group.seconds else None
            ways, cuts = f"{group.ways:,}", " ".join(group.cuts) or "-"
            too_much = f"{group.too_much:,}" if group.too_much else "-"
            grid.add(group.recipe, str(group.stage), cuts, ways, too_much, speed)
        left = len(rows) - 8
        note = f"{self.advice.candidates:,} ways to cut model and batch, {self.advice.planned:,} planned whole. "
        note += "Without a speed: too much memory, or slower by a lower bound."
        note += f" {left} more rows: --all." if left > 0 and not self.all else ""
        return titled("What was tried", Adaptive(grid, grid.without("ways")), note)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        plans = []
        for plan, sure, launch in zip(self.advice.plans, self.sure, self.launches, strict=True):
            tried, values = plan.tried, self._speed(plan.tried)
            relief = plan.relief
            plans.append({
                "kind": plan.kind,
                **mesh_values(tried.config),
                "seq": tried.config.model.seq,
                "global_batch": tried.config.global_batch,
                "peak_bytes": tried.peak_bytes,
                "reserve_bytes": tried.reserve_bytes,
                "certainty": None if sure is None else sure.to_dict(),
                "time": values,
                **self._costs(tried, values, self.price.tokens),
                "relief": relief and {"flags": relief[1], "price": relief[2], "peak_bytes": relief[0].peak_bytes},
                "command": self._command(tried.config, launch),
                "config": tried.config.to_dict(),
            })  # fmt: skip
        fixes = [{"name": one.name, "flags": one.flags, "price": one.price, **one.tried.to_dict(),
                  "command": f"{self._least_command()} {one.flags}"} for one in self.advice.fixes]  # fmt: skip
        return {
            "plans": plans,
            "fits": bool(plans),
            "changes": fixes,
            "tried": [group._asdict() for group in self.advice.groups],
            "ended": self.advice.ended,
        }

    def _costs(self, tried: Tried, values: dict[str, Any] | None, tokens: float | None) -> dict[str, Any]:
        """Return the hours of so many tokens, and their cost; None for what is unknown."""
        each = self.price.per_gpu_hour
        hours = None if tokens is None or values is None else tokens / values["tokens_per_s"] / 3600
        gpu_hours = None if hours is None else hours * tried.config.mesh.ranks
        cost = None if each is None or gpu_hours is None else gpu_hours * each
        return {"hours": hours, "gpu_hours": gpu_hours, "cost": cost, "currency": self.price.currency or None}


def launch_of(plan: Proposed) -> Launch | str:
    """Return the files of the first kind that can say this plan, or why none can. torchtitan starts no model without a
    flavor of it."""
    why = "no framework's file says this recipe"
    for kind in WRITERS.get(plan.tried.config.parallel.recipe, ()):
        name = f"{plan.kind.split()[0]}{DIALECTS[kind].suffix}"
        try:
            made = write(plan.tried.config, kind, name)
        except InputError as error:
            why = str(error)
            continue
        if "model" not in made.rest or not kind.startswith("torchtitan"):
            return Launch(kind, plan.kind.split()[0], name, made)
    return why


def _named(flags: str) -> str:
    """Return flags, with a name for the loss that is a library's."""
    return flags.replace("--loss liger", "Liger's fused loss (--loss liger)")


def _money(amount: float, currency: str) -> str:
    return f"{three_figures(amount)} {currency}".strip()


def _hours(hours: float) -> str:
    return f"{three_figures(hours / 24)} days" if hours >= 48 else f"{three_figures(hours)} hours"
