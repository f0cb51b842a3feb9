"""Compare the counted traffic of tensor, sequence and pipeline parallelism with the closed forms.

This traffic has the purpose `activations`. It crosses the boundaries of cut weights (axis tp) and of pipeline stages
(axis pp).
"""

from __future__ import annotations

from zerosim.analysis.shares import share_of
from zerosim.analysis.traffic import NOTHING, TrafficCheck, expect, sent_rows, traffic_of
from zerosim.analysis.weights import passes_of
from zerosim.config import RunConfig
from zerosim.train.result import RunResult

PURPOSE = "activations"


def check_exchanges(result: RunResult, step: int, stage: int = 0) -> list[TrafficCheck]:
    """Check the activations and their gradients that the ranks of a pipeline stage sent, by operation and axis.

    A receive sends nothing and has no row. An unexpected operation has a row.
    """
    share = share_of(result, stage)
    expected = expect(result, share, "exchanged", passes_of(result, step))
    sent = [(rank, row) for rank, row in sent_rows(result, step, share, PURPOSE) if row.op != "recv"]
    for _, row in sent:
        expected.setdefault((row.op, row.axis), NOTHING)
    return [
        traffic_of(
            result,
            share,
            [(rank, row) for rank, row in sent if (row.op, row.axis) == (op, axis)],
            op,
            axis,
            one,
            even=axis != "tp" or _divides(result.config),
        )
        for (op, axis), one in expected.items()
    ]


def _divides(config: RunConfig) -> bool:
    """Return whether tensor-parallel ranks add equal shares of everything they reduce."""
    numel = config.data.micro_batch * config.model.seq if config.model.has_blocks else config.model.vocab
    return numel % config.mesh.tp == 0
