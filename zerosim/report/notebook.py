"""Display in a notebook's cell: reports as text, and memory, traffic and runs as HTML.

Reports are as wide as a printed page, because an exported notebook cuts off anything wider. JUPYTER_COLUMNS asks for
another width. HTML is tables and bars with inline style, no script and nothing fetched, every text escaped. Text takes
the page's own colour, to be legible on light and on dark. A stepped world's pages are made of the same pieces. Results
and ledgers do not depend on this file: `import zerosim` in a notebook gives IPython these functions by type.
"""

from __future__ import annotations

import html
import io
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from zerosim.placement.axes import place_of
from zerosim.report.names import KINDS, STAGES, counted
from zerosim.units import format_bytes

if TYPE_CHECKING:
    from zerosim.ledger.traffic import TrafficRow
    from zerosim.train.result import RunResult

COLUMNS = 72
_PAGE = (
    '<pre style="white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.3;font-size:13px;'
    "font-family:Menlo,'DejaVu Sans Mono',Consolas,'Courier New',monospace\">{code}</pre>"
)
# Black, red, green, yellow, blue, magenta, cyan, white: each has a contrast of 4:1 with white and with a dark page.
_TONES = [
    (0x76, 0x76, 0x76), (0xD3, 0x43, 0x3A), (0x1C, 0x88, 0x46), (0x97, 0x74, 0x00),
    (0x3C, 0x78, 0xDC), (0xA8, 0x5C, 0xA4), (0x0B, 0x84, 0x96), (0x76, 0x76, 0x76),
]  # fmt: skip
_THEME = TerminalTheme((255, 255, 255), (0, 0, 0), _TONES, _TONES)
TONES: Mapping[str, str] = {name: kind.tone for name, kind in KINDS.items()}
LETTERS: Mapping[str, str] = {name: kind.letter for name, kind in KINDS.items()}
OTHER_TONE = "#7a848a"
FONT = "0.85em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
HATCH = "repeating-linear-gradient(45deg,rgba(255,255,255,.65) 0 3px,rgba(0,0,0,.35) 3px 6px)"
MOST_ROWS = 200
_LETTERED = 0.04  # of a bar: a part with room for its letter
_STATES = ("param", "grad", "optim")
_LINE = "1px solid rgba(128,128,128,.45)"


# -- text ---------------------------------------------------------------------------------------
def width_asked(variable: str, default: int) -> int:
    """Return the width that an environment variable asks for."""
    wanted = os.environ.get(variable, "")
    return int(wanted) if wanted.isdigit() and int(wanted) > 0 else default


class InNotebook:
    """A rich renderable that a notebook can show."""

    def _repr_mimebundle_(self, *asked: object, **named: object) -> dict[str, str]:
        width = width_asked("JUPYTER_COLUMNS", COLUMNS)
        console = Console(
            file=io.StringIO(), record=True, width=width, force_terminal=True, color_system="standard", highlight=False,
            force_jupyter=False, _environ={"TERM": "xterm"},
        )  # fmt: skip
        console.print(self)
        page = console.export_html(theme=_THEME, code_format=_PAGE, inline_styles=True, clear=False)
        text = "\n".join(line.rstrip() for line in console.export_text().splitlines())
        return {"text/plain": text, "text/html": page}


# -- pieces -------------------------------------------------------------------------------------
def escaped(text: object) -> str:
    return html.escape(str(text), quote=True)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    raw: Collection[int] = (),
    left: Collection[int] = (),
    wide: str = "",
) -> str:
    """Return a table; cells are text, except HTML in the columns `raw`. Columns are right-aligned, except those in
    `left`.

    With `wide`, such as '45%', it is as wide as the page, and the columns `raw` take that share of it.
    """

    def line(tag: str, texts: Sequence[str], style: str) -> str:
        cells = ""
        for at, text in enumerate(texts):
            align = "left" if at in left else "right"
            shown = text if at in raw and tag == "td" else escaped(text)
            width = f"width:{wide};" if wide and at in raw else ""
            cells += f'<{tag} style="text-align:{align};padding:2px 8px;{width}{style}">{shown}</{tag}>'
        return f"<tr>{cells}</tr>"

    top, body = line("th", head, f"border-bottom:{_LINE};"), "".join(line("td", row, "border:0;") for row in rows)
    return (
        '<table style="border-collapse:collapse;table-layout:auto;background:transparent;color:inherit;'
        f'font:{FONT};margin:4px 0;{"width:100%;" if wide else ""}"><thead>{top}</thead><tbody>{body}</tbody></table>'
    )


def card(title: str, body: str, note: str = "") -> str:
    """Return a titled piece of a page."""
    below = f'<div style="opacity:.75">{escaped(note)}</div>' if note else ""
    return f'<div style="max-width:70em;overflow-x:auto"><div><b>{escaped(title)}</b></div>{body}{below}</div>'


def chip(kind: str) -> str:
    """Return a kind's letter on its colour, then its name."""
    tone, letter = TONES.get(kind, OTHER_TONE), escaped(LETTERS.get(kind, "?"))
    letter = f'<span style="background:{tone};color:#fff;font-weight:bold;padding:0 4px">{letter}</span>'
    return f'<span style="white-space:nowrap">{letter} {escaped(kind)}</span>'


def bar(by_kind: Mapping[str, int], most: int) -> str:
    """Return bytes by kind as one stacked bar; a bar of `most` bytes fills the width."""
    parts, total = "", sum(by_kind.values())
    for kind, nbytes in ordered(by_kind):
        letter = escaped(LETTERS.get(kind, "?")) if nbytes > _LETTERED * most else "&nbsp;"
        parts += (
            f'<div title="{escaped(f"{kind}: {nbytes:,} B")}" style="flex:{nbytes} 1 0;min-width:2px;overflow:hidden;'
            f"background:{TONES.get(kind, OTHER_TONE)};color:#fff;font:{FONT};font-weight:bold;text-align:center;"
            f'border-right:1px solid rgba(255,255,255,.6)">{letter}</div>'
        )
    share = 100 * total / max(most, total, 1)
    return f'<div style="min-width:12em"><div style="display:flex;width:{share:.2f}%">{parts}</div></div>'


def ordered(by_kind: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return permanent kinds first, temporary ones after them, unknown kinds last, without empty ones."""
    known = [kind for kind in TONES if kind in by_kind] + sorted(by_kind.keys() - TONES.keys())
    return [(kind, by_kind[kind]) for kind in known if by_kind[kind]]


def legend(kinds: Collection[str]) -> str:
    shown = " ".join(f"{chip(kind)}&ensp;" for kind, _ in ordered(dict.fromkeys(kinds, 1)))
    return f'<div style="font:{FONT}">{shown}</div>'


# -- memory -------------------------------------------------------------------------------------
def memory_html(by_kind: Mapping[str, int], title: str = "Live bytes", padding: Mapping[str, int] | None = None) -> str:
    """Return bytes by kind: a bar, and a table with shares."""
    total = sum(by_kind.values())
    rows = [
        [chip(kind), f"{nbytes:,}", f"{100 * nbytes / total:.1f} %", bar({kind: nbytes}, total)]
        for kind, nbytes in ordered(by_kind)
    ]
    body = bar(by_kind, total) + table(("kind", "bytes", "share", ""), rows, raw=(0, 3), left=(0, 3))
    extra = sum((padding or {}).values())
    note = f"{extra:,} B of them are padding." if extra else ""
    return card(f"{title}: {bytes_text(total)}", body if total else "", note)


def bytes_text(nbytes: int) -> str:
    return f"{nbytes:,} B" if nbytes < 1000 else f"{nbytes:,} B ({format_bytes(nbytes)})"


# -- traffic ------------------------------------------------------------------------------------
def traffic_html(rows: Sequence[TrafficRow], title: str = "Traffic of one rank, in bytes") -> str:
    """Return one row per step, phase and operation, as one rank saw it. A long history shows its last rows."""
    shown = rows[-MOST_ROWS:]
    note = f"The last {len(shown):,} of {len(rows):,} rows." if len(shown) < len(rows) else ""
    sent = [row.sent_bytes for row in rows if row.sent_bytes is not None]
    head = ("step", "phase", "operation", "dtype", "purpose", "axis", "calls", "payload", "sent", "received")
    texts = [(str(row.step), row.phase, row.op, row.dtype, row.purpose, row.axis) for row in shown]
    figures = [(row.calls, row.payload_bytes, row.sent_bytes, row.received_bytes) for row in shown]
    numbers = [["not seen" if figure is None else f"{figure:,}" for figure in each] for each in figures]
    body = table(head, [[*of, *each] for of, each in zip(texts, numbers, strict=True)], left=(1, 2, 3, 4, 5))
    seen = f"{bytes_text(sum(sent))} sent in all" if len(sent) == len(rows) else "what was sent is not seen"
    return card(f"{title}: {seen}", body, note)


# -- a run --------------------------------------------------------------------------------------
def result_html(result: RunResult) -> str:
    """Return the counts of a run or a plan: its loss; by rank model states, peak and the last step's bytes."""
    config, mesh = result.config, result.config.mesh
    ranks, on_mesh = result.ran, mesh.tp > 1 or mesh.pp > 1
    if on_mesh:  # a row for each difference, not for each rank
        ranks = sorted({_figures(result, rank): rank for rank in reversed(ranks)}.values())
    peaks = {rank: result.memory[rank].peak for rank in ranks[:MOST_ROWS]}
    most = max([peak.total_bytes for peak in peaks.values()], default=0)
    held, moved = [], []  # two tables: one would be wider than a page
    for rank, peak in peaks.items():
        sent, states, _ = _figures(result, rank)
        name = f"{rank} ({place_of(result.layout.mesh, rank)})" if on_mesh else str(rank)
        held.append([name, *(f"{nbytes:,}" for nbytes in states), f"{sum(states):,}"])
        moved.append([name, f"{sent:,}", f"{peak.total_bytes:,}", bar(peak.by_kind, most)])
    head = ("rank", "sent in the last step", "peak", "what the peak is made of")
    body = table(("rank", *_STATES, "model states"), held) + table(head, moved, raw=(3,), left=(3,), wide="45%")
    body += legend({kind for peak in peaks.values() for kind in peak.by_kind})
    cut = f" in {mesh.dp_replicate:,} replicas" if mesh.dp_replicate > 1 else ""
    if on_mesh:
        cut = f" ({' x '.join(f'{axis} {size}' for axis, size in mesh.axes.sizes.items() if size > 1)})"
    title = (
        f"{STAGES[config.parallel.zero_stage]} on {counted(mesh.ranks, 'rank')}{cut}: {result.num_parameters:,} "
        f"parameters in {config.precision.param_dtype}, {counted(len(result.steps), 'step')}"
    )
    one = " One rank stands for all identical ranks." if len(result.ran) < mesh.ranks else ""
    row = " A row stands for all ranks with the same figures. Sent: bytes of model states."
    note = f"Counted bytes. Model states: when backward ends.{row if on_mesh else one}"
    return card(title, _loss_html(result) + body, note)


def _figures(result: RunResult, rank: int) -> tuple[int, tuple[int, ...], tuple[tuple[str, int], ...]]:
    """Return a rank's row: bytes sent, model states and peak. Two ranks with the same need one."""
    memory = result.memory[rank]
    sent, states = result.sent_bytes(rank, result.last_step) if result.steps else 0, memory.model_states()
    return sent, tuple(states[kind] for kind in _STATES), tuple(sorted(memory.peak.by_kind.items()))


def _loss_html(result: RunResult) -> str:
    """Return the mean loss by step as a line, if there is one."""
    means = result.mean_losses
    words = escaped(f"loss {means[0]:.4f} to {means[-1]:.4f}" if means else "")
    losses = {step: loss for step, loss in enumerate(means) if math.isfinite(loss)}
    if len(losses) < 2:
        return f"<div>{words}</div>"
    low, high, last = min(losses.values()), max(losses.values()), max(losses)
    places = ((300 * step / last, 2 + 36 * (high - loss) / ((high - low) or 1)) for step, loss in losses.items())
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    svg = f'<svg width="300" height="40" viewBox="0 0 300 40" role="img" aria-label="{words}">{line}</svg>'
    return f"<div>{svg} {words}</div>"


# -- what IPython shows -------------------------------------------------------------------------
def _marks(memory: Any) -> str:
    shown = [memory_html(shot.by_kind, name) for name, shot in memory.marks.items()]
    return "".join([*shown, memory_html(memory.peak.by_kind, "Peak")])


SHOWN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("zerosim.ledger.memory", "Snapshot", lambda shot: memory_html(shot.by_kind, padding=shot.padding)),
    ("zerosim.ledger.memory", "MemoryLedger", lambda ledger: memory_html(ledger.now().by_kind) + _marks(ledger)),
    ("zerosim.ledger.traffic", "CommLedger", lambda ledger: traffic_html(ledger.rows())),
    ("zerosim.train.result", "RankMemory", _marks),
    ("zerosim.train.result", "RunResult", result_html),
)


def register(shell: Any) -> None:
    """Let this IPython shell show results and ledgers. A type is loaded when the first of its kind is shown."""
    formatter = shell.display_formatter.formatters["text/html"]
    for module, name, show in SHOWN:
        formatter.for_type_by_name(module, name, show)
