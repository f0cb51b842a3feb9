"""Tensor parallelism's collectives beside a block's products, as Transformer Engine runs them (--tp-comm-overlap).

Between t ranks a product and its collective are divided into t chunks of rows:

    all-gather, then product      a ring passes chunks on while the products of received chunks run. A rank has its
                                  own chunk from the start. When the last chunk arrives, only its product is left
    product, then reduce-scatter  a rank sends a chunk when its product is done. Its own chunk is the last product
    in backward                   the gather of an input for weight gradients runs beside the product for the input's
                                  gradient, and that gradient's reduce-scatter beside the weight gradients' products

So a rank's entries change their order, and some products have two parts. The clock does not know about this. All chunks
of a product together take as long as the whole product: they run on several streams side by side.

Source: NVIDIA/TransformerEngine 015939a, common/comm_gemm_overlap/comm_gemm_overlap.cpp (split_overlap_ag and
split_overlap_rs of CommOverlapP2PBase), pytorch/module/base.py (initialize_ub: the method of each product).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from zerosim.device.events import Launch, Wait
from zerosim.device.work import DGRAD, LINEAR, OF_LINEAR, WGRAD
from zerosim.ledger.costs import is_captured
from zerosim.ledger.entries import Busy, Entry, Live

_OF_INPUTS = (DGRAD, "add")
_OF_PRODUCTS = (LINEAR, WGRAD, "column_sum", *_OF_INPUTS)


class Overlap:
    """Puts entries of single kernels, each by its name, into the order that chunks allow.

    gathers   the works of all gathers so far
    arrival   the wait for the last one, deferred behind running products
    run       products that have not been put in order yet
    """

    def __init__(self, chunks: int, gathers: Iterable[int] = ()) -> None:
        self.chunks, self.gathers = chunks, set(gathers)
        self.arrival, self.run = list[Entry](), list[Entry]()

    def settles(self, entry: Entry) -> bool:
        """Return whether the order after this entry is the same whatever came before it."""
        return not (isinstance(entry, Live) or _name(entry) in _OF_PRODUCTS)

    def take(self, entry: Entry) -> Sequence[Entry]:
        """Take the next entry. Return those whose turn has come."""
        if self.chunks == 1:
            return (entry,)
        if not self.settles(entry):
            self.run.append(entry)
            return ()
        arrival, run, self.arrival, self.run = self.arrival, self.run, [], []
        if isinstance(entry, Wait) and entry.work in self.gathers:
            self.arrival = [entry]
            return run
        if _is_of_block(entry, "reduce_scatter"):
            return list(_before_scatter(entry, arrival, run, self.chunks))
        if isinstance(entry, Launch) and _is_of_block(entry, "all_gather"):
            self.gathers.add(entry.work)
        return [*_taken(arrival, run, self.chunks), entry]

    def rest(self) -> Sequence[Entry]:
        """Return the entries that have waited for others. There are none."""
        return list(_taken(self.arrival, self.run, self.chunks))


def overlapped(entries: Iterable[Entry], chunks: int) -> Iterator[Entry]:
    """Return entries of single kernels in the order that chunks allow."""
    if chunks == 1:
        yield from entries
        return
    order = Overlap(chunks)
    for entry in entries:
        yield from order.take(entry)
    yield from order.rest()


def _taken(arrival: Sequence[Entry], run: Sequence[Entry], chunks: int) -> Iterator[Entry]:
    """Return the products of a gather's result. They run chunk by chunk, and the last chunk after its arrival."""
    kind = next((name for entry in run if (name := _name(entry))), "") if arrival else ""
    if kind not in (LINEAR, DGRAD):
        yield from (*arrival, *run)
        return
    taking = list(takewhile(lambda entry: _name(entry) in ("", kind), run))
    parts = [_cut(entry, (chunks - 1) / chunks) for entry in taking]
    yield from (first for first, _ in parts)
    yield from arrival
    yield from (rest for _, rests in parts for rest in rests)
    yield from run[len(taking) :]


def _before_scatter(launch: Entry, arrival: Sequence[Entry], run: Sequence[Entry], chunks: int) -> Iterator[Entry]:
    """Return the products whose result a reduce-scatter reads, and its launch."""
    names = [_name(entry) for entry in run]
    if DGRAD in names:  # the rest computes weight gradients
        yield from (entry for entry in run if _name(entry) in ("", *_OF_INPUTS))
        yield from (*arrival, launch)
        yield from (entry for entry in run if _name(entry) not in ("", *_OF_INPUTS))
    elif LINEAR in names:
        at = len(names) - 1 - names[::-1].index(LINEAR)
        first, rest = _cut(run[at], 1 / chunks)
        yield from (*arrival, *run[:at], first, launch, *rest, *run[at + 1 :])
    else:
        yield from (*arrival, *run, launch)


def _cut(entry: Entry, share: float) -> tuple[Entry, list[Entry]]:
    """Cut a product in two parts. The first has this share of its time and all other counts."""
    if not isinstance(entry, Busy):
        return entry, []
    first, rest = share * entry.seconds, (1 - share) * entry.seconds
    tail = entry._replace(seconds=rest, flops=0, model_flops=0, kernels=0, launch=0.0, lag=rest)
    return entry._replace(seconds=first, lag=entry.launch + first), [tail]


def _name(entry: Entry) -> str:
    """Return a kernel's name. A product in 8 bits has that of its direction."""
    return OF_LINEAR.get(entry.name, entry.name) if isinstance(entry, Busy) else ""


def _is_of_block(entry: Entry, op: str) -> bool:
    return isinstance(entry, Launch) and (entry.op, entry.axis) == (op, "tp") and is_captured(entry.scope)
