"""Traffic that leaves a node in a step: the counted bytes that go to ranks on other nodes, and their forms.

A node is `--ranks-per-node` neighbouring ranks. The receivers of each call follow from its verb and algorithm: on a
ring the next member alone, else every member equally. Only the traffic of model states counts, not
the messages between pipeline stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from zerosim.analysis import forms, formulas
from zerosim.analysis.capability import Key
from zerosim.analysis.check import Check, Compared
from zerosim.analysis.formulas import Form
from zerosim.analysis.formulas.form import symbol
from zerosim.analysis.traffic import AXES
from zerosim.analysis.weights import exchanged, states_of_node
from zerosim.config import RunConfig
from zerosim.config.parts.parallel import is_sliced
from zerosim.ledger.traffic import TrafficRow
from zerosim.placement.axes import what_for
from zerosim.placement.mesh import BLOCK, MODEL, Mesh
from zerosim.verbs import find_verb


def has_nodes(config: RunConfig) -> bool:
    """Return whether the configuration says which ranks share a node."""
    return config.mesh.ranks_per_node > 0 or config.mesh.axes.node > 1


def node_size(config: RunConfig) -> int:
    """Return the ranks per node, ranks of tp and cp included."""
    return config.mesh.ranks_per_node or config.mesh.axes.node * config.mesh.axes.size(*BLOCK)


def node_forms(config: RunConfig, sent: Mapping[Key, Form]) -> dict[tuple[str, str], Form]:
    """Return the forms of bytes that leave a node in a step, by operation and the group's purpose, from those that are
    `sent`."""
    found, mesh, nodes = {}, config.mesh.axes, config.mesh.shards // states_of_node(config)
    rings, each = _on_ring(config), symbol("t") if mesh.tp > 1 else 1
    if node_size(config) < mesh.tp:  # a node has some of tp's ranks
        each = node_size(config)
    for (name, use), form in forms.of(sent, "sent").items():
        if use == "replicas" or (use == "nodes" and nodes > 1):
            found[name, use] = each * symbol("d") * form
        elif use == "states" and nodes > 1:
            is_ring = rings and not find_verb(name).pairwise
            found[name, use] = each * formulas.leaves_a_node(form, ring_of_all=is_ring)
    return found


def check_nodes(of: Compared) -> list[Check]:
    """Check the bytes that leave a node of a pipeline stage in a step, the mean over nodes, by operation, then all;
    nothing if nodes are unknown.

    On a ring the form is the number for even slices only: else the bytes over one link depend on the places of owners,
    or of unequal shares. It is not where experts' states are cut over other ranks, which lie otherwise in nodes."""
    config = of.result.config
    if not has_nodes(config):
        return []
    counted, expected = _counted(of), node_forms(config, of.forms)
    is_exact = (not _on_ring(config) or _is_even(of)) and "N_e" not in of.held
    checks, due = [], Fraction(0)
    for op, use in dict.fromkeys((*expected, *counted)):
        form = expected.get((op, use), Form())
        sent, formula = counted.get((op, use), Fraction(0)), form.at(of.held)
        if sent or formula:
            key, padded = Key("nodes", op, config.mesh.axes.name(*AXES.get(use, (use,)))), form.at(of.padded)
            checks.append(Check(key, (sent,), of.shown(form), formula, (padded,) if is_exact else ()))
            due += padded
    whole = Check(
        Key("nodes", "total"),
        (Fraction(sum(check.mean for check in checks)),),
        formulas.total(check.form for check in checks if check.form is not None),
        Fraction(sum(check.formula or 0 for check in checks)),
        (due,) if is_exact else (),
    )
    return [*checks, whole]


def _is_even(of: Compared) -> bool:
    """Return whether all ranks of a pipeline stage send as much in each call."""
    result, share = of.result, of.share
    ranks, replicas = result.config.mesh.shards, result.config.mesh.dp_replicate
    sums = exchanged(result, share.stage)
    shards = [numel // ranks for numel in share.whole.values()]
    is_uneven = any(numel % ranks for numel in sums) or any(numel % replicas for numel in shards)
    return is_sliced(result.config.parallel) and not is_uneven


def _counted(of: Compared) -> dict[tuple[str, str], Fraction]:
    """Return the bytes that leave a node: the mean over nodes, because owners send less than others; on a ring those of
    the first node."""
    found: dict[tuple[str, str], Fraction] = {}
    result, config, share = of.result, of.result.config, of.share
    shares, size = dict[tuple[str, str, int], Fraction](), node_size(config)
    ranks = share.ranks[:size] if _on_ring(config) else share.ranks
    for rank in ranks:
        for row in result.traffic[result.stands_for[rank]]:
            if row.step != of.step or row.saves:
                continue
            if row.purpose == "states" and what_for(row.axis) not in MODEL:
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
