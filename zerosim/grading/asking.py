"""An answer that is asked by itself, before any run: questions to it, and what is wrong with what comes back.

The answer's process asks (`asked`), and stops at the first wrong answer. Its word on that does not count: the process
that judges gets what came back as plain data, and looks at all of it again (`checked`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from zerosim.grading.exercise import Check
from zerosim.grading.limits import Failure, Watch, called
from zerosim.grading.plain import plain

Wrong = tuple[str, str]
"""What is wrong, and a hint."""

Keep = Callable[[Any], Any]
"""Keeps a value that came back, and gives it as plain data."""


class Examination(NamedTuple):
    """What is asked of an answer by itself.

    name, expected   of its check
    counted          the check's words where all is right
    questions        the same ones each time, by the seed
    ask              put a question to an answer, and keep what comes back, piece by piece
    words            what was asked last, when so many pieces had come
    wrong            what is wrong with the pieces that came, None for nothing
    endless          a hint for an answer that does not end
    """

    name: str
    expected: str
    counted: str
    questions: Callable[[int], Sequence[Any]]
    ask: Callable[[Any, Any, Keep], None]
    words: Callable[[Any, Sequence[Any]], str]
    wrong: Callable[[Any, Sequence[Any]], Wrong | None]
    endless: str = ""
    seed: int = 0


def by_calls(
    name: str,
    expected: str,
    counted: str,
    questions: Callable[[int], Sequence[tuple[Any, ...]]],
    wrong: Callable[..., Wrong | None],
) -> Examination:
    """Make an examination of single calls.

    A question is the call in words and its arguments. `wrong` gets both, and then the value that came back.
    """

    def ask(answer: Any, question: Any, keep: Keep) -> None:
        keep(answer(*deepcopy(question[1:])))

    def words(question: Any, came: Sequence[Any]) -> str:
        return str(question[0])

    def first_wrong(question: Any, came: Sequence[Any]) -> Wrong | None:
        return next((found for one in came if (found := wrong(*question, one)) is not None), None)

    return Examination(name, expected, counted, questions, ask, words, first_wrong)


class Asked(NamedTuple):
    """What came back, by question, the last one's perhaps in part; and why no more did."""

    came: list[list[Any]]
    failure: Failure | None


def asked(answer: Any, one: Examination, watch: Watch) -> Asked:
    """Put the questions to an answer, up to the first that it gets wrong."""
    came: list[list[Any]] = []

    def ask() -> None:
        for question in one.questions(one.seed):
            pieces: list[Any] = []
            came.append(pieces)

            def keep(value: Any, pieces: list[Any] = pieces) -> Any:
                pieces.append(plain(value))
                return pieces[-1]

            one.ask(answer, question, keep)
            if one.wrong(question, pieces) is not None:
                return

    _, failure = called(ask, watch, lambda: (len(came), len(came[-1]) if came else 0))
    return Asked(came, failure)


def checked(one: Examination, asked: Asked) -> Check | Failure:
    """The check of what came back, or that nothing is written yet."""
    questions, failure = one.questions(one.seed), asked.failure
    if failure is not None and failure.reason == "unsolved":
        return failure
    for question, pieces in zip(questions, asked.came, strict=False):
        if (wrong := one.wrong(question, pieces)) is not None:
            return Check(one.name, False, one.expected, wrong[0], hint=wrong[1])
    last = max(len(asked.came) - 1, 0)
    if failure is not None:
        words = one.words(questions[last], asked.came[last] if asked.came else [])
        hint = _of_error(failure.text) if failure.reason == "error" else one.endless
        return Check(one.name, False, one.expected, f"{words} {failure.text}", line=failure.line, hint=hint)
    if len(asked.came) < len(questions):
        return Check(one.name, False, one.expected, f"{len(asked.came)} of {len(questions)} questions were answered")
    return Check(one.name, True, one.expected, one.counted)


def _of_error(text: str) -> str:
    return "keep the arguments that the function has in the skeleton" if "positional argument" in text else ""
