"""Numbers counted on a run: the list COUNTS, and how each is read off the run's ledgers.

No formula is in here. Bytes are those of the rank with the most, padding included.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

from zerosim.analysis.expect.asked import Asked, Quantity, several_ranks
from zerosim.comm.runtime import make_backend
from zerosim.device.device import Device
from zerosim.dtypes import dtype
from zerosim.errors import InputError
from zerosim.train.build import build_model, is_block


def _counted_states(asked: Asked) -> Fraction:
    marks = asked.result.memory[0].marks
    if asked.at not in marks:
        raise InputError(f"at {asked.at!r}: this run has no such moment; it has {', '.join(marks)}")
    return Fraction(max(sum(memory.model_states(asked.at).values()) for memory in asked.result.memory))


def _counted_peak(asked: Asked) -> Fraction:
    return Fraction(max(memory.peak.total_bytes for memory in asked.result.memory))


def _counted_sent(asked: Asked) -> Fraction:
    result = asked.result
    return Fraction(max(result.sent_bytes(rank, len(result.steps) - 1) for rank in range(result.config.mesh.ranks)))


def _counted_volume(asked: Asked) -> Fraction:
    result = asked.result
    ranks, last = several_ranks(asked.config), len(result.steps) - 1
    elements = sum(
        (
            Fraction(row.wire_bytes, dtype(row.dtype).itemsize)
            for rows in result.traffic
            for row in rows
            if row.step == last and row.purpose == "states"
        ),
        Fraction(0),
    )
    return elements / ranks * Fraction(ranks, ranks - 1) / result.num_parameters


def _counted_blocks(asked: Asked) -> list[int]:
    """What each block's forward saved, as its ops recorded it."""
    kept = {unit: sum(row.nbytes for row in rows) for unit, rows in asked.result.saved.items() if is_block(unit)}
    if not kept or asked.config.model.family == "flat":
        raise InputError(f"model {asked.config.model.name} has no blocks whose activations could be counted")
    return list(kept.values())


def _counted_largest(asked: Asked) -> Fraction:
    """Times mp: a model of mp times as many parameters leaves each rank what one of this size does."""
    if asked.config.model.family != "flat":
        raise InputError(f"model {asked.config.model.name}: the largest is searched among flat ones; choose model flat")
    return Fraction(asked.runs.largest(asked.config, asked.memory) * asked.mp)


def _counted_parameters(asked: Asked) -> Fraction:
    """Of the model as it is built; nothing has to run for that."""
    return Fraction(build_model(asked.config, Device(0, make_backend("meta"))).num_parameters)


COUNTS: Mapping[str, Quantity] = MappingProxyType(
    {
        "model_states_bytes": Quantity(
            _counted_states, "bytes", "param + grad + optim on the rank with the most, padding included", takes=("at",)
        ),
        "peak_bytes": Quantity(_counted_peak, "bytes", "the most live bytes at once, on the rank with the most"),
        "sent_bytes": Quantity(_counted_sent, "bytes", "model states sent in the last step, by the rank with the most"),
        "sent_over_psi": Quantity(
            _counted_volume, "volume", "elements of model states sent in the last step, x N/(N-1), over Ψ"
        ),
        "block_activation_bytes": Quantity(
            lambda asked: Fraction(max(_counted_blocks(asked))), "bytes", "what forward keeps of one block"
        ),
        "activation_bytes": Quantity(
            lambda asked: Fraction(sum(_counted_blocks(asked))), "bytes", "what forward keeps of all blocks"
        ),
        "parameters": Quantity(_counted_parameters, "count", "parameters that the model declares, a tied table once"),
        "largest_model": Quantity(
            _counted_largest,
            "count",
            "most parameters whose counted states fit, x mp",
            needs=("memory",),
            takes=("mp",),
        ),
    }
)
