"""Values for the letters of every run: numbers of its configuration, and of the weights that the ranks of a pipeline
stage hold.

They come from the layout alone; this module reads no count of a run. Other letters are a capability's
(`capabilities/`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import cast

from zerosim.analysis import formulas
from zerosim.analysis.facts import experts_in
from zerosim.analysis.formulas import Form
from zerosim.analysis.formulas.letters import COUNTS
from zerosim.analysis.recompute import blocks_again, differ, is_wrapped
from zerosim.analysis.shares import Placed, Share, itemsizes, shared_grads, trained_itemsize
from zerosim.analysis.zero_gathers import freed_of, kept_for_next, runs_again
from zerosim.config import RunConfig
from zerosim.config.parts.parallel import is_sliced
from zerosim.config.parts.tuning import stored_fp32
from zerosim.dtypes import compute_dtype, dtype
from zerosim.placement.mesh import BLOCK, CUTS, SHARES
from zerosim.placement.spec import is_block
from zerosim.train.result import RunResult


def shown(form: Form, held: Mapping[str, int]) -> Form:
    """Return the elements of a form in printed letters: without zero terms, and with counts as numbers."""
    return form.elements.where({x: value for x, value in held.items() if value == 0 or x in COUNTS})


def passes_of(result: RunResult, step: int) -> int:
    """Return how often forward and backward ran in a step: twice in a step with an estimate of curvature. A failed run
    has no report of its last step."""
    return 2 if (report := result.report(step)) is not None and report.estimated else 1


def exchanged(placed: Placed, stage: int = 0, among: Collection[str] | None = None) -> list[int]:
    """Return the numbers in each all-reduce of an optimizer's sums, over the sliced flat buffers of a pipeline stage,
    or `among` those alone."""
    config, flats = placed.config, placed.layout.flats
    if not is_sliced(config.parallel):
        return []
    names = filter(placed.layout.is_trained, placed.layout.stages[stage] if among is None else among)
    shapes = [[weight.shape for weight in flats[name].weights] for name in names]
    return [numel for of_flat in shapes for numel in formulas.exchanged(config.optim.optimizer, of_flat)]


def sizes(config: RunConfig) -> dict[str, int]:
    """Return the letters that the configuration gives."""
    model, own, mesh = config.model, config.model.seq // config.mesh.cp, config.mesh.axes
    tokens, on_node = config.data.micro_batch * own, states_of_node(config)
    of_blocks = {"h": model.hidden, "f": model.ffn, "a": model.heads} if model.has_blocks else {}
    return {
        **of_blocks,
        "s": own,
        "b": config.data.micro_batch,
        "bs": tokens,
        "bsh": tokens * (model.hidden if model.has_blocks else model.vocab),
        "V": model.vocab,
        "m": config.data.accumulate,
        "t": config.mesh.tp,
        "p": config.mesh.pp,
        "v": config.chunks.each,
        "N": mesh.shards,
        "d": on_node,
        "n": mesh.shards // on_node,
        **dict(zip("wg", itemsizes(config), strict=True)),
        "c": compute_dtype(dtype(config.precision.stored)).itemsize,
    }


def states_of_node(config: RunConfig) -> int:
    """Return how many ranks of one node divide model states: neighbours along dp_shard, and those that share rows."""
    mesh, ranks = config.mesh.axes, config.mesh.ranks_per_node
    return max(1, ranks // mesh.tp) if 0 < ranks < mesh.size(*BLOCK) else mesh.node * mesh.size(*SHARES)


def place_of(config: RunConfig, share: Share) -> dict[str, int]:
    """Return the pipeline stage's place, and its number of blocks."""
    return {
        "i": share.stage,
        "first": int(share.stage == 0),
        "last": int(share.stage == config.chunks.last_stage),
        "start": int(share.stage == 0),
        "end": int(share.stage == config.mesh.pp - 1),
        "l": share.layers,
        "r": sum(is_wrapped(config, unit) for unit in share.units),
        "r_e": sum(is_wrapped(config, unit) and has_experts(config, unit) for unit in share.units),
        "l_e": sum(is_block(unit) and has_experts(config, unit) for unit in share.units),
        **(_unlike(config, share) if differ(config) else {}),
    }


def _unlike(config: RunConfig, share: Share) -> dict[str, int]:
    """Return how many of the pipeline stage's blocks recompute parts with exchanges, where blocks differ."""
    of = {"k_f": "fc1", "k_g": "attn_proj", "k_u": "mla_up", "k_a": "core_attn"}
    blocks = list(filter(is_block, share.units))
    dense = [unit for unit in blocks if not has_experts(config, unit) or experts_in(config) == "beside"]
    return {letter: blocks_again(config, of[letter], dense if letter == "k_f" else blocks) for letter in of}


def has_experts(config: RunConfig, unit: str) -> bool:
    """Return whether a block of this name has experts."""
    return config.model.has_experts and config.model.block_of(unit).mlp.experts is not None


def of_weights(
    placed: Placed, share: Share, *, padded: bool, instead: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the letters of the pipeline stage's weights, in elements; or, `instead` of elements, in another number of
    each buffer."""
    config, flats = placed.config, placed.layout.flats
    freed, some = freed_of(placed, share), [name for name, numel in share.numels.items() if numel]
    stored = [name for name in some if flats[name].weights[0].format]
    codes = {name: share.whole[name] if padded else flats[name].numel for name in stored}
    held = sum(share.numels[name] for name in stored)
    numels = dict(instead) if instead else numels_of(placed, share, padded=padded)
    trained = [name for name in share.numels if placed.layout.is_trained(name)]
    sharers = shared_grads((flats[name] for name in trained), placed.layout.mesh)
    of_all = sharers.pop(placed.layout.mesh.size(*CUTS), 0)
    return {
        "Ψ": sum(numel for name, numel in numels.items() if name not in codes) + held,
        "Ψ_q": held,
        "Q": sum(codes.values()),
        "Q_s": sum(flats[name].scale_bytes for name in stored),
        "Ψ_t": sum(numels[name] for name in trained),
        "VD": sum(numels[name] for name in share.tied if name in freed),
        "U": kept_for_next(placed, share, numels),
        "R": sum(numels[name] for name in freed if not is_block(flats[name].unit)),
        "P": sum(numels[name] for name in share.numels if name not in freed),
        "M": sum(numels[name] for name in share.numels if name in freed and runs_again(config, flats[name])),
        "S": of_all,
        "C": sum(sharers.values()),
        "E": sum(numels[name] for name in share.ends if name in trained),
        "F": sum(exchanged(placed, share.stage, some)),
    }


def numels_of(placed: Placed, share: Share, *, padded: bool) -> dict[str, int]:
    """Return the elements of each flat buffer; of one that is stored as codes, or of fp32 norms, the number of
    parameters with as many bytes, a Fraction if that is no whole number."""
    flats, numels = placed.layout.flats, dict(share.whole if padded else share.numels)
    for name in filter(numels.get, share.numels):
        if flats[name].weights[0].format:
            codes = share.whole[name] if padded else flats[name].numel
            numels[name] = cast(int, Fraction(codes, itemsizes(placed.config)[0]))
        elif stored_fp32(placed.config.tuning, flats[name].weights):
            numels[name] = cast(int, Fraction(4 * numels[name], itemsizes(placed.config)[0]))
    return numels


def gathered_numels(placed: Placed, share: Share, *, padded: bool) -> dict[str, int]:
    """Return the same as they are gathered: of wider trained buffers the number of other parameters with as many
    bytes."""
    wide = Fraction(trained_itemsize(placed.config), itemsizes(placed.config)[0])
    return {
        name: cast(int, wide * numel) if wide != 1 and placed.layout.is_trained(name) else numel
        for name, numel in numels_of(placed, share, padded=padded).items()
    }
