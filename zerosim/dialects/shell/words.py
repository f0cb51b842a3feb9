"""The words of a shell script: quotes, variables, arithmetic and arrays, as bash expands them. Nothing is run.

A value that the text alone does not say is `Open`: a variable that the script never sets, or the result of a command.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from zerosim.errors import InputError

MOST = 1_000_000
"""The longest text of a variable, in characters: a script of ten lines can double one to gigabytes."""
_OPERATORS = ("&&", "||", ";;", "|&", ">>", "&>", ">&", "<<<", "<<", ";", "&", "|", "(", ")", "<", ">", "\n")


class Open(str):
    """A word that holds something unknown, with the reason. `undefined`: the script never sets its variable. `parts`:
    the texts that it was joined from; none if all of it is unknown."""

    why: str
    undefined: bool
    parts: tuple[str, ...]

    def __new__(cls, text: str, why: str, *, undefined: bool = False, parts: tuple[str, ...] = ()) -> Open:
        self = super().__new__(cls, text)
        self.why, self.undefined, self.parts = " ".join(why.split()), undefined, parts
        return self


class Piece(NamedTuple):
    """A part of a word: `kind` is text, variable, arithmetic or command."""

    kind: str
    text: str
    quoted: bool


class Token(NamedTuple):
    """A word of pieces, or an operator without any."""

    line: int
    pieces: tuple[Piece, ...]
    operator: str = ""

    @property
    def plain(self) -> str:
        """Its text, if nothing in it is quoted or expanded."""
        return "".join(piece.text for piece in self.pieces if piece.kind == "text" and not piece.quoted)


Variables = Mapping[str, str | list[str]]


def tokens_of(path: str, text: str) -> Iterator[Token]:
    """Yield words and operators; `(` directly behind NAME= or NAME+= begins an array. Raises: InputError."""
    at, line, ends = 0, 1, list[str]()
    while at < len(text):
        if text[at] in " \t\r":
            at += 1
        elif text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif text[at] == "#":
            at = _find(text, "\n", at)
        elif operator := next((one for one in _OPERATORS if text.startswith(one, at)), ""):
            at += len(operator)
            if operator == "<<":
                start = at + (text[at : at + 1] == "-")
                found = re.compile(r"[ \t]*(['\"]?)(\w+)\1").match(text, start)
                at, ends = (found.end(), [*ends, found[2]]) if found else (start, ends)
                continue
            yield Token(line, (), operator)
            if operator == "\n":
                line += 1
                while ends:
                    stop = re.compile(rf"^[ \t]*{ends.pop(0)}[ \t]*$", re.MULTILINE).search(text, at)
                    after = len(text) if stop is None else stop.end()
                    line, at = line + text.count("\n", at, after), after
        else:
            pieces, end = _word(path, text, at, line)
            yield Token(line, tuple(pieces), "")
            line, at = line + text.count("\n", at, end), end


def _word(path: str, text: str, at: int, line: int) -> tuple[list[Piece], int]:
    pieces = list[Piece]()
    while at < len(text) and text[at] not in " \t\r\n;&|()<>":
        mark = text[at]
        if mark == "'":
            end = _closing(path, text, "'", at + 1, line)
            pieces.append(Piece("text", text[at + 1 : end], True))
            at = end + 1
        elif mark == '"':
            end = _quoted(path, text, at, line)
            pieces += pieces_of(path, text[at + 1 : end], line, quoted=True) or [Piece("text", "", True)]
            at = end + 1
        elif mark == "\\":
            pieces.append(Piece("text", text[at + 1 : at + 2].replace("\n", ""), True))
            at += 2
        elif mark in "$`":
            piece, at = _expansion(path, text, at, line, quoted=False)
            pieces.append(piece)
        else:
            end = at + 1
            while end < len(text) and text[end] not in " \t\r\n;&|()<>'\"\\$`":
                end += 1
            pieces.append(Piece("text", text[at:end], False))
            at = end
    return pieces, at


def pieces_of(path: str, text: str, line: int, *, quoted: bool) -> list[Piece]:
    """Return the parts of a quoted text, or of a variable's default."""
    pieces, at, start = list[Piece](), 0, 0

    def until(end: int) -> None:
        if end > start:
            pieces.append(Piece("text", text[start:end], quoted))

    while at < len(text):
        if text[at] == "\\" and text[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
            until(at)
            start, at = at + 1 + (text[at + 1] == "\n"), at + 2
        elif text[at] in "$`":
            until(at)
            piece, at = _expansion(path, text, at, line, quoted=quoted)
            pieces.append(piece)
            start = at
        else:
            at += 1
    until(at)
    return pieces


def _expansion(path: str, text: str, at: int, line: int, *, quoted: bool) -> tuple[Piece, int]:
    if text[at] == "`":
        end = _closing(path, text, "`", at + 1, line)
        return Piece("command", text[at : end + 1], quoted), end + 1
    for opened, closed, kind in (("$((", "))", "arithmetic"), ("$(", ")", "command"), ("${", "}", "variable")):
        if text.startswith(opened, at):
            end = _balanced(path, text, at + len(opened), opened[-1], closed, line)
            inner = text[at : end + len(closed)] if kind == "command" else text[at + len(opened) : end]
            return Piece(kind, inner, quoted), end + len(closed)
    found = re.compile(r"\$(\w+|[@*#?$!-])").match(text, at)
    if found is None:
        return Piece("text", "$", quoted), at + 1
    name = found[1] if not found[1][0].isdigit() else found[1][0]
    return Piece("variable", name, quoted), at + 1 + len(name)


def _balanced(path: str, text: str, at: int, opened: str, closed: str, line: int) -> int:
    depth, mark = 0, closed[0]
    for end in range(at, len(text)):
        if text[end] == opened:
            depth += 1
        elif text[end] == mark:
            if depth == 0 and text.startswith(closed, end):
                return end
            depth -= 1
    raise InputError(f"{path}: line {line}: an opening {opened!r} is never closed; close it")


def _quoted(path: str, text: str, at: int, line: int) -> int:
    """Return where a double-quoted text ends. Quotes inside `$(...)` do not end it."""
    end = at + 1
    while end < len(text):
        if text[end] == "\\":
            end += 1
        elif text[end] == '"':
            return end
        elif text.startswith("$(", end):
            end = _balanced(path, text, end + 2, "(", ")", line)
        end += 1
    raise InputError(f"{path}: line {line}: a quote is never closed; close it")


def _closing(path: str, text: str, mark: str, at: int, line: int) -> int:
    if (end := text.find(mark, at)) < 0:
        raise InputError(f"{path}: line {line}: a quote ({mark}) is never closed; close it")
    return end


def _find(text: str, mark: str, at: int) -> int:
    end = text.find(mark, at)
    return len(text) if end < 0 else end


def joined(parts: list[str]) -> str:
    """Return parts of a word as one; it is open if one of them is."""
    found = next((part for part in parts if isinstance(part, Open)), None)
    if found is None or len(parts) == 1:
        return "".join(parts) if found is None else found
    flat = tuple(one for part in parts for one in ((isinstance(part, Open) and part.parts) or (part,)))
    return Open("".join(parts), found.why, undefined=found.undefined, parts=flat)


def split(text: str) -> list[str]:
    """Return a text's words; those that hold nothing unknown are not open."""
    if not isinstance(text, Open):
        return text.split()
    words = list[list[str]]([[]])
    for part in text.parts or (text,):
        first, *others = [part] if isinstance(part, Open) else re.split(r"\s+", part)
        words[-1].append(first)
        words += [[other] for other in others]
    return [joined(word) for word in words if any(word)]


def fields(token: Token, value: Callable[[Piece, int], str | list[str]]) -> list[str]:
    """Return the words that a word expands to: unquoted variables are split at blanks, arrays at their elements."""
    done, part = list[str](), list[str]()
    is_word = False

    def end() -> None:
        nonlocal is_word
        if is_word:
            done.append(joined(part))
        part.clear()
        is_word = False

    for piece in token.pieces:
        found = value(piece, token.line)
        if piece.kind == "text" or (isinstance(found, str) and (piece.quoted or split(found) == [found])):
            part.append(joined([found] if isinstance(found, str) else found))
            is_word = True
            continue
        words = [found] if isinstance(found, str) else found
        if not piece.quoted:
            words = [one for word in words for one in split(word)]
            if isinstance(found, str) and found[:1].isspace():
                end()
        for number, word in enumerate(words):
            if number:
                end()
            part.append(word)
            is_word = True
        if not piece.quoted and isinstance(found, str) and found[-1:].isspace():
            end()
    end()
    return done
