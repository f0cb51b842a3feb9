"""What the lines of a shell script leave behind: variables, and commands with their words. Nothing is run."""

from __future__ import annotations

import re

from zerosim.dialects.shell.arithmetic import is_plain, tokens_in, value_of
from zerosim.dialects.shell.words import MOST, Open, Piece, Token, fields, joined, pieces_of, split, tokens_of
from zerosim.errors import InputError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_OPENS = ("if", "for", "while", "until", "case", "select", "{", "function")
_CLOSES = ("fi", "done", "esac", "}")
_GOES_ON = ("then", "else", "elif", "do", "!", "time")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_TESTS = ("[", "[[", "test")
LAUNCHERS = {
    "--nproc_per_node": ("--nproc_per_node", "--nproc-per-node", "--ntasks-per-node", "--gpus-per-node"),
    "--nnodes": ("--nnodes", "--nodes", "-N"),
}
"""Options of torchrun and srun that say how many ranks there are; a document's environment has them by the first."""


class Script:
    """Variables and commands, line by line; `inside`: the conditions and loops that a line stands in."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.variables: dict[str, str | list[str]] = {}
        self.commands: list[tuple[list[str], str]] = []
        self.inside: list[tuple[str, int]] = []

    def read(self, text: str) -> None:
        """Read all commands. Raises: InputError for an open quote."""
        operator, command = "\n", list[Token]()
        tests = False
        tokens = list(tokens_of(self.path, text))
        at = 0
        while at < len(tokens):
            token = tokens[at]
            at += 1
            found = _ASSIGNMENT.fullmatch(token.plain) if token.pieces else None
            is_first = all(_ASSIGNMENT.match(one.plain) or one.plain in (*_DECLARES, *_GOES_ON) for one in command)
            if found and is_first and at < len(tokens) and tokens[at].operator == "(":
                end = next((to for to in range(at, len(tokens)) if tokens[to].operator == ")"), len(tokens))
                if end == len(tokens):
                    raise InputError(f"{self.path}: line {token.line}: an array is never closed; close it with )")
                words = [word for one in tokens[at + 1 : end] if one.pieces for word in fields(one, self.value)]
                self.assign(found[1], words, token.line, adds=bool(found[2]), condition=self.condition(operator, tests))
                at = end + 1
            elif token.operator in ("<", ">", ">>", "&>", ">&", "<<<"):
                if command and command[-1].plain.isdigit():
                    command.pop()
                at += at < len(tokens) and bool(tokens[at].pieces)
            elif token.operator:
                tests = self.run(command, operator, tests) if command else tests and token.operator != "\n"
                command, operator = [], token.operator
            else:
                command.append(token)
        self.run(command, operator, tests)

    def condition(self, operator: str, tests: bool) -> str:
        """Return in words what decides whether a command runs; '' if nothing does."""
        if self.inside:
            return f"line {self.inside[0][1]}: {self.inside[0][0]!r} decides it"
        return f"{operator} behind a test decides it" if operator in ("&&", "||") and tests else ""

    def run(self, command: list[Token], operator: str, tests: bool) -> bool:
        """Take in one simple command. Return whether it, or one before it in its list, is a test."""
        while command and (word := command[0].plain) in (*_OPENS, *_CLOSES, *_GOES_ON):
            if word in _OPENS:
                self.inside.append((word, command[0].line))
                if word in ("for", "select") and len(command) > 1:
                    self.assign(command[1].plain, "", command[0].line, condition=self.condition("", False))
            elif word in _CLOSES and self.inside:
                self.inside.pop()
            command = command[1:]
        if not command:
            return False
        condition = self.condition(operator, tests)
        declares = command[0].plain in _DECLARES
        number = int(declares)
        while number < len(command):
            found = _ASSIGNMENT.match(command[number].plain)
            if found is None or not command[number].pieces[0].text.startswith(found[0]):
                if not declares:
                    break
            else:
                first, *rest = command[number].pieces
                pieces = [first._replace(text=first.text[found.end() :]), *rest]
                self.assign(found[1], self.text(pieces, command[number].line), command[number].line,
                            adds=bool(found[2]), condition=condition)  # fmt: skip
            number += 1
        words = [word for token in command[number:] for word in fields(token, self.value)]
        if words and not declares:
            self.commands.append((words, condition and f"{condition}"))
        return (bool(words) and words[0] in _TESTS) or (tests and operator in ("&&", "||"))

    def assign(self, name: str, value: str | list[str], line: int, *, adds: bool = False, condition: str = "") -> None:
        """Set a variable. Under a condition its value is open, or what is added to it."""
        before = self.variables.get(name)
        if condition:
            hidden = Open(f"${name}", f"line {line}: {name}: {condition}, and no shell runs")
            is_array = isinstance(before, list)
            value = [*before, hidden] if isinstance(before, list) else [hidden] if is_array else hidden
        elif adds:
            if isinstance(before, list):
                value = [*before, *([value] if isinstance(value, str) else value)]
            elif isinstance(value, str):
                value = joined([before or "", value])
        if sum(map(len, value)) + len(value) > MOST:
            raise InputError(f"{self.path}: line {line}: {name} grows beyond {MOST:,} characters; write it shorter")
        self.variables[name] = value

    def text(self, pieces: list[Piece], line: int) -> str:
        """Return a word that is not split, as in an assignment."""
        found = (self.value(piece, line) for piece in pieces)
        return joined([one if isinstance(one, str) else joined_words(one) for one in found])

    def value(self, piece: Piece, line: int) -> str | list[str]:
        """Return what a part of a word expands to."""
        if piece.kind == "text":
            return piece.text
        if piece.kind == "command":
            return Open(piece.text, f"line {line}: {piece.text} is a command, and none is run")
        return self.variable(piece.text, line) if piece.kind == "variable" else self.arithmetic(piece.text, line)

    def variable(self, text: str, line: int) -> str | list[str]:
        """Return the value of `X`, `X[@]`, `X[2]`, `#X[@]`, `X:-default` or `X:=default`."""
        if text in ("@", "*"):
            return []
        found = re.fullmatch(r"(#?)(\w+)(?:\[(@|\*|\d+)\])?(?:(:?[-=+])(.*))?", text, re.DOTALL)
        if found is None:
            return Open(f"${{{text}}}", f"line {line}: ${{{text}}} is more than a variable")
        counts, name, index, sign, default = found.groups()
        value = self.variables.get(name)
        if sign and (sign[-1] == "+") == (value is not None and value != ""):
            if re.fullmatch(r"'[^']*'", default, re.DOTALL):
                chosen = default[1:-1]
            else:
                plain = default[1:-1] if re.fullmatch(r'"[^"]*"', default, re.DOTALL) else default
                chosen = self.text(pieces_of(self.path, plain, line, quoted=False), line)
            if sign[-1] == "=":
                self.assign(name, chosen, line)
            return chosen
        if sign and sign[-1] == "+":
            return ""
        if value is None:
            why = f"line {line}: {name} is never set" if not name.isdigit() else f"line {line}: argument {name}"
            return Open(f"${name}", why, undefined=True)
        words = [value] if isinstance(value, str) else value
        if counts:
            return str(len(words) if index in ("@", "*") else len(words[0]))
        if index in ("@", "*"):
            return words
        place = int(index or 0)
        return words[place] if place < len(words) else ""

    def arithmetic(self, text: str, line: int) -> str:
        """Return the value of `$(( ))`. Raises: InputError for a division by zero."""
        if not is_plain(text):
            return Open(f"$(({text}))", f"line {line}: $(({text})) is more than + - * /")
        tokens = list[str]()
        for token in tokens_in(text):
            is_number = token[0] in "-+*/%()" or token.isdigit()
            word = token if is_number else self.variable(token.strip("${}"), line)
            if isinstance(word, Open):
                return word
            tokens.append(word if isinstance(word, str) else "")
        try:
            value = value_of(tokens)
        except ZeroDivisionError:
            raise InputError(f"{self.path}: line {line}: $(({text})) divides by zero") from None
        if value is None:
            return Open(f"$(({text}))", f"line {line}: $(({text})) is not arithmetic of whole numbers")
        return str(value)

    def training(self) -> tuple[list[str], list[str]]:
        """Return the launcher's words and the arguments of the command that trains. Raises: InputError."""
        found = [(*parted, condition) for words, condition in self.commands if (parted := _parted(words))]
        found = [one for one in found if any("size" in word for word in one[1])] or found
        if not found:
            found = [(*parted, "") for one in self.variables.values() if (parted := _parted(_words(one)))]
        if found:
            before, words, condition = max(found, key=lambda one: sum(word.startswith("--") for word in one[1]))
            if condition:
                raise InputError(f"{self.path}: the training command: {condition}; keep the branch that you mean")
            return [*self.launcher_words(), *before], words
        words = [word for one, _ in self.commands if one[0].startswith("--") for word in one]
        return self.launcher_words(), words or self.argument_variables()

    def launcher_words(self) -> list[str]:
        known = {word for spelled in LAUNCHERS.values() for word in spelled}
        return [word for one in self.variables.values() if known & set(words := _words(one)) for word in words]

    def argument_variables(self) -> list[str]:
        """Return the words of variables that hold arguments, but for those that a later one includes."""
        known = {word for spelled in LAUNCHERS.values() for word in spelled}
        held = [_words(one) for one in self.variables.values()]
        held = [words for words in held if any(word.startswith("--") for word in words) and not known & set(words)]
        texts = [f" {' '.join(words)} " for words in held]
        whole = [words for words, text in zip(held, texts, strict=True) if sum(text in other for other in texts) == 1]
        return [word for words in whole for word in words]


def joined_words(words: list[str]) -> str:
    """Return words as one text with blanks; it is open if one of them is."""
    return joined([part for word in words for part in (" ", word)][1:])


def _words(value: str | list[str]) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    return [word for text in texts for word in split(text)]


def _parted(words: list[str]) -> tuple[list[str], list[str]] | None:
    """Return a command's words to its program, and those behind; None for one that starts no training."""
    for number, word in enumerate(words):
        if word.endswith(".py") and not word.startswith("-"):
            return words[: number + 1], words[number + 1 :]
        if word == "megatron" and words[number + 1 : number + 2] in (["sft"], ["pt"], ["rlhf"]):
            return words[: number + 2], words[number + 2 :]
        if word.startswith("--") and " " in word and ".py" in word:
            return None
    return None
