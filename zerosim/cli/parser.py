"""The command line's grammar: argparse with one-line errors and suggestions for typos.

This module parses the words of a command line into values, or into an error. A run's flags are in `options.py`. It
imports nothing heavy.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from zerosim.cli.help import HelpAll, Layout, short_help
from zerosim.config.option import known_word
from zerosim.errors import InputError, did_you_mean
from zerosim.units import LONGEST_NUMBER, parse_bytes, parse_count, shown

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """A parser that raises InputError instead of printing a usage. It accepts no abbreviations, but suggests names.

    With `usual`, names of flags, `--help` shows only those and `--help-all` shows all flags.
    """

    def __init__(self, prog: str, description: str, usual: Sequence[str] = ()) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=Layout)
        self.usual = usual
        self.add_argument("--help-all", action=HelpAll, help="show all flags" if usual else argparse.SUPPRESS)

    def format_help(self) -> str:
        return short_help(self, self.usual) if self.usual else super().format_help()

    def format_all(self) -> str:
        """Return the help with every flag."""
        return super().format_help()

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the flags in `words`, and other frameworks' words for them. Errors name a flag as it is spelled there.

        Raises: InputError, in one line.
        """
        joined = _joined(words)
        with self.naming_as_typed(joined):
            args, left = self.parse_known_args(self._translated(joined))
            if not left:
                return args
            flag, help = left[0].split("=", 1)[0], f"{self.prog} --help{'-all' if self.usual else ''}"
            if not flag.startswith("-"):
                raise InputError(f"unexpected {left[0]!r}: see {help}")
            from zerosim.config.other_words import not_modelled  # the words of all parts, not at every start

            if (lacking := not_modelled(flag)) is None:
                raise InputError(f"unknown flag {flag}{nearest(flag, self._actions_by_flag, help)}")
            others = [one for one in re.findall(r"--[a-z][\w-]*", lacking) if one not in self._actions_by_flag]
            raise InputError(f"{flag}: {lacking}" + (f" (zerosim plan has {', '.join(others)})" if others else ""))

    def _translated(self, words: Sequence[str]) -> list[str]:
        """Replace other frameworks' flags by this verb's: '--gradient_checkpointing True' is '--recompute full'.

        Raises: InputError for a switch that is off.
        """
        found, rest = list[str](), list(words)
        while rest:
            name, sign, value = rest.pop(0).partition("=")
            flag, means = self._own(name)
            if means is None:
                found.append(f"{flag}{sign}{value}")
                continue
            if not sign and rest and rest[0].lower() in ("true", "false"):
                value = rest.pop(0)
            if (sign or value) and value.lower() != "true":
                raise InputError(f"{name} {value!r}: expected nothing or true; leave it out, or choose {flag}")
            found += [flag, means] if isinstance(means, str) else [flag]
        return found

    def _own(self, name: str) -> tuple[str, str | bool | None]:
        """Return this verb's flag for another framework's, and a switch's value; the name, if this is none."""
        known = self._actions_by_flag
        if not name.startswith("--") or name in known:
            return name, None
        from zerosim.config.other_words import plain_word, taken  # not at every start

        option, value = taken(name)
        dashed, flag = flag_of(plain_word(name)), flag_of(f"no_{option}" if value is False else option)
        if dashed in known:
            return dashed, None
        return (flag, value) if flag in known else (name, None)

    def error(self, message: str) -> NoReturn:
        """Shorten argparse's error: 'argument --stage/-z: expected one argument' becomes one about --stage."""
        match = re.fullmatch(r"argument ([^\s/:]+)[^\s:]*: (.*)", message, re.DOTALL)
        raise InputError(f"{match[1]}: {match[2]}" if match else message)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Override argparse's: accept one of the action's choices in upper or lower case."""
        value: Any = super()._get_value(action, arg_string)
        if action.choices is not None and isinstance(value, str):
            return known_word(value, action.choices) or value
        return value

    @property
    def _actions_by_flag(self) -> Mapping[str, argparse.Action]:
        return self._option_string_actions

    @contextmanager
    def naming_as_typed(self, words: Sequence[str]) -> Iterator[None]:
        """Make InputErrors in the block name flags as `words` spell them: --capacity where --limit is the first name.

        An error that begins with its field begins with that flag, if it was typed: '--dp-replicate 3 does not ...'.
        """
        try:
            yield
        except InputError as error:
            error.args = (self._as_typed(error, words),)
            raise

    def _as_typed(self, error: InputError, words: Sequence[str]) -> str:
        actions, typed = self._actions_by_flag, dict[str, str]()
        for word in words:
            flag = word.split("=", 1)[0] if word.startswith("--") else word[:2]
            if (own := self._own(flag)[0]) in actions:
                typed[actions[own].dest] = flag
        message = str(error.called(typed[error.field]) if error.field in typed else error)

        def spelled(match: re.Match[str]) -> str:
            action = actions.get(match[0])
            if action is None or action.dest not in typed or match[0] != action.option_strings[0]:
                return match[0]
            flag = typed[action.dest]
            # A flag in a message keeps its meaning: --no-x and switches appear only if the message is about them.
            has_value = not flag.startswith("--no-") and self._own(flag)[1] is None
            return flag if match.start() == 0 or has_value else match[0]

        return re.sub(r"^(--no-[\w-]+) False\b", r"\1", re.sub(r"--[a-z][\w-]*", spelled, message))


def add_kinds(parser: Parser, noun: str, known: Mapping[str, str], *, width: int) -> None:
    """Add the grammar of a verb whose first word, `noun`, decides the flags after it."""
    shown = "\n".join(f"  {name:{width}}{text}" for name, text in known.items())
    more = f"  {parser.prog} {noun.upper()} --help   its flags, those of a run among them"
    parser.epilog = f"{noun}s:\n{shown}\n\n{more}"
    parser.add_argument("kind", metavar=noun.upper(), nargs="?", help=", ".join(known))
    parser.add_argument("words", metavar="...", nargs=argparse.REMAINDER, help="its flags")


def kind_parser(verb: str, noun: str, known: Mapping[str, str], typed: str | None) -> tuple[str, Parser]:
    """Return the typed kind, and a parser without its flags yet. Raises: InputError for a missing or unknown kind."""
    if typed is None:
        raise InputError(f"expected a {noun}: one of {', '.join(known)}")
    name = known_word(typed, known)
    if name is None:
        raise InputError(f"unknown {noun} {typed!r}{nearest(typed, known, f'zerosim {verb} --help')}")
    return name, Parser(f"zerosim {verb} {name}", sentence(known[name]))


def sentence(words: str) -> str:
    """Return the words with a capital and a full stop."""
    return f"{words[0].upper()}{words[1:]}."


def _joined(words: Sequence[str]) -> list[str]:
    """Turn '--limit -4GB' into '--limit=-4GB': a word like a negative number is a value, never a flag."""
    found: list[str] = []
    for word in words:
        if found and re.match(r"-\.?\d", word) and re.fullmatch(r"--[\w.-]+", found[-1]):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def nearest(word: str, known: Iterable[str], instead: str) -> str:
    """Return ': did you mean ...?', or a pointer to the list of names."""
    return f": {did_you_mean(word, known, f'see {instead}', quote=str)}"


def reader(parse: Callable[[str], T], expected: str = "") -> Callable[[str], T]:
    """Return a reader of a word. Its error names the word beside what was expected, unless the error is already a
    sentence."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shown(text)}: expected {expected}") from None

    return read


def _int(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise InputError(f"{shown(text)}: expected a whole number of at most {LONGEST_NUMBER} digits")
    return int(text)


def _loss_scale(text: str) -> str | float:
    return "dynamic" if text.lower() == "dynamic" else float(text)


whole_number = reader(_int, "a whole number")
number = reader(float, "a number")
size = reader(parse_bytes)
"""Parse bytes, such as 32GB or 512MiB."""
count = reader(parse_count)
"""Parse a whole number, such as 7.5B or 350M."""
dynamic_or_number = reader(_loss_scale, "'dynamic' or a number")


def utf8(word: str) -> str:
    """Decode a word typed in UTF-8, even in an ASCII locale; return any other word unchanged."""
    try:
        return os.fsencode(word).decode()
    except UnicodeError:
        return word


def or_none(convert: Callable[[str], T]) -> Callable[[str], T | None]:
    """Accept 'none' too, so that a flag can undo a scenario's value."""

    def converted(text: str) -> T | None:
        return None if text.lower() == "none" else convert(text)

    return converted


def stages(text: str) -> tuple[int, ...]:
    """Parse '0,1,3': ZeRO stages, each once, in the given order."""
    words = [word.strip() for word in text.split(",")]
    if not all(word in ("0", "1", "2", "3") for word in words):
        raise argparse.ArgumentTypeError(f"{shown(text)}: expected stages 0 to 3 with commas between, such as 0,1,2,3")
    return tuple(dict.fromkeys(int(word) for word in words))


def flag_of(name: str) -> str:
    """Return '--micro-batch' for 'micro_batch'."""
    return "--" + name.replace("_", "-")
