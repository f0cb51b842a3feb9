"""The closed forms with one's own numbers put in: what `zerosim explain` prints.

Which terms there are is in `explain_states.py` and `explain_activations.py`. Nothing here was counted: a run's own
tables are in `tables.py`.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column

from zerosim.analysis import formulas
from zerosim.analysis.question import Question, Shape
from zerosim.config.presets.recipes import find_recipe
from zerosim.report.explain_activations import blocks, copies, exchanges, paper_activations
from zerosim.report.explain_states import gathered, optimizer_step, states, traffic
from zerosim.report.explain_terms import PRINTED, Section, gigabytes
from zerosim.report.look import Adaptive, Grid, Stack, prose, right, titled
from zerosim.report.names import OPTIMIZERS, STAGES, counted, show
from zerosim.report.notebook import InNotebook


class Explanation(InNotebook):
    """A question and the sections that answer it."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.sections = _sections(question)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `counted` is false, for nothing was run."""
        asked = self.question
        names = ("stage", "num_parameters", "ranks", "replicas", "tp", "pp", "sequence_parallel", "micro_batches")
        optim = asked.config.optim
        shape = {name: getattr(asked.shape, name) for name in Shape.__slots__} if asked.shape else None
        return {
            "schema": 1,
            "counted": False,
            "question": {
                **{name: getattr(asked, name) for name in names},
                "precision": asked.config.precision.param_dtype,
                "optimizer": optim.optimizer,
                "momentum": optim.momentum,
                "recipe": asked.config.parallel.recipe,
                "gather": asked.config.gathering.gather,
                "shape": shape,
            },
            "count_with": plan_command(asked),
            "sections": {
                part.key: {
                    "terms": [term.to_dict() for term in part.terms],
                    "agrees_with_printed": part.agrees,
                    "notes": list(part.notes),
                }
                for part in self.sections
            },
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        asked = self.question
        yield Stack(
            Stack(
                prose(_headline(asked), "bold"),
                prose("Formulas with your numbers put in: nothing was run and nothing was counted.", "yellow"),
                prose(f"To have a model's bytes counted: {plan_command(asked)}"),
                close=True,
            ),
            _recipe(asked),
            *(_shown(section) for section in self.sections),
        )


def _sections(question: Question) -> tuple[Section, ...]:
    """Every formula that answers the question."""
    found = [states(question)]
    if question.config.grads.upcast and question.grad_bytes < formulas.MASTER_BYTES:
        found.append(optimizer_step(question))
    found.append(traffic(question))
    if question.shape is not None and question.stage == 3:
        found.append(gathered(question, question.shape))
    if question.shape is not None:
        found += exchanges(question, question.shape) + copies(question, question.shape)
        found += [blocks(question, question.shape), paper_activations(question, question.shape)]
    return tuple(found)


def plan_command(asked: Question) -> str:
    """The command that counts what this question's formulas say."""
    words = [f"zerosim plan --stage {asked.stage} --ranks {asked.ranks}"]
    words += [f"--dp-replicate {asked.replicas}"] if asked.replicas > 1 else []
    words += [f"--tp {asked.tp}"] if asked.tp > 1 else []
    words += [f"--pp {asked.pp}"] if asked.pp > 1 else []
    words += [f"--pipeline {asked.pipeline.pipeline}"] if asked.pipeline.pipeline else []
    words += ["--sequence-parallel"] if asked.sequence_parallel else []
    given, usual = asked.config.given, {"recipe": "paper", "precision": "bf16", "optimizer": "adam", "momentum": 0}
    for name in ("recipe", "gather", "precision", "rounding", "optimizer", "momentum"):
        words += [f"--{name} {given[name]}"] if given.get(name, usual.get(name)) != usual.get(name) else []
    words += [f"--accumulate {asked.micro_batches}"] if asked.micro_batches > 1 else []
    shape = asked.shape
    if shape is None:
        words.append(f"--model flat --params {asked.num_parameters}")
    else:
        words.append(f"--layers {shape.layers} --hidden {shape.hidden} --heads {shape.heads}")
        words.append(f"--seq {shape.seq} --micro-batch {shape.micro_batch} --dropout 0.1")
        words += [f"--recompute {shape.recompute}"] if shape.recompute != "none" else []
        words += ["--partition-activations"] if shape.partition_activations else []
        words += ["--cpu-checkpointing"] if shape.cpu_checkpointing else []
    return " ".join(words)


def _headline(asked: Question) -> str:
    ranks = f"N = {counted(asked.ranks, 'rank')}"
    if asked.replicas > 1:
        ranks = f"{asked.ranks:,} ranks, {asked.replicas:,} replicas of N = {asked.shards:,}"
    if asked.parts_of_model > 1:
        ranks = f"{asked.ranks:,} ranks, pp {asked.pp} x dp {asked.shards * asked.replicas} x tp {asked.tp}"
        ranks += f" in {asked.replicas:,} replicas" if asked.replicas > 1 else ""
    optim, precision = asked.config.optim, asked.config.precision.param_dtype
    optimizer = OPTIMIZERS[optim.optimizer] + (f" with momentum {optim.momentum:g}" if optim.momentum else "")
    return (
        f"{STAGES[asked.stage]} on {ranks}: Ψ = {asked.num_parameters:,} parameters, {precision}, "
        f"{optimizer}, recipe {asked.config.parallel.recipe}"
    )


def _recipe(asked: Question) -> RenderableType | None:
    """What the recipe stands for; the paper's needs no words."""
    recipe = find_recipe(asked.config.parallel.recipe)
    if recipe.name == "paper":
        return None
    note = recipe.note(asked.stage, asked.config.precision.stored)
    return Stack(
        prose(recipe.models),
        prose(f"Approximations: {recipe.approximations}", "dim"),
        prose(note[0].upper() + note[1:] + ".", "yellow") if note else None,
        prose(f"Source: {recipe.source}.", "dim"),
        close=True,
    )


def _shown(section: Section) -> RenderableType:
    formula, numbers = Column("formula", style="cyan", no_wrap=True), Column("numbers put in", no_wrap=True)
    wide = Grid(Column("", no_wrap=True), formula, numbers, right("bytes", no_wrap=True), right("", no_wrap=True))
    # Where there is little room the numbers stand below the formula, and may wrap; bytes never do.
    narrow = Grid("", Column("formula, numbers put in", overflow="fold"), right("bytes", no_wrap=True))
    for term in section.terms:
        style, rounded = "bold" if term.is_sum else "", gigabytes(term.value)
        wide.add(term.name, term.formula, term.numbers, term.value, rounded, style=style)
        below = f"{term.formula}\n{term.numbers}".rstrip()
        narrow.add(term.name, below, f"{show(term.value)}\n{rounded}", style=style)
    parts: list[RenderableType] = [titled(section.title, Adaptive(wide, narrow))]
    for note in section.notes:
        if section.agrees is not None and note.startswith(PRINTED):
            # Whether the formula, rounded as the paper rounds, gives what it prints.
            parts.append(prose(f"✓ {note}", "bold green") if section.agrees else prose(f"≠ {note}", "bold red"))
        else:
            parts.append(prose(note, "dim"))
    return Stack(*parts, close=True)
