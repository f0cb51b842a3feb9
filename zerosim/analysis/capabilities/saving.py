"""Saved states: the closed forms of what a save writes, gathers and holds on the host."""

from __future__ import annotations

from zerosim.analysis.capabilities import compression, delayed, offload
from zerosim.analysis.capability import ONCE, Asked, Capability, Forms, Kept, Key
from zerosim.analysis.facts import experts_in, frozen_of, is_among_all, is_divided, is_owned
from zerosim.analysis.formulas import UNIFORM, BytesPerParameter
from zerosim.analysis.formulas.saving import GPU_HOURS, saved, saved_states
from zerosim.analysis.shares import itemsizes, trained_itemsize
from zerosim.config import RunConfig
from zerosim.config.parts.saving import ASYNC, GATHERED
from zerosim.state.alike import written_once

SUBJECT = "saved"


def save_way(config: RunConfig) -> str:
    """Return how a state is saved, as --save-as has it; '' if it is not."""
    return config.saving.way or ""


def writes_files(config: RunConfig) -> bool:
    """Return whether a folder was given for what is saved."""
    return config.saving.folder is not None


def is_gathered(config: RunConfig) -> bool:
    """Return whether the first rank of each group gathers and writes all."""
    return config.saving.way == GATHERED


def is_beside(config: RunConfig) -> bool:
    """Return whether states are written beside later steps, from the host's memory."""
    return config.saving.way == ASYNC


def mtbf_hours(config: RunConfig, ranks: int) -> tuple[float, bool]:
    """Return the hours between failures of a job of so many ranks, and whether they were given."""
    given = config.saving.mtbf
    return (float(GPU_HOURS / ranks), False) if given is None else (given, True)


def _held(config: RunConfig, cost: BytesPerParameter) -> Forms:
    """Yield the bytes of a save."""
    if (how := config.saving.way) is None or _is_uncounted(config, cost):
        return
    has_masters = config.precision.has_masters and trained_itemsize(config) == itemsizes(config)[0]
    has_masters = offload.CAPABILITY.kept(config, Kept(0, has_masters)).masters
    each, frozen = cost.optim + (0 if has_masters else cost.param), frozen_of(config)
    on_mesh, is_plain = not is_among_all(config), frozen is None and not is_owned(config)
    if on_mesh and frozen is not None:
        return
    whole = saved_states(each, frozen, on_mesh=on_mesh)
    for name, form in saved(how, whole, each, on_mesh=on_mesh, divided=is_divided(config)):
        if is_plain or name == "on the drives" or how == ASYNC:
            yield Key(SUBJECT, name), form


def _is_uncounted(config: RunConfig, cost: BytesPerParameter) -> bool:
    """Return whether there is no closed form: numbers that depend on tensors, or that belong to more than weights."""
    own = any(True for _ in compression.CAPABILITY.beside(config, cost, ONCE))
    return config.optim.optimizer not in UNIFORM or own or delayed.lags(config) or experts_in(config) != ""


def _letters(asked: Asked) -> dict[str, int]:
    placed, share = asked.placed, asked.share
    if placed.config.saving.way is None:
        return {}
    return {"Ψ_w": written_once(placed.layout, share.stage), "W": len(share.ranks)}


CAPABILITY = Capability(held=_held, letters=_letters)
