"""LoRA and frozen weights: of Psi parameters Psi_t are trained, and alone reduced and published."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from zerosim.analysis import formulas
from zerosim.analysis.capabilities.hybrid import averages
from zerosim.analysis.capabilities.zero import fetched
from zerosim.analysis.capability import Asked, Capability, Sent, Step, when
from zerosim.analysis.facts import frozen_of, reduce_times
from zerosim.analysis.reach import gathered_again, reach_of, roles_in, run_again
from zerosim.analysis.recompute import is_wrapped
from zerosim.analysis.shares import itemsizes, trained_itemsize
from zerosim.analysis.weights import gathered_numels, has_experts
from zerosim.analysis.zero_gathers import freed_of, kept_for_next, runs_again, schedule_of
from zerosim.config import RunConfig
from zerosim.placement.spec import FlatSpec, is_block


def _sent(config: RunConfig, step: Step, sent: Sent) -> Sent:
    if (frozen := frozen_of(config)) is None:
        return sent
    grads, params = (
        {operation: form.where(Ψ=formulas.TRAINED) for operation, form in forms.items()}
        for forms in (sent.grads, sent.params)
    )
    wide = Fraction(trained_itemsize(config), itemsizes(config)[0])
    if config.parallel.zero_stage < 3:
        return Sent(grads, {operation: wide * form for operation, form in params.items()})
    schedule = schedule_of(config, step.passes)
    whole = frozen.whole_trained
    gathers = formulas.gathered_beside_frozen(schedule, quantized=frozen.quantized, wide=wide, whole=whole)
    if whole:
        reduced = formulas.reduced(averages(config, step) * reduce_times(config))
        grads = {("all_reduce", "states"): reduced.where(Ψ=formulas.TRAINED)}
    return Sent(grads, dict.fromkeys(params, gathers), fetched(config, gathers))


def letters(asked: Asked) -> dict[str, int]:
    """Return the letters of runs that train some of the model (`reach.py`).

    B: by unit, the flat buffers of each; by module, those of leaves that compute or pass on a gradient.
    """
    placed, share, config, layout = asked.placed, asked.share, asked.placed.config, asked.placed.layout
    if frozen_of(config) is None:
        return {}
    moved, freed = schedule_of(config), freed_of(placed, share)
    numels, reach = gathered_numels(placed, share, padded=asked.padded), reach_of(placed, share)
    again, stay, reached, last_kept = 0, set[str](), set[str](), moved.keep_last_unit
    for units in reach.units:
        for at, (unit, sends_back) in enumerate(units):
            stays = not moved.reshard_after_forward or (moved.keep_root_units and not is_block(unit))
            is_last = last_kept and unit == share.chunks[-1][-1] and at == len(units) - 1
            names = gathered_again(placed, unit, sends_back=sends_back)
            reached.update(names)
            if stays:
                stay.update(names)
            elif not is_last:
                again += sum(numels[name] for name in names if name in freed)
    stays = not moved.reshard_after_forward or moved.keep_root_units
    at_first = bool(share.tied) and any(units and units[0][0] == share.units[0] for units in reach.units)
    table = (
        0
        if moved.keep_root_units or (stays and at_first)
        else sum(numels[name] for name in share.tied if name in freed)
    )
    persistent = [name for name in share.numels if name not in freed]
    back = {unit: run_again(placed, unit, sends_back=flows) for units in reach.units for unit, flows in units}

    def is_read(flat: FlatSpec) -> bool:
        return flat.unit in back and (is_wrapped(config, flat.unit) or not back[flat.unit].isdisjoint(roles_in(flat)))

    modules = [name for name in freed - stay if runs_again(config, layout.flats[name]) and is_read(layout.flats[name])]
    of_reach = ("x", "x_e", "y", "y_e", "z", "y_q", "k_f", "k_g", "k_u", "k_a", "j")
    return {
        "M": sum(numels[name] for name in modules),
        "r": sum(is_wrapped(config, unit) for unit in back),
        "r_e": sum(is_wrapped(config, unit) and has_experts(config, unit) for unit in back),
        "B": again,
        "U": kept_for_next(placed, share, numels, reached),
        "VD": table,
        "P": sum(numels[name] for name in persistent),
        **{letter: getattr(reach, letter) for letter in of_reach},
    }


def has_adapters(config: RunConfig) -> bool:
    """Return whether adapters are trained."""
    return config.tuning.lora_rank > 0


def _premises(config: RunConfig) -> Iterator[str]:
    """Yield what a block saves otherwise than in 2205.05198's count."""
    if config.tuning.is_on:
        yield "frozen maps keep no inputs" + (", and adapters keep theirs" if config.tuning.lora_rank else "")


def _warned(config: RunConfig) -> list[str]:
    return when(
        config.tuning.freeze is not None and config.parallel.recipe == "fsdp1",
        "FSDP1 has one buffer for a unit's frozen and trained parameters: it reduces both, and some ranks then hold no "
        "optimizer states. Here a unit has a buffer of each",
    )


CAPABILITY = Capability(
    sent=_sent,
    letters=letters,
    measured=lambda config: config.tuning.freeze is None,
    notes={"premises": _premises, "warned": _warned},
)
