"""Traffic that leaves a node in a step: the counted bytes that go to ranks on other nodes, and their forms.

A node is `--ranks-per-node` neighbouring ranks. The receivers of each call follow from its verb and algorithm: on a
ring the next member alone, else every member equally. Only the traffic of model states counts, not
the messages between pipeline stages.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from zerosim.analysis import forms, formulas
from zerosim.analysis.capability import Step
from zerosim.analysis.facts import is_sliced
from zerosim.analysis.formulas import Form
from zerosim.analysis.formulas.form import symbol
from zerosim.analysis.letters import letters_of
from zerosim.analysis.shares import Share, share_of
from zerosim.analysis.traffic import AXES
from zerosim.analysis.weights import exchanged, passes_of, shown
from zerosim.config import RunConfig
from zerosim.ledger.traffic import TrafficRow
from zerosim.placement.mesh import Mesh, what_for
from zerosim.train.result import RunResult
from zerosim.verbs import find_verb


class NodeCheck(NamedTuple):
    """Bytes of one operation that leave a node in a step, beside its form; the mean over nodes.

    `is_exact`: the form is the number. On a ring that is so for even slices only: else the bytes over one link depend
    on the places of owners, or of unequal shares."""

    op: str
    axis: str
    counted: Fraction
    formula: Fraction
    with_padding: Fraction
    form: Form
    is_exact: bool = True

    @property
    def text(self) -> str:
        return str(self.form)

    @property
    def agrees(self) -> bool | None:
        return self.counted == self.with_padding if self.is_exact else None


def has_nodes(config: RunConfig) -> bool:
    """Return whether the configuration says which ranks share a node."""
    return config.mesh.ranks_per_node > 0 or config.mesh.secondary_shard > 0


def node_size(config: RunConfig) -> int:
    """Return the ranks per node, ranks of tp included."""
    return config.mesh.ranks_per_node or config.mesh.secondary_shard * config.mesh.tp


def node_forms(config: RunConfig, passes: int = 1, step: int = 0) -> dict[tuple[str, str], Form]:
    """Return the forms of bytes that leave a node in a step, by operation and the group's purpose."""
    found, mesh = {}, config.mesh.axes
    rings, each = _on_ring(config), symbol("t") if mesh.tp > 1 else 1
    if node_size(config) < mesh.tp:  # a node has some of tp's ranks
        each = node_size(config)
    for (name, use), form in forms.of(forms.forms(config, step=Step(passes, step)), "sent").items():
        if use == "replicas" or (use == "nodes" and mesh.nodes > 1):
            found[name, use] = each * symbol("d") * form
        elif use == "states" and mesh.nodes > 1:
            is_ring = rings and not find_verb(name).pairwise
            found[name, use] = each * formulas.leaves_a_node(form, ring_of_all=is_ring)
    return found


def check_nodes(result: RunResult, step: int, stage: int = 0) -> list[NodeCheck]:
    """Check the bytes that leave a node of a pipeline stage in a step, by operation, then all; nothing if nodes are
    unknown."""
    config, share = result.config, share_of(result, stage)
    if not has_nodes(config):
        return []
    held, padded = (letters_of(result, stage, padded=padded, step=step) for padded in (False, True))
    counted = _counted(result, step, share)
    expected = node_forms(config, passes_of(result, step), step)
    is_exact = not _on_ring(config) or _is_even(result, share)
    checks = []
    for op, use in dict.fromkeys((*expected, *counted)):
        form = expected.get((op, use), Form())
        sent, formula = counted.get((op, use), Fraction(0)), form.at(held)
        if sent or formula:
            axis = config.mesh.axes.name(*AXES.get(use, (use,)))
            checks.append(NodeCheck(op, axis, sent, formula, form.at(padded), shown(form, held), is_exact))
    whole = NodeCheck(
        "total",
        "",
        sum((check.counted for check in checks), Fraction(0)),
        sum((check.formula for check in checks), Fraction(0)),
        sum((check.with_padding for check in checks), Fraction(0)),
        formulas.total(check.form for check in checks),
        is_exact,
    )
    return [*checks, whole]


def _is_even(result: RunResult, share: Share) -> bool:
    """Return whether all ranks of a pipeline stage send as much in each call."""
    ranks, replicas = result.config.mesh.shards, result.config.mesh.dp_replicate
    sums = exchanged(result, share.stage)
    shards = [numel // ranks for numel in share.whole.values()]
    is_uneven = any(numel % ranks for numel in sums) or any(numel % replicas for numel in shards)
    return is_sliced(result.config) and not is_uneven


def _counted(result: RunResult, step: int, share: Share) -> dict[tuple[str, str], Fraction]:
    """Return the bytes that leave a node: the mean over nodes, because owners send less than others; on a ring those of
    the first node."""
    found: dict[tuple[str, str], Fraction] = {}
    config, shares, size = result.config, dict[tuple[str, str, int], Fraction](), node_size(result.config)
    ranks = share.ranks[:size] if _on_ring(config) else share.ranks
    for rank in ranks:
        for row in result.traffic[result.stands_for[rank]]:
            if row.step == step and row.purpose == "states" and what_for(row.axis) not in ("tp", "pp"):
                key, at = (row.op, what_for(row.axis)), rank if _on_ring(config) else ranks[0]  # all send as far
                if (row.op, row.axis, at) not in shares:
                    shares[row.op, row.axis, at] = share_away(row, at, result.layout.mesh, config)
                found[key] = found.get(key, Fraction(0)) + row.wire_bytes * shares[row.op, row.axis, at]
    return {key: nbytes * size / len(ranks) for key, nbytes in found.items()}


def _on_ring(config: RunConfig) -> bool:
    return config.world.algorithm in ("ring", "native")


def share_away(row: TrafficRow, rank: int, mesh: Mesh, config: RunConfig) -> Fraction:
    """Return the share of a rank's bytes in such a call that goes to ranks on other nodes."""
    group, size = mesh.group(rank, *row.axis.split("+")), node_size(config)
    if len(group) == 1:
        return Fraction(0)
    if _on_ring(config) and not find_verb(row.op).pairwise:
        following = group[(group.index(rank) + 1) % len(group)]
        return Fraction(following // size != rank // size)
    return Fraction(sum(other // size != rank // size for other in group), len(group) - 1)
