"""The ranks of a world as a grid with named axes, and which of them form a group.

Axes have PyTorch's and torchtitan's names. From the slowest to the fastest, so that neighbours in `tp`
are neighbours in rank:

    pp             pipeline stages
    dp_replicate   whole copies of what dp_shard cuts (HSDP, MiCS)
    dp_shard       ZeRO's own axis: model states are cut over it
    cp             context: one sequence over several ranks
    tp             tensor: one matrix over several ranks

A pure value: no arrays, no devices, no communication. Every rank makes the same groups of it, and numbers
them the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import MappingProxyType

from zerosim.errors import InputError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA = ("dp_replicate", "dp_shard")
"""The axes over which the rows of a batch are dealt out."""
STATES = ("dp_shard",)
"""The axes that cut model states: ZeRO's. Along the other ones of DATA a part is held in copies."""
MODEL = ("pp", "tp")
"""The axes that cut the model itself: a rank has some of its layers, and parts of their weights."""
FINER: Mapping[str, tuple[str, str]] = MappingProxyType({"dp_shard": ("nodes", "node")})
"""An axis that stands for two finer ones: `dp_shard` is as many nodes, times the neighbours in one of them."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """How many ranks there are along each axis; `node`: of dp_shard's, so many neighbours are the finer axis of that
    name.

    Raises: InputError for a size below 1, and for a `node` that does not divide dp_shard.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    node: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, "node"):
            if self.size(axis) < 1:
                raise InputError(f"mesh axis {axis} has size {self.size(axis)}: expected at least 1")
        if self.dp_shard % self.node:
            raise InputError(f"mesh axis node has size {self.node}: expected one that divides dp_shard {self.dp_shard}")

    @property
    def shards(self) -> int:
        """Ranks that model states are divided among: the formulas' N."""
        return self.size(*STATES)

    @property
    def nodes(self) -> int:
        """How many times `node` goes into dp_shard."""
        return self.dp_shard // self.node

    @property
    def sizes(self) -> Mapping[str, int]:
        """Ranks along each axis, by its name."""
        return {axis: self.size(axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        """All ranks: the product of the axes."""
        return self.size(*AXES)

    def size(self, *axes: str) -> int:
        """Ranks in a group along these axes."""
        count = 1
        for axis in axes:
            count *= int(getattr(self, axis))
        return count

    def index(self, rank: int, *axes: str) -> int:
        """Where a rank stands in its group along these axes."""
        place = 0
        for size, stride in _sizes_and_strides(self, axes):
            place = place * size + rank // stride % size
        return place

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """A rank's index along each axis."""
        return {axis: self.index(rank, axis) for axis in AXES}

    def first_ranks(self, *axes: str) -> list[int]:
        """For each place along these axes the lowest rank there."""
        found: dict[int, int] = {}
        for rank in range(self.world_size):
            found.setdefault(self.index(rank, *axes), rank)
        return [found[index] for index in sorted(found)]

    def place(self, rank: int) -> str:
        """'dp_replicate 0, dp_shard 1': the axes that have more than one place; '' in a mesh of one axis."""
        axes = [axis for axis in AXES if self.size(axis) > 1]
        return ", ".join(f"{axis} {self.index(rank, axis)}" for axis in axes) if len(axes) > 1 else ""

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks, ascending, that differ from this one along these axes alone; itself among them."""
        finest = _finest(axes)
        first = rank - sum(self.index(rank, axis) * self._stride(axis) for axis in finest)
        steps = [range(0, self.size(axis) * self._stride(axis), self._stride(axis)) for axis in finest]
        return tuple(first + sum(offsets) for offsets in product(*steps))

    def neighbours(self, rank: int, axis: str, count: int) -> tuple[int, ...]:
        """The `count` neighbours along an axis that a rank belongs to: of 8 along tp, 4 and 4. `count` divides it."""
        group = self.group(rank, axis)
        first = self.index(rank, axis) // count * count
        return group[first : first + count]

    def ends(self, rank: int, axis: str) -> tuple[int, ...]:
        """The first and the last rank of a rank's group along an axis."""
        group = self.group(rank, axis)
        return group[0], group[-1]

    def number(self, *axes: str) -> int:
        """A number for the groups along these axes, 1 to 63. They share no rank: with a rank it names one group.

        Groups of neighbours along an axis have numbers from 64 on (`comm/groups.py`).
        """
        return sum(1 << _FINEST.index(axis) for axis in _finest(axes))

    def name(self, *axes: str) -> str:
        """Axes joined with '+', in mesh order; those of size 1 are left out where another one is there."""
        ordered = sorted(set(axes), key=lambda axis: _FINEST.index(_finest((axis,))[0]))
        return "+".join([axis for axis in ordered if self.size(axis) > 1] or ordered)

    def _stride(self, axis: str) -> int:
        last = _finest((axis,))[-1]
        return self.size(*_FINEST[_FINEST.index(last) + 1 :])


_FINEST = tuple(finer for axis in AXES for finer in FINER.get(axis, (axis,)))


def _finest(axes: Collection[str]) -> list[str]:
    """The finest axes that these stand for, in mesh order."""
    asked = {finer for axis in axes for finer in FINER.get(axis, (axis,))}
    return [axis for axis in _FINEST if axis in asked]


@lru_cache(maxsize=1024)
def _sizes_and_strides(mesh: Mesh, axes: tuple[str, ...]) -> list[tuple[int, int]]:
    """Of each of the finest axes: ranks along it, and how far apart two neighbours are."""
    return [(mesh.size(axis), mesh._stride(axis)) for axis in _finest(axes)]


def without(axes: Collection[str], others: Collection[str]) -> tuple[str, ...]:
    """The finest axes that `axes` stand for and `others` do not, in mesh order."""
    gone = _finest(others)
    return tuple(axis for axis in _finest(axes) if axis not in gone)


def joined(axes: Collection[str]) -> tuple[str, ...]:
    """These axes but for those that another one of them stands for, in mesh order."""
    finer = {part for axis in axes for part in FINER.get(axis, ())}
    return tuple(axis for axis in dict.fromkeys((*AXES, *_FINEST)) if axis in axes and axis not in finer)


def what_for(axis: str) -> str:
    """What a group along axes of this name (`Mesh.name`) is for, whatever their sizes: 'states' where they cut model
    states, 'replicas' where they hold copies of those, else their name."""
    axes = set(_finest(axis.split("+")))
    if axes <= set(_finest(STATES)):
        return "states"
    return "replicas" if axes <= set(_finest(DATA)) else axis
