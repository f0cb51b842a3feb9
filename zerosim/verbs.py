"""The collectives, one row each: how much a member sends, and whose measured times a call uses.

Vocabulary, like number formats (`dtypes.py`). How a verb is called and checked: `comm/collectives.py`. How it is made
of rounds: a function of the verb's name in each file of `comm/algorithms/`. A library's name for it:
`comm/transports/mpi/native.py` and `backends/cuda/nccl.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zerosim.errors import InputError


@dataclass(frozen=True, slots=True)
class Verb:
    """One collective, or one end of a message.

    passes     how often the payload goes round a ring of N members: each sends passes (N-1)/N of it. 0: each sends all
               of it, along a chain or to one other member
    has_root   one member sends to all, or receives from all
    pairwise   each member sends a part to each other one, not round a ring
    curve      the verb whose measured times it uses (`zerosim calibrate`): usually its own, '' for none
    """

    name: str
    passes: int
    curve: str
    has_root: bool = False
    pairwise: bool = False

    def share(self, members: int) -> float:
        """Return how much of a call's payload each of so many members sends."""
        return self.passes * (members - 1) / members if self.passes else 1.0

    @property
    def rounds(self) -> int:
        """How many times N-1 steps follow each other, each with a latency."""
        return max(1, self.passes)


VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        verb.name: verb
        for verb in (
            Verb("all_gather", 1, "all_gather"),
            Verb("reduce_scatter", 1, "reduce_scatter"),
            Verb("all_reduce", 2, "all_reduce"),
            Verb("all_to_all", 1, "all_gather", pairwise=True),  # sends as much as an all_gather
            Verb("broadcast", 0, "broadcast", has_root=True),
            Verb("reduce", 0, "reduce", has_root=True),
            Verb("send", 0, "send"),
            Verb("recv", 0, "send"),
            Verb("barrier", 0, ""),
        )
    }
)
MEASURED = tuple(name for name, verb in VERBS.items() if verb.curve == name)
"""The verbs that `zerosim calibrate` times."""
MESSAGES = tuple(name for name, verb in VERBS.items() if verb.curve == "send")
"""The two ends of a message between two members."""


def find_verb(name: str) -> Verb:
    """Return the row of a verb. Raises: InputError for an unknown name."""
    if name not in VERBS:
        raise InputError(f"unknown collective {name!r}: expected one of {', '.join(VERBS)}")
    return VERBS[name]
