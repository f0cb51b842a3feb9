"""The notes below the tables, in sentences: the meaning of the formulas' letters, and their numbers in this run.

Text only, no layout. A letter has a note if it occurs in the rows, with its number on each pipeline stage.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction

from zerosim.analysis import formulas
from zerosim.analysis.capabilities import CAPABILITIES, note_of
from zerosim.analysis.capabilities.experts import cut_words
from zerosim.analysis.check import Check
from zerosim.analysis.checks import Checks
from zerosim.analysis.cost import cost_of
from zerosim.analysis.facts import frozen_of, is_by_pairs, is_owned
from zerosim.analysis.formulas.letters import LETTERS
from zerosim.analysis.shares import extra_of
from zerosim.analysis.weights import exchanged, passes_of
from zerosim.config import RunConfig
from zerosim.config.presets.optimizers import OPTIMIZERS as PRESETS
from zerosim.placement.axes import what_for
from zerosim.placement.mesh import STATES
from zerosim.report.look import spread
from zerosim.report.words import by_stage, holds_part, of_rank
from zerosim.train.check_trained import num_trained
from zerosim.train.result import RunResult

_RANKS_OF = {axis: letter for capability in CAPABILITIES for axis, letter in capability.axes.items()}
"""The formulas' letters for the ranks along an axis; '' where a rank sends all of a volume."""


def states_note(found: Sequence[Checks]) -> str:
    """Return how to read the formula of the model states, and why ranks hold more than it says, or some more than
    others."""
    result, shares = found[0].of.result, [one.of.share for one in found]
    config, cost = result.config, cost_of(result)
    tp, optim, piece = config.mesh.tp, formulas.figure(cost.optim), note_of(config, "piece")
    replicated, copied, padding = zip(*(extra_of(result, share.stage) for share in shares), strict=True)
    has_padding = any(memory.marks["end_of_backward"].padding for memory in result.memory)
    block = PRESETS[config.optim.optimizer].block
    said = {
        f"{cost.param} + {cost.grad} + {optim} bytes per parameter (param + grad + optim); "
        f"Ψ = {result.num_parameters:,}{_trained(result)}, N = {config.mesh.shards:,}.": True,
        f"Of Ψ each rank holds Ψ_r = {by_stage([share.num_parameters for share in shares])}.": holds_part(found),
        **dict.fromkeys(cut_words(found[0].of.held), True),
        f"Of Ψ_r, {by_stage(replicated)} are whole on all {tp} ranks of tp.": any(replicated),
        f"{by_stage(copied)} are keys and values that several ranks hold.": any(copied),
        f"Padding for tp, over its ranks: {by_stage(padding)}.": any(padding),
        "The token table is on the first and on the last stage.": any(share.ends for share in shares),
        f"N ranks hold one of H = {config.mesh.dp_replicate:,} replicas together.": config.mesh.dp_replicate > 1,
        "Each rank with a part of a matrix keeps the averages of all its rows and columns: the bytes include such "
        f"copies, {optim} does not.": bool(exchanged(result)) and config.mesh.shards > 1,
        f"Whole {piece}s belong to ranks: the formula holds for the mean.": is_owned(config),
        f"Every tensor begins at a block of {block} elements, and slices end at one: the mean without the padding "
        "between them is compared.": has_padding and block > 1,
        f"N does not divide every {piece}, so slices are padded: the mean without padding is compared.": has_padding
        and block == 1,
    }
    return " ".join([*(text for text, holds in said.items() if holds), *_buffers(found)])


def _buffers(found: Sequence[Checks]) -> list[str]:
    """Return the reduction buffers that live from start to end, with the formula's mark."""
    checks = [one.buffers for one in found]
    if not any(any(check.counted) for check in checks):
        return []
    mark, text = "✓" if all(check.agrees for check in checks) else "≠", of_rank(found)(checks[0].text)
    return [
        f"Each rank also has reduction buffers: {by_stage([check.counted[0] for check in checks])} B, {text} {mark}."
    ]


def _trained(result: RunResult) -> str:
    return f", Ψ_t = {num_trained(result.layout):,} of them trained" if frozen_of(result.config) is not None else ""


def traffic_note(found: Sequence[Checks], checks: Sequence[Check]) -> str:
    """Return which part of a volume a rank sends, and the meaning of the letters of these volumes."""
    config, axes = found[0].of.result.config, {axis_of(check) for check in checks if check.axis}
    axes |= {"edp"} if "dp_shard" in axes and "N_e" in found[0].of.held else set()
    volume = f" of {total} elements" if len(axes) == 1 and (total := checks[-1].text) else ""
    said = [f"Of a volume{of_rank(found)(volume)} a rank sends {_parts_sent(config, axes)}"]
    if is_by_pairs(config) and config.parallel.zero_stage == 0:
        ranks = config.mesh.shards
        said.append(f"by all pairs an all-reduce moves NΨ = {ranks}Ψ, where direct and ring move 2Ψ")
    letters = {letter for check in checks if check.form is not None for letter in check.form.symbols}
    for letter in [letter for letter in LETTERS if letter in letters - {"Ψ", "N", "t", "Ψ_e", "N_e"}]:
        said.append(f"{letter} = {by_stage([one.of.held[letter] for one in found])}, {LETTERS[letter].meaning}")
    if "C" in letters:
        said.append(f"{config.mesh.tp // config.model.kv_heads} ranks hold a copy of each")
    if config.data.accumulate > 1 and config.parallel.zero_stage >= 2:
        gathers = " and gathers" if config.parallel.zero_stage == 3 else ""
        said.append(f"each of {config.data.accumulate} microbatches is reduced{gathers}")
    return "; ".join(said) + "."


def nodes_note(config: RunConfig) -> str:
    """Return which ranks' bytes leave a node, and by which way."""
    if config.mesh.axes.nodes == 1:
        return "Model states are divided within a node; across nodes replicas average their gradients."
    if is_owned(config):
        return "Owners receive more than they send, so nodes differ: the bytes are the mean over nodes."
    if config.world.algorithm in ("ring", "native"):
        return "A ring leaves a node once, however many ranks are in it: (N-1)/N of a volume. NCCL's rings do the same."
    return (
        "Every rank sends each other one its part: d (n-1)/n of a volume leave a node. On a ring like NCCL's it is "
        "(N-1)/N; see --collective ring."
    )


def axis_of(check: Check) -> str:
    """Return the axis of a check; of model states dp_shard, whichever of the axes that cut them have several ranks."""
    return "dp_shard" if check.key.subject == "sent" and what_for(check.axis) == "states" else check.axis


def sent_of_volume(axes: Collection[str]) -> str:
    """Return '×(N-1)/N', the one factor between volumes and a rank's sent bytes; '' if axes have several, or none."""
    letters = [letter for axis in axes if (letter := _RANKS_OF.get(axis))]
    return f"×({letters[0]}-1)/{letters[0]}" if len(axes) == len(letters) == 1 else ""


def _parts_sent(config: RunConfig, axes: Collection[str]) -> str:
    """Return '(N-1)/N = 3/4 on dp_shard, (t-1)/t = 1/2 on tp, all on pp'; one axis goes without its name."""
    parts = {}
    for axis in filter(axes.__contains__, _RANKS_OF):
        is_states, letter = axis == "dp_shard", _RANKS_OF[axis]
        size = config.mesh.axes.size(*STATES if is_states else axis.split("+"))
        name = "model states" if is_states and config.mesh.cp > 1 else axis
        parts[name] = f"({letter}-1)/{letter} = {Fraction(size - 1, size)}" if letter else "all"
    return ", ".join(part if len(axes) == 1 else f"{part} on {axis}" for axis, part in parts.items())


def control(result: RunResult, sent: Sequence[int]) -> str:
    """Return each rank's bytes for norms and overflow flags."""
    if any(sent):
        return f"Control traffic (norm and overflow flags): {spread(sent)} B per rank."
    why = "there is one rank" if result.config.mesh.ranks == 1 else "every rank has all gradients"
    if result.steps and result.steps[-1].grad_norm is None:
        why = "no norm is computed"
    return f"Control traffic: none, for {why}."


def curvature_note(result: RunResult, step: int) -> str | None:
    """Return the traffic in this step that most steps do not have."""
    if passes_of(result, step) == 1:
        return None
    every = PRESETS[result.config.optim.optimizer].estimates_every
    what = f"Every {every}th step" if every else "Such a step"  # of a custom optimizer nothing is known here
    return (
        f"{what} is followed by a second forward and backward, on labels that the model draws; they are counted here."
    )
