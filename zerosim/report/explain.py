"""A run's closed forms with its numbers put in: the output of `zerosim explain`.

The forms are those with which a plan of the same run is compared (`analysis/forms.py`), the numbers are the
configuration's and its layout's. Nothing here is counted.
"""

from __future__ import annotations

from shlex import quote
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column

from zerosim.analysis.capabilities import notes_of
from zerosim.config import PLAN_DEFAULTS, WITH_VALUES, RunConfig
from zerosim.config.parts.clock import CLOCK
from zerosim.config.presets.recipes import find_recipe
from zerosim.report import words
from zerosim.report.explain_sections import PRINTED, SECTIONS, Asked, Section, gigabytes
from zerosim.report.look import Adaptive, Grid, Stack, prose, right, titled
from zerosim.report.names import OPTIMIZERS, show
from zerosim.report.notebook import InNotebook
from zerosim.report.tables import set_aside_text
from zerosim.report.warnings import recipe_note
from zerosim.train.check_trained import counts_of


class Explanation(InNotebook):
    """A configuration's closed forms, on the ranks of the first pipeline stage. Raises: InputError."""

    def __init__(self, config: RunConfig) -> None:
        self.asked = Asked(config)
        found = (section(self.asked) for section in SECTIONS)
        self.sections = tuple(section for section in found if section is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; `counted` is false, because nothing was run."""
        return {
            "schema": 2,
            "counted": False,
            "config": self.asked.config.to_dict(),
            "notes": list(self.asked.config.model.notes),
            "num_parameters": self.asked.placed.num_parameters,
            **counts_of(self.asked.config, self.asked.placed.layout),
            "count_with": plan_command(self.asked.config),
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
        config = self.asked.config
        optim = config.optim
        optimizer = OPTIMIZERS[optim.optimizer] + (f" with momentum {optim.momentum:g}" if optim.momentum else "")
        headline = (
            f"{words.model_name(config)}: {words.headline(config)}, Ψ = {self.asked.placed.num_parameters:,} "
            f"parameters{words.trained_of(self.asked.placed)}, {config.precision.param_dtype}, {optimizer}, "
            f"recipe {config.parallel.recipe}"
        )
        yield Stack(
            Stack(
                prose(headline, "bold"),
                *map(prose, notes_of(config, "size")),
                prose("Formulas with your numbers put in. Nothing was run or counted.", "yellow"),
                prose(f"To count the bytes: {plan_command(config)}"),
                close=True,
            ),
            set_aside_text(config),
            prose(told, "dim") if (told := words.notes_of_file(config)) else None,
            _recipe(config),
            *(_shown(section) for section in self.sections),
        )


def plan_command(config: RunConfig) -> str:
    """Return the command that counts what these formulas say: every given value."""
    said, unsaid = ["zerosim plan"], {*WITH_VALUES.split(), *CLOCK}
    for name, value in config.given.items():
        if value == PLAN_DEFAULTS.get(name, ...) or name in unsaid or (name == "steps" and value == 1):
            continue
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            said.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, (tuple, list)):
            said.append(f"{flag} {(' ' if name == 'betas' else ',').join(map(str, value))}")
        else:
            said.append(f"{flag} {'none' if value is None else quote(str(value))}")
    return " ".join(said)


def _recipe(config: RunConfig) -> RenderableType | None:
    """Return what the recipe stands for; the paper's needs no words."""
    recipe = find_recipe(config.parallel.recipe)
    if recipe.name == "paper":
        return None
    note = recipe_note(config)
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
    # In little room the numbers stand below the formula, and may wrap; bytes never do.
    narrow = Grid("", Column("formula, numbers put in", overflow="fold"), right("bytes", no_wrap=True))
    for term in section.terms:
        style, rounded = "bold" if term.is_sum else "", gigabytes(term.value)
        wide.add(term.name, term.formula, term.numbers, term.value, rounded, style=style)
        below = f"{term.formula}\n{term.numbers}".rstrip()
        narrow.add(term.name, below, f"{show(term.value)}\n{rounded}", style=style)
    parts: list[RenderableType] = [titled(section.title, Adaptive(wide, narrow))]
    for note in section.notes:
        if section.agrees is not None and note.startswith(PRINTED):
            # Whether the formula, rounded as the paper rounds, gives the printed figure.
            parts.append(prose(f"✓ {note}", "bold green") if section.agrees else prose(f"≠ {note}", "bold red"))
        else:
            parts.append(prose(note, "dim"))
    return Stack(*parts, close=True)
