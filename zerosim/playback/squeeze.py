"""JavaScript without comments and unneeded spaces: the page's script, from sources written to be read.

A line's end is removed only where no statement can end, and no name is changed. A `const` joins the `const` before it,
an arrow function's only parameter loses its parentheses, and the last semicolon of a block and the last comma of a list
are removed. Texts and templates are copied letter by letter. The sources contain no regular expressions, which would
need a parser, no empty statements, no empty last places of lists, and no `const` without its semicolon.
"""

from __future__ import annotations

import re

_QUOTES = "'\""
_WORD = re.compile(r"[\w$]+")
_ONE_PARAMETER = re.compile(r"\(([A-Za-z_$][\w$]*)\) ?=>")


def squeezed(source: str) -> str:
    """Return the same program, shorter."""
    out: list[str] = []
    depths = [0]  # of braces in each open template, the program's own first
    blocks = [["", ""]]  # of each open bracket: the first words of the previous statement and of this one
    at = 0
    while at < len(source):
        letter = source[at]
        end = at + 1
        if source.startswith("//", at):
            end = source.index("\n", at)
        elif letter.isspace():
            while end < len(source) and source[end].isspace():
                end += 1
            out.append(_space(out, source[at:end], source[end : end + 1]))
            if out[-1] == "\n":
                blocks[-1] = ["", ""]
        elif letter in _QUOTES:
            end = _end_of_text(source, at)
            out.append(source[at:end])
        elif letter == "`" or (letter == "}" and depths[-1] == 0 and len(depths) > 1):
            if letter == "}":
                depths.pop()
            end = _end_of_template(source, at + 1)
            out.append(source[at:end])
            if source[end - 1] == "{":
                depths.append(0)
        elif one := _ONE_PARAMETER.match(source, at):
            end = one.end()
            out.append(f"{one[1]}=>")
        elif word := _WORD.match(source, at):
            end = word.end()
            before, this = blocks[-1]
            if word[0] == before == "const" and not this:
                out[_last(out)] = ","
                end += source[end] == " "
            else:
                out.append(word[0])
            blocks[-1][1] = this or word[0]
        else:
            depths[-1] += (letter == "{") - (letter == "}")
            if letter in "{([":
                blocks[-1][1] = blocks[-1][1] or letter
                blocks.append(["", ""])
            elif letter in "})]":
                blocks.pop()
                last = _last(out)
                if out[last] == "," or (out[last] == ";" and letter == "}"):
                    out[last] = ""
            elif letter == ";":
                blocks[-1] = [blocks[-1][1], ""]
            out.append(letter)
        at = end
    return "".join(out)


def _last(out: list[str]) -> int:
    """Return the index of the last part that is not empty."""
    return next(at for at in reversed(range(len(out))) if out[at])


def _end_of_text(source: str, start: int) -> int:
    at = start + 1
    while source[at] != source[start]:
        at += 2 if source[at] == "\\" else 1
    return at + 1


def _end_of_template(source: str, at: int) -> int:
    """Return where a template ends, or where a program begins in it."""
    while source[at] != "`" and not source.startswith("${", at):
        at += 2 if source[at] == "\\" else 1
    return at + (1 if source[at] == "`" else 2)


def _space(out: list[str], spaces: str, after: str) -> str:
    before = next((part[-1] for part in reversed(out) if part), "\n")
    if "\n" in spaces:
        return "" if before in "\n{;,([" or after in "}),].?:" else "\n"
    is_word = all(letter.isalnum() or letter in "_$" for letter in (before, after))
    return " " if is_word or (before == after and before in "+-") or before + after in ("/*", "//") else ""
