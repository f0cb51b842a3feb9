"""Values for the letters of a run's closed forms (`formulas/letters.py`): numbers of its configuration and layout.

The values describe the ranks of one pipeline stage. They come from the layout alone; this module reads no count of a
run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from fractions import Fraction
from itertools import pairwise
from typing import cast

from zerosim.analysis import forms, formulas, zeropp
from zerosim.analysis.formulas import Form
from zerosim.analysis.formulas.letters import COUNTS
from zerosim.analysis.reach import gathered_again, reach_of, roles_in, run_again
from zerosim.analysis.shares import Placed, Share, itemsizes, share_of, shared_grads
from zerosim.config import RunConfig
from zerosim.config.parts.reduction import CASTS
from zerosim.dtypes import compute_dtype, dtype
from zerosim.parallel.compression.dgc import ratio_at
from zerosim.parallel.pipeline import schedule_of
from zerosim.placement.spec import FlatSpec, is_block
from zerosim.train.result import RunResult


def letters_of(placed: Placed, stage: int = 0, *, padded: bool = False, step: int = 0) -> dict[str, int]:
    """Return values for the letters on the ranks of a pipeline stage, in elements with padding or without. `step`: its
    number, if the first steps send differently."""
    share = share_of(placed, stage)
    of_weights = _of_weights(placed, share, padded=padded)
    codes = _of_codes(placed, share, step) | _of_groups(placed, share, padded=padded)
    return sizes(placed.config) | _place(placed.config, share) | of_weights | codes


def _of_codes(placed: Placed, share: Share, step: int) -> dict[str, int]:
    """Return the bytes of gradients that a compression sends and stores in a step, padding included."""
    config, how, flats = placed.config, placed.config.reduction, placed.layout.flats
    if not how.is_encoded:
        return {}
    g, sent, kept = itemsizes(config)[1], 0, 0
    ratio = ratio_at(step, how.ratio, how.warmup) if how.compress == "dgc" else how.ratio
    for name in filter(placed.layout.is_trained, share.numels):
        numel, whole = share.whole[name], config.parallel.zero_stage == 0
        kept += g * formulas.kept_numel(how.compress, numel, config.mesh.shards)
        if how.compress == "powersgd":
            elements, of_q = formulas.powersgd_numel([w.shape for w in flats[name].weights], how.rank)
            elements += numel - sum(weight.numel for weight in flats[name].weights)  # gaps are averaged, too
            sent, kept = sent + g * elements, kept + g * of_q
        else:
            whole = whole and how.compress != "onebit-adam"
            ranks, block = config.mesh.shards, how.block
            sent += formulas.encoded_bytes(how.compress, numel, ranks, g, block=block, ratio=ratio, whole=whole)
    return {"Z": sent, "Y": kept}


def _of_groups(placed: Placed, share: Share, *, padded: bool) -> dict[str, int]:
    """Return the letters of ZeRO++'s codes: scales, and elements that are reduced exactly."""
    config, found = placed.config, dict[str, int]()
    ranks, node = config.mesh.shards, config.mesh.axes.node
    if config.gathering.quantized_weights:
        moved = zeropp.gathers_of(config)
        among = {"σ_f": (moved.forward, ranks), "σ_b": (moved.backward, node if config.mesh.secondary_shard else ranks)}
        stays = config.gathering.stays
        for letter, (form, members) in among.items():
            scales = {
                name: 0 if stays(share.numels[name]) else members * formulas.weight_scales(numel // members)
                for name, numel in share.whole.items()
            }
            found[letter] = int(form.at(sizes(config) | _of_weights(placed, share, padded=padded, instead=scales)))
    if config.reduction.quantized_gradients:
        flats = placed.layout.flats
        groups = {
            name: formulas.grad_scales([weight.shape for weight in flats[name].weights], numel, ranks)
            for name, numel in share.whole.items()
        }
        numels = share.whole if padded else share.numels
        found |= {"σ_g": sum(groups.values()), "O": sum(numels[name] for name, each in groups.items() if not each)}
    return found


def shown(form: Form, held: Mapping[str, int]) -> Form:
    """Return the elements of a form in printed letters: without zero terms, and with counts as numbers."""
    return form.elements.where({x: value for x, value in held.items() if value == 0 or x in COUNTS})


def passes_of(result: RunResult, step: int) -> int:
    """Return how often forward and backward ran in a step: twice in a step with an estimate of curvature. A failed run
    has no report of its last step."""
    return 2 if any(report.estimated for report in result.steps[step : step + 1]) else 1


def exchanged(placed: Placed, stage: int = 0) -> list[int]:
    """Return the numbers in each all-reduce of an optimizer's sums, over the sliced flat buffers of a pipeline
    stage."""
    config, flats = placed.config, placed.layout.flats
    if not forms.is_sliced(config):
        return []
    names = filter(placed.layout.is_trained, placed.layout.stages[stage])
    shapes = [[weight.shape for weight in flats[name].weights] for name in names]
    return [numel for of_flat in shapes for numel in formulas.exchanged(config.optim.optimizer, of_flat)]


def sizes(config: RunConfig) -> dict[str, int]:
    """Return the letters that the configuration gives."""
    model, tokens = config.model, config.data.micro_batch * config.model.seq
    of_blocks = {"h": model.hidden, "f": model.ffn, "a": model.heads} if model.has_blocks else {}
    return {
        **of_blocks,
        "s": model.seq,
        "b": config.data.micro_batch,
        "bs": tokens,
        "bsh": tokens * (model.hidden if model.has_blocks else model.vocab),
        "V": model.vocab,
        "m": config.data.accumulate,
        "t": config.mesh.tp,
        "p": config.mesh.pp,
        "v": config.parallel.num_chunks,
        "N": config.mesh.shards,
        "d": config.mesh.axes.node,
        "n": config.mesh.axes.nodes,
        **dict(zip("wg", itemsizes(config), strict=True)),
        **({"q": dtype(sent).itemsize} if (sent := config.reduction.compress) in CASTS else {}),
        "c": compute_dtype(dtype(config.precision.stored)).itemsize,
    }


def _place(config: RunConfig, share: Share) -> dict[str, int]:
    """Return the pipeline stage's place, and its number of blocks."""
    return {
        "i": share.stage,
        "first": int(share.stage == 0),
        "last": int(share.stage == config.chunks.last_stage),
        "start": int(share.stage == 0),
        "end": int(share.stage == config.mesh.pp - 1),
        "l": share.layers,
        "r": sum(_is_wrapped(config, unit) for unit in share.units),
        **_second(config, share.units),
    }


def _second(config: RunConfig, units: Sequence[str]) -> dict[str, int]:
    """Return the letters of a decoder beside an encoder."""
    model = config.model
    if not model.is_second:
        return {}
    own = [unit for unit in units if is_block(unit) and model.block_of(unit).cross is not None]
    tokens = config.data.micro_batch * model.decoder_tokens
    wrapped = sum(_is_wrapped(config, unit) for unit in own)
    return {"l_d": len(own), "r_d": wrapped, "bs_d": tokens, "bsh_d": tokens * model.hidden}


def _of_weights(
    placed: Placed, share: Share, *, padded: bool, instead: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the letters of the pipeline stage's weights, in elements; or, `instead` of elements, in another number of
    each buffer.

    U is the last unit or, in a pipeline, the gathers saved in a step by units that stay gathered for the next use.
    """
    config, gathering, flats = placed.config, placed.config.gathering, placed.layout.flats
    freed = {name for name, numel in share.numels.items() if not gathering.stays(numel)}
    stored = [name for name in share.numels if flats[name].weights[0].stored]
    codes = {name: share.whole[name] if padded else flats[name].numel for name in stored}
    held = sum(share.numels[name] for name in stored)
    numels: dict[str, int] = dict(instead or (share.whole if padded else share.numels))
    for name in stored:
        # The number of parameters with as many bytes; a Fraction if that is no whole number.
        numels[name] = cast(int, Fraction(codes[name], itemsizes(config)[0]))

    def total(names: Iterable[str]) -> int:
        return sum(numels[name] for name in names if name in freed)

    def of_unit(unit: str) -> list[str]:
        """Return the buffers of a unit's last gather: with --gather module, those of its last leaf."""
        names = [name for name in share.numels if flats[name].unit == unit]
        return [name for name in names if flats[name].module == flats[names[-1]].module]

    last = _used_twice(config, share, placed) if config.mesh.pp > 1 else [share.chunks[-1][-1]]
    last = [unit for unit in last if is_block(unit) or not gathering.keep_root_units]
    if config.tuning.is_on:  # buffers that backward does not reach are freed
        back = {unit for units in reach_of(placed, share).units for unit, _ in units}
        last = [unit for unit in last if unit in back]
    trained = [name for name in share.numels if placed.layout.is_trained(name)]
    sharers = shared_grads((flats[name] for name in trained), config.mesh.tp)
    of_all = sharers.pop(config.mesh.tp, 0)
    frozen = {} if not config.tuning.is_on else _of_frozen(placed, share, freed, last, numels)
    return {
        "Ψ": sum(numel for name, numel in numels.items() if name not in codes) + held,
        "Ψ_q": held,
        "Q": sum(codes.values()),
        "Ψ_t": sum(numels[name] for name in trained),
        "VD": total(share.tied),
        "U": sum(times * total(of_unit(unit)) for unit, times in Counter(last).items()),
        "R": total(name for name in freed if not is_block(flats[name].unit)),
        "P": sum(numels[name] for name in share.numels if name not in freed),
        "M": total(name for name in share.numels if runs_again(config, flats[name])),
        "S": of_all,
        "C": sum(sharers.values()),
        "E": sum(numels[name] for name in share.ends if name in trained),
        "F": sum(exchanged(placed, share.stage)),
        **frozen,
    }


def _of_frozen(
    placed: Placed, share: Share, freed: Set[str], last: Sequence[str], numels: Mapping[str, int]
) -> dict[str, int]:
    """Return the letters of runs that train some of the model (`reach.py`).

    B: by unit, the flat buffers of each; by module, those of leaves that compute or pass on a gradient.
    """
    config, layout, gathering = placed.config, placed.layout, placed.config.gathering
    reach = reach_of(placed, share)
    again, stay, last_kept = 0, set[str](), gathering.keep_last_unit and config.mesh.pp == 1
    for units in reach.units:
        for at, (unit, sends_back) in enumerate(units):
            stays = not gathering.reshard_after_forward or (gathering.keep_root_units and not is_block(unit))
            is_last = last_kept and unit == share.chunks[-1][-1] and at == len(units) - 1
            names = gathered_again(placed, unit, sends_back=sends_back)
            if stays:
                stay.update(names)
            elif not is_last:
                again += sum(numels[name] for name in names if name in freed)
    stays = not gathering.reshard_after_forward or gathering.keep_root_units
    at_first = bool(share.tied) and any(units and units[0][0] == share.units[0] for units in reach.units)
    table = 0 if stays and at_first else sum(numels[name] for name in share.tied if name in freed)
    persistent = [name for name in share.numels if name not in freed]
    back = {unit: run_again(placed, unit, sends_back=flows) for units in reach.units for unit, flows in units}

    def is_read(flat: FlatSpec) -> bool:
        return flat.unit in back and (_is_wrapped(config, flat.unit) or not back[flat.unit].isdisjoint(roles_in(flat)))

    modules = [name for name in freed - stay if runs_again(config, layout.flats[name]) and is_read(layout.flats[name])]
    return {
        "M": sum(numels[name] for name in modules),
        "r": sum(_is_wrapped(config, unit) for unit in back),
        "B": again,
        "VD": table,
        "P_t": sum(numels[name] for name in persistent if layout.is_trained(name)),
        **{letter: getattr(reach, letter) for letter in ("x", "y", "z", "y_q", "k_f", "k_g", "j")},
    }


def runs_again(config: RunConfig, flat: FlatSpec) -> bool:
    """Return whether backward recomputes the forward of a flat buffer's leaf module."""
    if config.gathering.gather == "unit":
        return False
    parts = {weight.role.part for weight in flat.weights if weight.role is not None}
    return _is_wrapped(config, flat.unit) or not parts.isdisjoint(config.memory.again.parts)


def _is_wrapped(config: RunConfig, unit: str) -> bool:
    """Return whether backward recomputes this whole unit."""
    return config.model.has_blocks and is_block(unit) and config.memory.again.wraps(int(unit.rpartition(".")[2]))


def live_micro_batches(config: RunConfig) -> Form:
    """Return the live microbatches of the configuration's schedule, with its group size if that is not p."""
    together = config.micro_batch_group
    return formulas.live_micro_batches(config.parallel.pipeline_schedule, 0 if together == config.mesh.pp else together)


def _used_twice(config: RunConfig, share: Share, placed: Placed) -> list[str]:
    """Return the unit of each forward whose last unit is used again next, by the pipeline stage's schedule."""
    chunks = config.chunks
    actions = schedule_of(config.parallel)(chunks.stages, share.stage, config.data.accumulate, chunks.each)
    actions = [action for action in actions if share.chunks[action.chunk]]  # the others use none
    by_module, flats, found = config.gathering.by_module, placed.layout.flats, []
    modules = [{flats[name].module for name in share.numels if flats[name].unit in units} for units in share.chunks]
    for action, following in pairwise(actions):
        units = share.chunks[action.chunk]
        turns = following.sends < 0 or len(modules[action.chunk]) == 1  # or the next forward begins where it ended
        if by_module and _is_wrapped(config, units[-1]):
            continue  # its second forward comes first
        if action.sends > 0 and following.gathers and following.chunk == action.chunk and turns:
            found.append(units[-1])
    return found
