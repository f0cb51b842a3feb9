"""How a notebook shows results and ledgers, which know nothing of HTML themselves.

IPython keeps a table of formatters by type; `import zerosim` in a notebook puts these in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerosim.report.html import memory_html, result_html, traffic_html


def register(shell: Any) -> None:
    """Let this IPython shell show them. A type is loaded when the first of its kind is shown."""
    formatter = shell.display_formatter.formatters["text/html"]
    for module, name, show in SHOWN:
        formatter.for_type_by_name(module, name, show)


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
