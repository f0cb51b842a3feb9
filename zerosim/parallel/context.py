"""Context parallelism: every row's tokens are cut over c ranks, which share the rows of the batch.

All that works token by token, on T/c of them, is as without it: maps, norms, the loss. Only attention reads other
tokens. Three ways bring them:

    ring        keys and values go round, results are merged by log-sum-exp            (`ring_attention.py`)
    allgather   every rank gathers all keys and values                                 (the same file)
    ulysses     before attention a rank exchanges its tokens of all heads for all tokens of some heads   (`ulysses.py`)

`ulysses+ring` exchanges within a node and goes round across nodes (USP, arXiv 2405.07719). Model states are cut over
dp_shard x c, and gradients averaged over both: a rank's loss is the mean of its tokens. Several documents in a row are
kept apart by the same kernels, of which each meets a run of queries and a run of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from zerosim import functional as F
from zerosim.backends.forms import SCORES
from zerosim.config import RunConfig
from zerosim.config.parts.context import alike, chunk_of, cut_of
from zerosim.nn.documents import Documents
from zerosim.parallel.pieces import Pieces, Place
from zerosim.parallel.ring_attention import GatheredKeys, OtherKeys, OwnKeys, Ring, met
from zerosim.parallel.ulysses import Ulysses
from zerosim.placement.classes import Column, Reason
from zerosim.placement.context import ContextCut
from zerosim.placement.documents import Packing
from zerosim.placement.layout import Layout
from zerosim.placement.mesh import SHARES
from zerosim.tensor.tensor import Tensor

AROUND: dict[str, type[OtherKeys]] = {"ring": Ring, "allgather": GatheredKeys, "ulysses+ring": Ring}


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add the cut of the rows' tokens, and the attention to other ranks' tokens."""
    cut, groups, packing = cut_of(config.mesh, config.context), place.groups, config.data.packing
    documents = None if packing is None else Documents(packing)
    chunks = Documents(Packing(chunk_of(config.model))) if chunk_of(config.model) else None
    if cut.ranks == 1 and documents is None and chunks is None:
        return made
    index = 0 if groups is None else groups.mesh.index(place.rank, *SHARES)

    def attention(documents: Documents | None) -> Callable[..., Tensor]:
        attention: Callable[..., Tensor] = made.group.attention
        if cut.around > 1:
            comm = None if groups is None else groups.across(*SHARES, cut.within)
            attention = partial(F.attention, run=AROUND[config.context.how](cut, index // cut.within, comm, documents))
        elif documents is not None:
            attention = partial(F.attention, run=OwnKeys(cut, 0, None, documents))
        if cut.within > 1:
            comm = None if groups is None else groups.neighbours(*SHARES, cut.within)
            attention = Ulysses(cut.within, index % cut.within, comm, attention)
        return attention

    rows = replace(made.group.rows, context=cut, place=index)
    group = replace(made.group, rows=rows, documents=documents, attention=attention(documents))
    return made._replace(group=group if chunks is None else replace(group, chunked=attention(chunks)))


def unlike(config: RunConfig) -> list[Reason]:
    """Return why ranks that share rows differ, if they do: by their place in the ring, or by what they read of the
    documents of a row."""
    cut, packing = cut_of(config.mesh, config.context), config.data.packing
    of_place: Sequence[Hashable] = range(cut.around)
    if alike(config.mesh, config.context, config.model):
        if packing is None or cut.around == 1 or not packing.length:
            return []
        of_place = [
            _read(config, cut, place, packing.starts((), config.model.row_tokens)) for place in range(cut.around)
        ]

    def places(layout: Layout, stage: int) -> Iterator[Column]:
        yield SHARES, [of_place[index // cut.within] for index in range(cut.ranks)]

    return [places]


def _read(config: RunConfig, cut: ContextCut, place: int, starts: Sequence[int]) -> tuple[int, ...]:
    """Return how many scores a place computes of the documents in a row, one after the other of whose keys it meets."""
    around = [(place - step) % cut.around for step in range(cut.around)]
    meetings = [tuple(around)] if config.context.how == "allgather" else [(source,) for source in around]
    return tuple(met(cut, place, sources, config.model.row_tokens, starts).pairs(SCORES) for sources in meetings)
