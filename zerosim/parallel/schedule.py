"""A step as a list of actions: which microbatch goes forward or backward, in which order. Pure.

One stage runs F0 B0 F1 B1 ...: each microbatch's activations are freed before the next one's are allocated. The engine
runs the list (`train/engine.py`); a strategy sees the resulting uses of units, and so knows what comes next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from zerosim.errors import InputError

if TYPE_CHECKING:
    from zerosim.nn import Unit
    from zerosim.tensor.flat import Flat


@dataclass(frozen=True, slots=True)
class Action:
    """One run of a chunk of a pipeline stage's units, on microbatch `slot`. Each kind of action is a class:

    letter      its name in a list: F, B, I, W, as in PyTorch's
    sends       1: the output goes to the next chunk; -1: the input's gradient goes to the previous one; 0: nothing
    follows     letter of the action on the same slot and chunk that must come before it
    length      slots that it takes
    keeps       how many more are live after it: whole activations of a chunk, and the part that weight gradients read
    gathers     it reads the parameters
    completes   the weights' gradients of the microbatch are complete when it ends
    """

    slot: int
    chunk: int = 0
    letter: ClassVar[str]
    name: ClassVar[str]
    sends: ClassVar[int]
    follows: ClassVar[str]
    length: ClassVar[int]
    keeps: ClassVar[tuple[int, int]]
    gathers: ClassVar[bool] = True
    completes: ClassVar[bool] = False

    @staticmethod
    def turns(units: Sequence[Unit]) -> Iterator[Unit]:
        """Return the units of a chunk, or their leaf modules, in the order in which this kind of action uses them."""
        return (turn for unit in reversed(units) for turn in unit.turns_back())


class Forward(Action):
    """Run a chunk of this stage's units, in order."""

    letter, name, sends, follows, length, keeps = "F", "forward", 1, "", 1, (1, 0)

    @staticmethod
    def turns(units: Sequence[Unit]) -> Iterator[Unit]:
        return (turn for unit in units for turn in unit.turns())


class Backward(Action):
    """Make all gradients of a chunk of this stage's units, in reverse order."""

    letter, name, sends, follows, length, keeps = "B", "backward", -1, "F", 2, (-1, 0)
    completes = True


class InputGrad(Action):
    """The part of a backward that the previous chunk waits for: gradients of the inputs alone."""

    letter, name, sends, follows, length, keeps = "I", "input gradient", -1, "F", 1, (-1, 1)


class WeightGrad(Action):
    """The rest of a backward, any time later: gradients of the weights. It reads what forward saved or the input's
    gradient recomputed, and no parameters."""

    letter, name, sends, follows, length, keeps = "W", "weight gradient", 0, "I", 1, (0, -1)
    gathers, completes = False, True

    @staticmethod
    def turns(units: Sequence[Unit]) -> Iterator[Unit]:
        return (turn for unit in reversed(units) for turn in reversed(unit.turns()) if turn.defers and turn.goes_back)


KINDS: Mapping[str, type[Action]] = MappingProxyType(
    {kind.letter: kind for kind in (Forward, Backward, InputGrad, WeightGrad)}
)


def needs(action: Action, number: int, last: int) -> tuple[str, int] | None:
    """Return what an action of chunk `number` of the whole model, which ends with chunk `last`, needs to have ended.

    The result is letters, any one of which is enough, and the number of their chunk; None where nothing is needed.
    """
    if action.sends > 0:
        return (action.letter, number - 1) if number else None
    if action.sends < 0 and number < last:
        return "BI", number + 1
    return action.follows, number


class Live(NamedTuple):
    """Chunks of microbatches that a stage holds: `whole` with all activations, M_B each; `weights` with those that
    weight gradients read, M_W each."""

    whole: int
    weights: int

    @property
    def total(self) -> int:
        return self.whole + self.weights


def live(actions: Sequence[Action]) -> list[Live]:
    """Count the live chunks after each action."""
    whole, weights = zip(*(action.keeps for action in actions), strict=True)
    return [Live(*counts) for counts in zip(accumulate(whole), accumulate(weights), strict=True)]


class Use(NamedTuple):
    """One use of a unit, or of a leaf module, in an action."""

    unit: Unit
    action: Action

    @property
    def gathers(self) -> Sequence[Flat]:
        """Flats whose parameters it reads."""
        return self.unit.flats if self.action.gathers else ()


def schedule(num_stages: int, stage: int, micro_batches: int) -> list[Action]:
    """Return the actions of one stage in one step. Every slot goes forward, then backward; backward in order.

    Raises: InputError for a stage that does not exist, for no microbatches, and for several stages, whose schedules are
    in `pipeline.py`.
    """
    if num_stages != 1:
        raise InputError(f"{num_stages} stages: expected 1; a pipeline has a schedule of its own")
    if not 0 <= stage < num_stages:
        raise InputError(f"stage {stage} of {num_stages}: expected 0 to {num_stages - 1}")
    if micro_batches < 1:
        raise InputError(f"{micro_batches} microbatches: expected at least 1")
    return [action for slot in range(micro_batches) for action in (Forward(slot), Backward(slot))]


def check_step(actions: object, whose: str, micro_batches: int, chunks: int = 1) -> None:
    """Check a list of actions. Raises: InputError unless every microbatch goes forward through each chunk once, and
    then backward once: all at once, or input gradients first and weight gradients later, in that order."""
    if not isinstance(actions, list):
        raise InputError(f"{whose}: its schedule gave a {type(actions).__name__}, expected a list of actions")
    done: dict[tuple[str, int, int], Action] = {}
    orders: dict[tuple[str, int], list[int]] = {}
    for action in actions:
        if type(action) not in KINDS.values():
            raise InputError(
                f"{whose}: {action!r} is no action, expected Forward(slot) or Backward(slot), or InputGrad(slot) and "
                "WeightGrad(slot) in place of the latter"
            )
        slot, chunk = action.slot, action.chunk
        if slot not in range(micro_batches) or chunk not in range(chunks):
            raise InputError(
                f"{whose}: {action}, where there are {micro_batches} microbatches, {chunks} chunks, from 0"
            )
        if any((letter, slot, chunk) in done for letter in ("BI" if action.sends < 0 else action.letter)):
            raise InputError(f"{whose}: {action} comes twice")
        if action.follows and (action.follows, slot, chunk) not in done:
            raise InputError(f"{whose}: {action} comes before its {KINDS[action.follows].name}")
        done[action.letter, slot, chunk] = action
        orders.setdefault((action.letter, chunk), []).append(slot)
    for slot, chunk in product(range(micro_batches), range(chunks)):
        apart = ("I", slot, chunk) in done
        for kind in (Forward, InputGrad, WeightGrad) if apart else (Forward, Backward):
            if (kind.letter, slot, chunk) not in done:
                raise InputError(f"{whose}: {kind(slot, chunk)} is missing")
    for chunk in range(chunks):
        if orders.get(("I", chunk)) != orders.get(("W", chunk)):
            raise InputError(f"{whose}: weight gradients come in a different order from input gradients; use one order")


def uses_of(actions: Sequence[Action], *chunks: Sequence[Unit]) -> list[Use]:
    """Return the units' uses in the order of the step. A stage of several chunks of units runs one of them at a time.

    By leaf module the uses are those of the leaves; a recomputed block has its leaves' forward in a backward.
    """
    return [Use(turn, action) for action in actions for turn in action.turns(chunks[action.chunk])]


class Timetable:
    """A rank's position in a step: the uses of its units that have begun, and those that follow. Outside of a step,
    such as in text generation, the next uses are unknown."""

    def __init__(self) -> None:
        self.uses: Sequence[Use] = ()
        self.at = 0  # uses that have begun
        self.last = True  # this is the step's last microbatch for the chunk in use
        self._last: Mapping[int, int] = {}  # by chunk its last slot

    def begin(self, uses: Sequence[Use]) -> None:
        """Begin a step, in which units are used in this order (from `uses_of`)."""
        self.uses, self.at = uses, 0
        self._last = {use.action.chunk: use.action.slot for use in uses if use.action.completes}

    def enter(self) -> None:
        """Begin the next use."""
        if self.at < len(self.uses):
            action = self.uses[self.at].action
            self.last = action.slot == self._last.get(action.chunk)
            self.at += 1

    @property
    def action(self) -> Action | None:
        """The forward or backward that began last."""
        return self.uses[self.at - 1].action if self.at else None

    @property
    def defers(self) -> bool:
        """Whether the current action leaves its weights' gradients for another."""
        return self.action is not None and self.action.sends < 0 and not self.action.completes

    def coming(self, count: int = 1) -> Sequence[Use]:
        """Return the next uses after the current one, `count` of them or as many as there are."""
        return self.uses[self.at : self.at + count]

    @property
    def ends_action(self) -> bool:
        """Whether the current use is the last one of its forward or backward."""
        following = self.coming()
        return not following or following[0].action != self.action

    @property
    def turns_next(self) -> bool:
        """Return whether the current forward is followed by its own backward."""
        now = self.action
        then = next((use.action for use in self.uses[self.at :] if use.action != now), None)
        return now is not None and then == Backward(now.slot, now.chunk)

    def is_used_next(self, unit: Unit) -> bool:
        """Return whether the next use is of this unit again, in another forward or backward."""
        return self.ends_action and any(use.unit is unit and use.gathers for use in self.coming())

    def rest_of_action(self) -> Iterator[Use]:
        """Return the uses that follow in the current forward or backward."""
        for at in range(self.at, len(self.uses)):
            if not self.at or self.uses[at].action != self.action:
                return
            yield self.uses[at]
