"""How tokens spread over experts, as a heat map: a row a block, a column an expert, a line between ranks."""

from __future__ import annotations

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zerosim.analysis.experts_routes import Routes
from zerosim.errors import InputError
from zerosim.report.names import counted
from zerosim.report.plots.axes import rows_axis, ticks
from zerosim.report.plots.page import dress, finish, frame, open_page
from zerosim.report.plots.style import KIND_PAINTS

MOST_NAMES = 24
"""Beyond so many blocks every other one has no name."""


def experts_figure(
    routes: Routes, *, subtitle: str, theme: str = "light", size: tuple[float, float] | None = None
) -> Figure:
    """Draw each expert's rows, over the mean of its block. Raises: InputError without a block that has experts."""
    blocks = list(routes.rows)
    if not blocks:
        raise InputError("no block has experts: there is nothing to draw")
    page = open_page(size, theme, (10.0, min(2.4 + 0.3 * len(blocks), 12.0)))
    shares = [[rows * len(own) / (sum(own) or 1) for rows in own] for own in routes.rows.values()]
    worst = max(blocks, key=lambda block: routes.imbalance(block, ranks=True))
    fullest = max(blocks, key=routes.imbalance)
    title = f"Tokens by expert: the fullest has {routes.imbalance(fullest):.3g} times the mean ({fullest})"
    notes = ["Colour: an expert's rows over the mean of its block."]
    if routes.ep > 1:
        most = routes.imbalance(worst, ranks=True)
        notes.append(
            f"Lines: between the {counted(routes.ep, 'rank')} of ep. The fullest rank has {most:.3g} times the mean "
            f"({worst}): the others wait for it."
        )
    frame(page, title, subtitle, notes=notes)
    axes = dress(page, page.figure.add_subplot(), grid="x", x="expert")
    rows_axis(page, axes, [name if not number % -(-len(blocks) // MOST_NAMES) else "" for number, name in
                           enumerate(blocks)])  # fmt: skip
    color = page.theme.color(KIND_PAINTS["optim"])
    shades = LinearSegmentedColormap.from_list("rows", [page.theme.background, color])
    drawn = axes.imshow(shares, aspect="auto", cmap=shades, vmin=0.0, interpolation="nearest", zorder=2)
    local = len(shares[0]) // routes.ep
    for rank in range(1, routes.ep):
        axes.axvline(rank * local - 0.5, color=page.theme.text, linewidth=0.8, zorder=3)
    ticks(axes.xaxis, MaxNLocator(10, integer=True))
    bar = page.figure.colorbar(drawn, ax=axes, pad=0.02)
    bar.ax.tick_params(colors=page.theme.text, labelsize=page.points * 0.85)
    return finish(page)
