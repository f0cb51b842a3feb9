"""Compressed gradients: their codes, and what an exchange keeps for later steps."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.analysis import formulas
from zerosim.analysis.capability import Asked, Beside, Capability, Kept, Sent, Step
from zerosim.analysis.facts import all_reduce_times, reductions
from zerosim.analysis.formulas import BytesPerParameter, Form, Operation
from zerosim.analysis.formulas.form import symbol
from zerosim.analysis.shares import itemsizes
from zerosim.config import RunConfig
from zerosim.config.parts.reduction import CASTS
from zerosim.dtypes import dtype
from zerosim.parallel.compression.dgc import ratio_at


def _sent(config: RunConfig, step: Step, sent: Sent) -> Sent:
    if config.reduction.compress in CASTS:
        return sent._replace(grads={operation: form.where(g=symbol("q")) for operation, form in sent.grads.items()})
    return sent if config.reduction.is_exact(step.number) else sent._replace(grads=_encoded(config, step))


def _encoded(config: RunConfig, step: Step) -> dict[Operation, Form]:
    """Return the forms of gradients sent as codes."""
    stage, name = config.parallel.zero_stage, config.reduction.compress
    form = formulas.encoded_volume(reductions=reductions(config, step.passes))
    if name in formulas.REDUCED:
        times = 1 if stage else all_reduce_times(config, config.mesh.shards)
        return {("reduce_scatter" if stage else "all_reduce", "states"): times * form}
    found = {("all_to_all", "states"): form} if stage or name == "onebit-adam" else {}
    return found if stage else {**found, ("all_gather", "states"): form}


def _beside(config: RunConfig, cost: BytesPerParameter, step: Step) -> Iterator[Beside]:
    if config.reduction.is_encoded:
        yield Beside("optim", formulas.KEPT)


def _kept(config: RunConfig, kept: Kept) -> Kept:
    return kept._replace(momentum=0.0) if config.reduction.compress == "dgc" else kept  # the exchange has it


def _letters(asked: Asked) -> dict[str, int]:
    """Return the bytes of gradients that a compression sends and stores in a step, padding included."""
    placed, share, config = asked.placed, asked.share, asked.placed.config
    how, flats = config.reduction, placed.layout.flats
    if how.compress in CASTS:
        return {"q": dtype(how.compress).itemsize}
    if not how.is_encoded:
        return {}
    g, sent, kept = itemsizes(config)[1], 0, 0
    ratio = ratio_at(asked.step, how.ratio, how.warmup) if how.compress == "dgc" else how.ratio
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


CAPABILITY = Capability(
    sent=_sent, kept=_kept, beside=_beside, letters=_letters, measured=lambda config: not config.reduction.is_encoded
)
