"""Which links carry the rows of experts in a step."""

from __future__ import annotations

from zerosim.config.presets.cluster import Cluster
from zerosim.ledger.costs import topology
from zerosim.ledger.experts import bytes_by_link, shares_of
from zerosim.train.result import RunResult
from zerosim.units import format_bytes


def expert_links(result: RunResult, cluster: Cluster) -> str:
    """Return the bytes that a GPU sends over its node's links and over the network, in the step's last rank's group; ''
    without expert parallelism."""
    mesh, time = result.layout.mesh, result.time
    if mesh.ep == 1 or time is None or result.config.experts.dispatcher == "allgather":
        return ""
    place = topology(mesh.group(time.rank, "ep"), cluster)
    rows = result.traffic[result.stands_for[time.rank]]
    last = max(row.step for row in rows)
    payload = sum(
        row.payload_bytes
        for row in rows
        if (row.step, row.op, row.axis, row.purpose) == (last, "all_to_all", "ep", "activations")
    )
    sent = bytes_by_link(payload, place, shares_of(result.config, place))
    inside, across = (format_bytes(round(nbytes)) for nbytes in sent)
    return f" Rows of experts: a GPU sends {inside} over its node's links and {across} over the network."
