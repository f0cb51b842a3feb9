"""Blocks that predict further tokens: the table and the head once more for each, and the map before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zerosim.analysis import formulas
from zerosim.analysis.capabilities.pipeline import schedule_name
from zerosim.analysis.capabilities.tensor import all_reduces, divides_rows, keeps_gathered, repeats_rows
from zerosim.analysis.capabilities.zero import fetched, gathers_again
from zerosim.analysis.capability import Asked, Capability, Forms, Key, Sent, Step
from zerosim.analysis.facts import operations
from zerosim.analysis.formulas import Form
from zerosim.analysis.recompute import is_wrapped
from zerosim.analysis.shares import units_of
from zerosim.analysis.zero_gathers import freed_of, schedule_of
from zerosim.config import RunConfig
from zerosim.config.parts.mtp import is_further
from zerosim.functional.liger_loss import LIGER
from zerosim.units import counted


def _sent(config: RunConfig, step: Step, sent: Sent) -> Sent:
    if not config.mtp.layers or not gathers_again(config):
        return sent
    times, key = schedule_of(config, step.passes).micro_batches, (operations(config)[1], "states")
    more = formulas.further_gathers(times)
    params = {**sent.params, key: sent.params[key] + more}
    return sent._replace(params=params, fetched=sent.fetched + fetched(config, more))


def _forms(config: RunConfig, step: Step, sent: Sent) -> Forms:
    if not config.mtp.layers:
        return
    times, of = all_reduces(config), dict[str, Form]()
    if divides_rows(config):
        again, kept = config.memory.loss not in LIGER, keeps_gathered(config)
        of = formulas.further_sequence_parallel(all_reduce=times, keep_gathered=kept, head_again=again)
    elif repeats_rows(config):
        of = formulas.further_tensor_parallel(all_reduce=times)
    for name, form in of.items():
        yield Key("exchanged", name, "tp"), form


def _letters(asked: Asked) -> Mapping[str, int]:
    placed, share, config = asked.placed, asked.share, asked.placed.config
    if not config.mtp.layers:
        return {}
    own = [unit for unit in share.units if is_further(config.model, unit)]
    flats, freed, depths = placed.layout.flats, freed_of(placed, share), len(own)
    numels = share.whole if asked.padded else share.numels
    names = units_of(placed)
    table, head = ([name for name in freed if flats[name].unit == unit] for unit in (names[0], names[-1]))
    tied = placed.tied_numel > 0
    first = depths - (bool(share.ends) and not tied)  # the last stage has no other use of the table
    used = first * sum(numels[name] for name in table)
    used += depths * sum(numels[name] for name in (table if tied else head))
    wrapped = sum(is_wrapped(config, unit) for unit in own)
    return {"l_f": depths, "r_f": wrapped, "VF": used if depths else 0}


def _about(config: RunConfig) -> Iterator[str]:
    """Yield what the blocks are, and where they lie."""
    if depths := config.mtp.layers:
        where = " on the last pipeline stage, with a copy of the token table" if schedule_name(config) else ""
        yield (
            f"{counted(depths, 'block')} after the last one predict{'s' if depths == 1 else ''} further tokens in "
            f"training{where}: {config.mtp.each:g} times each loss is added."
        )


CAPABILITY = Capability(sent=_sent, forms=_forms, letters=_letters, notes={"about": _about})
