"""How reports are shown by a notebook's cell: text as wide as a printed page, in tones for light and dark pages.

A wider console would be cut off where a notebook is exported or printed; here tables are folded for the page, and
what is still wider is wrapped. JUPYTER_COLUMNS asks for another width.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

from rich.console import Console
from rich.terminal_theme import TerminalTheme

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


def width_asked(variable: str, default: int) -> int:
    """The width that an environment variable asks for."""
    wanted = os.environ.get(variable, "")
    return int(wanted) if wanted.isdigit() and int(wanted) > 0 else default


class InNotebook:
    """A rich renderable that a notebook shows by itself."""

    def _repr_mimebundle_(
        self, include: Sequence[str] = (), exclude: Sequence[str] = (), **kwargs: object
    ) -> dict[str, str]:
        width = width_asked("JUPYTER_COLUMNS", COLUMNS)
        console = Console(
            file=io.StringIO(), record=True, width=width, force_terminal=True, color_system="standard", highlight=False,
            force_jupyter=False, _environ={"TERM": "xterm"},
        )  # fmt: skip
        console.print(self)
        page = console.export_html(theme=_THEME, code_format=_PAGE, inline_styles=True, clear=False)
        text = "\n".join(line.rstrip() for line in console.export_text().splitlines())
        return {"text/plain": text, "text/html": page}
