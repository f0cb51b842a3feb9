"""How tokens spread over experts, as a heat map: a row a block, a column an expert, a line between ranks."""

from __future__ import annotations

from zerosim.analysis.experts_routes import Routes
from zerosim.errors import InputError
from zerosim.report.names import counted
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.panel import Axis, Field, Panel, Rule
from zerosim.report.plots.style import KIND_PAINTS

MOST_NAMES = 24
"""Beyond so many blocks every other one has no name."""


def experts_figure(routes: Routes, *, subtitle: str) -> Chart:
    """Return each expert's rows, over the mean of its block. Raises: InputError without a block that has experts."""
    blocks = list(routes.rows)
    if not blocks:
        raise InputError("no block has experts: there is nothing to draw")
    shares = [[rows * len(own) / (sum(own) or 1) for rows in own] for own in routes.rows.values()]
    worst = max(blocks, key=lambda block: routes.imbalance(block, ranks=True))
    fullest = max(blocks, key=routes.imbalance)
    notes = ["Colour: an expert's rows over the mean of its block."]
    if routes.ep > 1:
        most = routes.imbalance(worst, ranks=True)
        notes.append(
            f"Lines: between the {counted(routes.ep, 'rank')} of ep. The fullest rank has {most:.3g} times the mean "
            f"({worst}): the others wait for it."
        )
    num, every = len(shares[0]), -(-len(blocks) // MOST_NAMES)
    rules = [Rule(x=rank * (num // routes.ep) - 0.5) for rank in range(1, routes.ep)]
    names = [name if number % every == 0 else "" for number, name in enumerate(blocks)]
    field = Field(range(num), range(len(blocks)), shares, KIND_PAINTS["optim"])
    panel = Panel((field, *rules), Axis("expert", (-0.5, num - 0.5), whole=True), Axis.of_rows(names), grid="x")
    title = f"Tokens by expert: the fullest has {routes.imbalance(fullest):.3g} times the mean ({fullest})"
    return Chart(title, subtitle, ((panel,),), notes=tuple(notes), size=(10.0, min(2.4 + 0.3 * len(blocks), 12.0)))
