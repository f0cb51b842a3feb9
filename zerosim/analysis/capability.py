"""One capability's part in the closed forms: what it sends and stores, its letters, its words.

A capability is a file in `capabilities/` and a row in the table there. "In place of" and "beside" are different slots:
`sent` returns what stands in place of an earlier capability's traffic, `beside` and `forms` add to it. Each function
returns nothing, or what it was given, where its capability is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from zerosim.analysis.formulas import BytesPerParameter, Form, Operation
from zerosim.analysis.shares import Placed, Share
from zerosim.config import RunConfig


class Key(NamedTuple):
    """The key of a form: its subject, a kind of memory or an operation, and the purpose of its group.

    states, upcast, between   bytes of a model state per rank: when backward ends, in the optimizer step, between steps
    buffers                   bytes per rank of the buffers from which gradients are reduced, from start to end
    sent                      bytes per rank and step for model states, by operation and the group's purpose
    exchanged                 the same for activations, by operation and axis
    copied                    bytes that move between a rank's memories: blocks' inputs, offloaded model states
    lies                      bytes of a model state in one memory when backward ends, where states are offloaded
    kept                      bytes of one block's activations
    saved                     bytes of a save, on the drives, on the host and received; the mean over ranks that do it
    """

    subject: str
    name: str
    axis: str = ""


Forms = Iterator[tuple[Key, Form]]


class Step(NamedTuple):
    """A step: `passes`, 2 with an estimate of curvature; its `number`, if the first steps send differently; whether a
    delayed update runs beside it, if updates are delayed."""

    passes: int = 1
    number: int = 0
    late: bool = True


ONCE = Step()


class Sent(NamedTuple):
    """Bytes that a rank sends in a step for gradients and for parameters, by operation and its group's purpose.

    `fetched`: the bytes that the gathers of a step read of all ranks' primary shards together."""

    grads: Mapping[Operation, Form] = MappingProxyType({})
    params: Mapping[Operation, Form] = MappingProxyType({})
    fetched: Form = Form()


class Beside(NamedTuple):
    """Bytes beside a model state of that kind, at these moments (subjects of keys), in a `memory` ('' is the device) or
    where the state itself lies."""

    kind: str
    form: Form
    memory: str | None = None
    at: tuple[str, ...] = ("states", "upcast", "between")


class Kept(NamedTuple):
    """What is kept of a parameter: its optimizer's momentum, an fp32 master; `casts`: no shard beside the master;
    `grads`: its gradient is there when backward ends."""

    momentum: float
    masters: bool
    casts: bool = False
    grads: bool = True


class Asked(NamedTuple):
    """The ranks of a pipeline stage, in elements with padding or without, in a step of this number."""

    placed: Placed
    share: Share
    padded: bool
    step: int


Note = Callable[[RunConfig], Iterable[str]]


def when(holds: object, sentence: str) -> list[str]:
    """Return the sentence if that holds."""
    return [sentence] if holds else []


class Capability(NamedTuple):
    """What a capability brings, each a function of a configuration.

    sent      in place of what earlier ones send for gradients and parameters
    forms     beside: any other form, given what is sent in the end. Forms with the same key add up
    held      bytes of model states, by subject and kind
    kept      in place of what is kept of a parameter
    beside    bytes beside a model state
    lies      where states lie, of their bytes and what lies beside them
    divided   a form as this capability divides it, in place of one form of all weights
    letters   values for its letters, in place of earlier ones
    notes     sentences, or words for them, by the section of a page that shows them
    measured  whether published steps have it as it is here
    axes      the letter of the ranks along each of its axes; '' where a rank sends all of a volume
    """

    sent: Callable[[RunConfig, Step, Sent], Sent] = lambda config, step, sent: sent
    forms: Callable[[RunConfig, Step, Sent], Forms] = lambda config, step, sent: iter(())
    held: Callable[[RunConfig, BytesPerParameter], Forms] = lambda config, cost: iter(())
    kept: Callable[[RunConfig, Kept], Kept] = lambda config, kept: kept
    beside: Callable[[RunConfig, BytesPerParameter, Step], Iterator[Beside]] = lambda config, cost, step: iter(())
    lies: Callable[[RunConfig, Mapping[str, Form], Sequence[Beside]], Forms] = lambda config, whole, beside: iter(())
    divided: Callable[[RunConfig, Form], Form] = lambda config, form: form
    letters: Callable[[Asked], Mapping[str, int]] = lambda asked: {}
    measured: Callable[[RunConfig], bool] = lambda config: True
    notes: Mapping[str, Note] = MappingProxyType({})
    axes: Mapping[str, str] = MappingProxyType({})
