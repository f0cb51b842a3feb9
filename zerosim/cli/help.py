"""The help texts. `--help` prints the flags that most people need, if a verb has a list of them; `--help-all` prints
all.

Lines fit the terminal's width, and 80 columns in a pipe.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from typing import Any

USUAL = {
    "run": "stage ranks tp pp model layers hidden steps micro_batch accumulate optimizer lr precision recompute json",
    "plan": "stage ranks tp pp model gpu seq micro_batch accumulate optimizer precision recompute recipe all json",
    "step": "stage ranks html tp pp model layers hidden steps micro_batch accumulate prefetch recompute optimizer "
    "precision",
}
"""For each verb the names of the fifteen flags in its `--help`, in order."""
_TITLE = "flags that most people need"
_MOST_IN_USAGE = 12


def wrapped(text: str, width: int) -> str:
    """Break the text's lines at `width`. Text after a name and blanks stays in its column."""
    lines = []
    for line in text.splitlines():
        column = re.match(r" *(\S+ {2,})?", line)
        hanging = " " * (column.end() if column else 0)
        lines += textwrap.wrap(line, width, subsequent_indent=hanging, break_on_hyphens=False) or [""]
    return "\n".join(lines)


class Layout(argparse.RawDescriptionHelpFormatter):
    """argparse's layout, with a flag's names before a single placeholder of its value, and a usage line that does not
    name each of many flags."""

    def names(self, action: argparse.Action) -> Sequence[str]:
        return action.option_strings

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        flags = [action for action in actions if action.option_strings]
        if usage is None and len(flags) > _MOST_IN_USAGE:
            others = [f"[{one.metavar}]" for one in actions if not one.option_strings]
            usage = " ".join(["%(prog)s", *others, "[FLAGS]"])
        super().add_usage(usage, actions, groups, prefix)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return wrapped(text, width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        words = ", ".join(self.names(action))
        if action.nargs != 0:
            words += f" {self._format_args(action, self._get_default_metavar_for_optional(action))}"
        room = self._width - self._current_indent
        lines = textwrap.wrap(words, room, break_long_words=False, break_on_hyphens=False)
        return f"\n{' ' * self._current_indent}".join(lines)


class _ShortLayout(Layout):
    """A layout that shows only the first name of each flag."""

    def names(self, action: argparse.Action) -> Sequence[str]:
        return action.option_strings[:1]


class HelpAll(argparse.Action):
    """Print every flag and end."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: Any, *_: Any) -> None:
        print(parser.format_all(), end="")
        parser.exit()


def short_help(parser: argparse.ArgumentParser, names: Sequence[str]) -> str:
    """Return a verb's help with the flags of these names, in order, and a pointer to the others."""
    actions = {action.dest: action for action in parser._actions}
    layout = _ShortLayout(parser.prog)
    layout.add_usage(parser.usage, parser._actions, [])
    layout.add_text(parser.description)
    layout.start_section(_TITLE)
    layout.add_arguments(action for action in parser._actions if not action.option_strings)
    layout.add_arguments(actions[name] for name in names)
    layout.end_section()
    layout.start_section(f"the other {len(actions) - len(names)} flags")
    layout.add_arguments(action for action in parser._actions if isinstance(action, HelpAll))
    layout.end_section()
    layout.add_text(parser.epilog)
    return layout.format_help()
