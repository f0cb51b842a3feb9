"""Answers that are asked before any run: the questions, and the errors in their replies.

The answer's process asks (`asked`), and stops at the first wrong reply. Its judgement does not count: the judging
process gets the replies as plain data, and checks all of them again (`checked`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from zerosim.grading.limits import Failure, Watch, called
from zerosim.grading.plain import plain
from zerosim.grading.verdict import Check

Wrong = tuple[str, str]
"""What is wrong, and a hint."""

Keep = Callable[[Any], Any]
"""Stores a reply, and returns it as plain data."""


class Examination(NamedTuple):
    """The questions to an answer outside of runs.

    questions        the same ones each time, by the seed
    ask              put a question to an answer, and store the reply, piece by piece
    words            the last question, after a number of pieces
    wrong            the error in the pieces, None if they are right
    endless          a hint for an answer that does not end
    name, expected   of its check
    counted          the check's words if every reply is right, with {} for the number of questions
    """

    questions: Callable[[int], Sequence[Any]]
    ask: Callable[[Any, Any, Keep], None]
    words: Callable[[Any, Sequence[Any]], str]
    wrong: Callable[[Any, Sequence[Any]], Wrong | None]
    endless: str = ""
    name: str = ""
    expected: str = ""
    counted: str = ""
    seed: int = 0


def by_calls(questions: Callable[[int], Sequence[tuple[Any, ...]]], wrong: Callable[..., Wrong | None]) -> Examination:
    """Make an examination of single calls.

    A question is the call in words and its arguments. `wrong` gets both, and then the returned value.
    """

    def ask(answer: Any, question: Any, keep: Keep) -> None:
        keep(answer(*deepcopy(question[1:])))

    def words(question: Any, came: Sequence[Any]) -> str:
        return str(question[0])

    def first_wrong(question: Any, came: Sequence[Any]) -> Wrong | None:
        return next((found for one in came if (found := wrong(*question, one)) is not None), None)

    return Examination(questions, ask, words, first_wrong)


class Asked(NamedTuple):
    """The replies, by question, the last one's perhaps in part; and why there are no more."""

    came: list[list[Any]]
    failure: Failure | None


def asked(answer: Any, one: Examination, watch: Watch) -> Asked:
    """Ask the questions, up to the first that the answer gets wrong."""
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
    """Return the check of the replies, or that nothing is written yet."""
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
    return Check(one.name, True, one.expected, one.counted.format(len(questions)))


def _of_error(text: str) -> str:
    return "keep the arguments that the function has in the skeleton" if "positional argument" in text else ""
