"""JavaScript without comments and needless spaces: what the page carries, of sources that are written to be read.

A line's end goes only where no statement can end, and no name is changed. Texts and templates are
copied letter by letter. The sources hold no regular expressions, which would need a parser.
"""

from __future__ import annotations

_QUOTES = "'\""


def squeezed(source: str) -> str:
    """The same program, shorter."""
    out: list[str] = []
    depths = [0]  # of braces in each template that is open, the program's own first
    at = 0
    while at < len(source):
        letter = source[at]
        if letter in _QUOTES:
            end = _end_of_text(source, at)
            out.append(source[at:end])
        elif letter == "`" or (letter == "}" and depths[-1] == 0 and len(depths) > 1):
            if letter == "}":
                depths.pop()
            end = _end_of_template(source, at + 1)
            out.append(source[at:end])
            if source[end - 1] == "{":
                depths.append(0)
        elif source.startswith("//", at):
            end = source.index("\n", at)
        elif letter.isspace():
            end = at + 1
            while end < len(source) and source[end].isspace():
                end += 1
            out.append(_space(out, source[at:end], source[end : end + 1]))
        else:
            depths[-1] += (letter == "{") - (letter == "}")
            end = at + 1
            out.append(letter)
        at = end
    return "".join(out)


def _end_of_text(source: str, start: int) -> int:
    at = start + 1
    while source[at] != source[start]:
        at += 2 if source[at] == "\\" else 1
    return at + 1


def _end_of_template(source: str, at: int) -> int:
    """Where a template ends, or a program begins in it."""
    while source[at] != "`" and not source.startswith("${", at):
        at += 2 if source[at] == "\\" else 1
    return at + (1 if source[at] == "`" else 2)


def _space(out: list[str], spaces: str, after: str) -> str:
    before = next((part[-1] for part in reversed(out) if part), "\n")
    if "\n" in spaces:
        return "" if before in "\n{;,([" or after in "}),].?:" else "\n"
    is_word = all(letter.isalnum() or letter in "_$" for letter in (before, after))
    return " " if is_word or (before == after and before in "+-") or before + after in ("/*", "//") else ""
