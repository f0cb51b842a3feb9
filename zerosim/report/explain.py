"""The closed forms with one's own numbers put in: what `zerosim explain` prints.

Owns how the terms look, and the JSON form. Which terms there are is `explain_terms.py`. Nothing here was
counted: a run's own tables are `states.py` and `traffic.py`.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table

from zerosim.analysis.question import Question, Shape
from zerosim.report.explain_terms import PRINTED, Section, Term, gigabytes, sections
from zerosim.report.look import Adaptive, Look, Stack, prose, show, titled
from zerosim.report.notebook import InNotebook

_STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}


class Explanation(InNotebook):
    """A question and the sections that answer it."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.sections = sections(question)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `counted` is false, for nothing was run."""
        asked = self.question
        names = ("stage", "num_parameters", "ranks", "replicas", "precision", "optimizer", "momentum", "micro_batches")
        shape = {name: getattr(asked.shape, name) for name in Shape.__slots__} if asked.shape else None
        return {
            "schema": 1,
            "counted": False,
            "question": {
                **{name: getattr(asked, name) for name in names},
                "recipe": asked.recipe.name,
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


def explain(question: Question) -> Explanation:
    """Every formula that answers the question."""
    return Explanation(question)


def plan_command(asked: Question) -> str:
    """The command that counts what this question's formulas say."""
    words = [f"zerosim plan --stage {asked.stage} --ranks {asked.ranks}"]
    words += [f"--dp-replicate {asked.replicas}"] if asked.replicas > 1 else []
    words += [f"--recipe {asked.recipe.name}"] if asked.recipe.name != "paper" else []
    words += [f"--precision {asked.precision}"] if asked.precision != "bf16" else []
    words += [f"--optimizer {asked.optimizer}"] if asked.optimizer != "adam" else []
    words += [f"--momentum {asked.momentum:g}"] if asked.momentum else []
    words += [f"--accumulate {asked.micro_batches}"] if asked.micro_batches > 1 else []
    shape = asked.shape
    if shape is None:
        words.append(f"--model flat --params {asked.num_parameters}")
    else:
        words.append(f"--layers {shape.layers} --hidden {shape.hidden} --heads {shape.heads}")
        words.append(f"--seq {shape.seq} --micro-batch {shape.micro_batch} --dropout 0.1")
        words += [f"--recompute {shape.recompute}"] if shape.recompute != "none" else []
    return " ".join(words)


def _headline(asked: Question) -> str:
    ranks = f"N = {asked.ranks:,} rank{'' if asked.ranks == 1 else 's'}"
    if asked.replicas > 1:
        ranks = f"{asked.ranks:,} ranks, {asked.replicas:,} replicas of N = {asked.shards:,}"
    optimizer = _OPTIMIZERS[asked.optimizer] + (f" with momentum {asked.momentum:g}" if asked.momentum else "")
    return (
        f"{_STAGES[asked.stage]} on {ranks}: Ψ = {asked.num_parameters:,} parameters, {asked.precision}, "
        f"{optimizer}, recipe {asked.recipe.name}"
    )


def _recipe(asked: Question) -> RenderableType | None:
    """What the recipe stands for; the paper's needs no words."""
    recipe = asked.recipe
    if recipe.name == "paper":
        return None
    note = recipe.note(asked.stage)
    return Stack(
        prose(recipe.models),
        prose(f"Approximations: {recipe.approximations}", "dim"),
        prose(note[0].upper() + note[1:] + ".", "yellow") if note else None,
        prose(f"Source: {recipe.source}.", "dim"),
        close=True,
    )


def _shown(section: Section) -> RenderableType:
    body = Adaptive(lambda look: _wide(look, section), lambda look: _narrow(look, section))
    first, *rest = section.notes
    parts: list[RenderableType] = [titled(section.title, body), prose(first, "dim")]
    for note in rest:
        is_printed = section.agrees is not None and note.startswith(PRINTED)
        parts.append(_compared(note, section.agrees) if is_printed else prose(note, "dim"))
    return Stack(*parts, close=True)


def _compared(note: str, agrees: bool | None) -> RenderableType:
    """What the paper prints, and whether the formula, rounded as it rounds, says the same."""
    mark, style = ("✓ ", "bold green") if agrees else ("≠ ", "bold red")
    return prose(mark + note, style)


def _wide(look: Look, section: Section) -> Table:
    table = look.table()
    table.add_column("", no_wrap=True)
    table.add_column("formula", style="cyan", no_wrap=True)
    table.add_column("numbers put in", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for term in section.terms:
        words = (term.name, term.formula, term.numbers)
        table.add_row(*(_letters(look, word) for word in words), show(term.value), gigabytes(term.value), **_row(term))
    return table


def _narrow(look: Look, section: Section) -> Table:
    """The same where there is little room: the numbers below the formula, which may wrap; bytes never do."""
    table = look.table()
    table.add_column("")
    table.add_column("formula, numbers put in", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    for term in section.terms:
        formula = _letters(look, f"{term.formula}\n{term.numbers}".rstrip())
        table.add_row(_letters(look, term.name), formula, f"{show(term.value)}\n{gigabytes(term.value)}", **_row(term))
    return table


def _row(term: Term) -> dict[str, Any]:
    return {"style": "bold"} if term.is_sum else {}


def _letters(look: Look, text: str) -> str:
    """In letters that can be printed: a square, too."""
    return look.text(text.replace("²", "^2") if look.ascii else text)
