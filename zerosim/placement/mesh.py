"""The ranks of a world as a grid with named axes, and their groups.

Axes have PyTorch's and torchtitan's names. From the slowest to the fastest, so that neighbours in `tp`
are neighbours in rank:

    pp             pipeline stages
    dp_replicate   whole copies of the states that dp_shard cuts (HSDP, MiCS)
    dp_shard       ZeRO's own axis: model states are cut over it
    cp             context: one sequence over several ranks
    tp             tensor: one matrix over several ranks

Experts are cut over the same ranks a second time (Parallel Folding, arXiv 2504.14960): dp_shard x cp x tp is also
edp x ep x etp, the slowest first.

    edp            model states of experts are cut over it
    ep             expert: some of a layer's experts
    etp            expert tensor: one expert's matrices over several ranks

A pure value: no arrays, no devices, no communication. Every rank derives the same groups with the same
numbers.
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
"""The axes over which the rows of a batch are distributed."""
SHARES = ("cp",)
"""The axes whose ranks share the rows of a batch: each has some tokens of every row."""
STATES = ("dp_shard", *SHARES)
"""The axes that cut model states: ZeRO's, and those of SHARES. Ranks along the other axes of DATA hold copies of the
slices."""
CUTS = ("tp",)  # the axes that cut weights: their ranks divide the work of one layer
MODEL = ("pp", *CUTS)
"""The axes that cut the model itself: a rank has some of its layers, and pieces of their weights."""
BLOCK = (*SHARES, *CUTS)
"""The axes whose ranks work on the same block of the same rows."""
FOLDS = (*STATES, *CUTS)
"""The axes whose ranks experts are cut over, along EXPERTS' axes."""
EXPERT_STATES, EXPERT_CUTS = ("edp",), ("ep", "etp")
"""Of experts: the axes that cut their states, and those that cut their weights."""
EXPERTS = (*EXPERT_STATES, *EXPERT_CUTS)
FINER: Mapping[str, tuple[str, str]] = MappingProxyType({"dp_shard": ("nodes", "node")})
"""An axis made of two finer ones: `dp_shard` is the number of nodes times the neighbours in one node."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The number of ranks along each axis; `node` neighbours along dp_shard form the finer axis of that name. An `etp`
    of 0 is tp.

    Raises: InputError for a size below 1, and for sizes that do not divide what they are cut from.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    node: int = 1
    ep: int = 1
    etp: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "etp", self.etp or self.tp)
        for axis in (*AXES, "node", *EXPERT_CUTS):
            if self.size(axis) < 1:
                raise InputError(f"mesh axis {axis} has size {self.size(axis)}: expected at least 1")
        if self.dp_shard % self.node:
            raise InputError(f"mesh axis node has size {self.node}: expected one that divides dp_shard {self.dp_shard}")
        if self.size(*FOLDS) % self.size(*EXPERT_CUTS):
            sizes = f"ep {self.ep} x etp {self.etp} do not divide dp_shard x cp x tp, {self.size(*FOLDS)}"
            raise InputError(f"mesh axes {sizes}: expected sizes that do")

    @property
    def edp(self) -> int:
        """The ranks that divide the states of an expert."""
        return self.size(*FOLDS) // self.size(*EXPERT_CUTS)

    @property
    def is_folded(self) -> bool:
        """Whether experts are cut otherwise than other weights."""
        return self.ep > 1 or self.etp != self.tp

    @property
    def shards(self) -> int:
        """The ranks that divide model states: the formulas' N."""
        return self.size(*STATES)

    @property
    def nodes(self) -> int:
        """The number of nodes: dp_shard over `node`."""
        return self.dp_shard // self.node

    @property
    def sizes(self) -> Mapping[str, int]:
        """The ranks along each axis, by name; those of experts, where they are cut otherwise."""
        return {axis: self.size(axis) for axis in (*AXES, *(EXPERT_CUTS if self.is_folded else ()))}

    @property
    def world_size(self) -> int:
        """All ranks: the product of the axes."""
        return self.size(*AXES)

    def size(self, *axes: str) -> int:
        """Return the number of ranks in a group along these axes."""
        count = 1
        for axis in axes:
            count *= int(getattr(self, axis))
        return count

    def index(self, rank: int, *axes: str) -> int:
        """Return a rank's index in its group along these axes."""
        place = 0
        for size, stride in _sizes_and_strides(self, axes):
            place = place * size + rank // stride % size
        return place

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks, ascending, that differ from this one only along these axes; itself included."""
        single = finest(axes)
        first = rank - sum(self.index(rank, axis) * self._stride(axis) for axis in single)
        steps = [range(0, self.size(axis) * self._stride(axis), self._stride(axis)) for axis in single]
        return tuple(first + sum(offsets) for offsets in product(*steps))

    def neighbours(self, rank: int, axis: str, count: int) -> tuple[int, ...]:
        """Return a rank's set of `count` neighbours along an axis that `count` divides: 8 along tp form 4 and 4."""
        group = self.group(rank, axis)
        first = self.index(rank, axis) // count * count
        return group[first : first + count]

    def ends(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the first and the last rank of a rank's group along an axis."""
        group = self.group(rank, axis)
        return group[0], group[-1]

    def number(self, *axes: str) -> int:
        """Return a number for the groups along these axes, below 1 << len(FINEST). Number and rank identify a group.
        Groups of neighbours along an axis have greater ones (`comm/groups.py`)."""
        return sum(1 << FINEST.index(axis) for axis in finest(axes))

    def name(self, *axes: str) -> str:
        """Return the axes joined with '+', in mesh order: those of several ranks or, without one, all but SHARES."""
        ordered = sorted(set(axes), key=lambda axis: FINEST.index(finest((axis,))[0]))
        with_ranks = [axis for axis in ordered if self.size(axis) > 1]
        return "+".join(with_ranks or [axis for axis in ordered if axis not in SHARES] or ordered)

    def _stride(self, axis: str) -> int:
        last = finest((axis,))[-1]
        order = EXPERTS if last in EXPERTS else FINEST[: -len(EXPERTS)]
        return self.size(*order[order.index(last) + 1 :])


FINEST = (*[finer for axis in AXES for finer in FINER.get(axis, (axis,))], *EXPERTS)
"""AXES, with the finer ones in place of what they make, and those of experts."""


def finest(axes: Collection[str]) -> list[str]:
    """Return the finest axes of these axes, in mesh order."""
    asked = {finer for axis in axes for finer in FINER.get(axis, (axis,))}
    return [axis for axis in FINEST if axis in asked]


@lru_cache(maxsize=1024)
def _sizes_and_strides(mesh: Mesh, axes: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return for each of the finest axes its ranks, and the distance of two neighbours."""
    return [(mesh.size(axis), mesh._stride(axis)) for axis in finest(axes)]
