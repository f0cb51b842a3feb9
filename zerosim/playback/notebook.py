"""The player in a notebook: the page in a frame, and a still picture below it.

A saved notebook keeps both. Sites that remove frames still show the picture.
"""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path

from zerosim.errors import InputError, OutputError
from zerosim.playback.encode import Data, encode
from zerosim.playback.html import page, title_of
from zerosim.playback.record import Recorded
from zerosim.report.plots.draw import write_chart
from zerosim.report.plots.timeline import timeline_figure
from zerosim.train.result import RunResult

HEIGHT = 760
"""The frame's height, in CSS pixels."""


def player(*results: RunResult | Recorded) -> Player:
    """Return the player of a run or a plan that kept its events. Several results are ZeRO stages to choose from, and to
    compare side by side.

    Raises: InputError for a result without events, and for more than a page holds.
    """
    for result in results:
        if not isinstance(result, RunResult | Recorded):
            raise InputError(
                f"player takes results, not a {type(result).__name__}: "
                "zerosim.player(zerosim.run(config, keep_events=True))"
            )
    if not results:
        raise InputError("player takes at least one result: zerosim.player(zerosim.run(config, keep_events=True))")
    recorded = [one if isinstance(one, Recorded) else Recorded(one) for one in results]
    return Player(encode(*recorded), recorded[0].result)


class Player:
    """A page, its data, and its form in a notebook."""

    def __init__(self, data: Data, result: RunResult) -> None:
        self.data = data
        self._result = result

    @property
    def html(self) -> str:
        """The page as text."""
        return page(self.data)

    def save(self, path: str | Path) -> None:
        """Write the page. Raises: OutputError if the file cannot be written."""
        try:
            Path(path).write_text(self.html, "utf-8")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise OutputError(f"{path}: cannot be written: {why}") from None

    def __repr__(self) -> str:
        count = sum(len(run["events"]) for run in self.data["runs"])
        return f"Player({title_of(self.data)}, {count:,} events)"

    def _repr_html_(self) -> str:
        title = html.escape(title_of(self.data), quote=True)
        picture = base64.b64encode(_still(self._result)).decode()
        return (
            f'<iframe srcdoc="{html.escape(self.html, quote=True)}" title="{title}" width="100%" height="{HEIGHT}" '
            'sandbox="allow-scripts allow-downloads" style="border:0"></iframe>'
            f'<details><summary>Still picture</summary><img alt="Live bytes by kind over the events of {title}" '
            f'style="max-width:100%" src="data:image/png;base64,{picture}"></details>'
        )


def _still(result: RunResult) -> bytes:
    """Draw the first ranks' live bytes over the step, as PNG."""
    ranks, file = result.ran[:2], io.BytesIO()
    write_chart(timeline_figure([result.events[rank] for rank in ranks], ranks), file, "png")
    return file.getvalue()
