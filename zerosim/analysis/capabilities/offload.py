"""Model states in the host's memory or on NVMe: their copies, and where they lie when backward ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zerosim.analysis import formulas
from zerosim.analysis.capability import Beside, Capability, Forms, Kept, Key, Note, Sent, Step, when
from zerosim.analysis.facts import frozen_of, is_owned, reductions
from zerosim.analysis.formulas import BytesPerParameter, Form
from zerosim.analysis.formulas.states import SCALES
from zerosim.analysis.shares import itemsizes, trained_itemsize
from zerosim.config import RunConfig
from zerosim.config.parts.offload import FSDP2
from zerosim.config.parts.tuning import has_whole_scales
from zerosim.placement.memories import DEVICE, HOST, NVME


def _forms(config: RunConfig, step: Step, sent: Sent) -> Forms:
    """Yield the copies of model states."""
    if not config.offload.is_on or is_uncounted(config):
        return
    optim, is_alone = config.optim, config.mesh.ranks == config.mesh.shards
    kept = formulas.MASTER_BYTES * (1 + formulas.num_moments(optim.optimizer, optim.momentum))
    sizes, memories = (trained_itemsize(config), itemsizes(config)[1], kept), config.offload.by_state
    is_read_ahead = memories["param"] == NVME and config.mesh.pp > 1  # a read may serve the next use too
    frozen, times = frozen_of(config) is not None, reductions(config) if is_alone else 1
    steps = config.offload.cpu_steps
    for way, form in formulas.offloaded(memories, sent.fetched, sizes, times, cpu_steps=steps, frozen=frozen):
        if not (is_read_ahead and way == f"{NVME} to {HOST}"):
            yield Key("copied", way), form


def _kept(config: RunConfig, kept: Kept) -> Kept:
    """The CPU steps an fp32 copy of the parameters."""
    return kept._replace(masters=True) if config.offload.cpu_steps else kept


def _beside(config: RunConfig, cost: BytesPerParameter, step: Step) -> Iterator[Beside]:
    """Yield stage 1's local shard of the gradients, a copy in another memory beside whole gradients on the device."""
    if is_beside_whole(config):
        yield Beside("grad", formulas.model_states(2, cost, frozen_of(config))["grad"], at=("states",))


def is_beside_whole(config: RunConfig) -> bool:
    """Return whether whole gradients stay on the device, and the local shard alone lies elsewhere."""
    return config.states_stage == 1 and not is_here(config, "grads")


def is_here(config: RunConfig, what: str) -> bool:
    """Return whether 'optimizer', 'params' or 'grads' lie on the device."""
    return config.offload.memory_of(what) == DEVICE


def where(config: RunConfig) -> str:
    """Return which states lie in which memory, as --offload takes it; '' if all lie on the device."""
    return config.offload.where


def is_loaded(config: RunConfig) -> bool:
    """Return whether the host holds weights while they are loaded."""
    return config.offload.host_load != "none"


def is_uncounted(config: RunConfig) -> bool:
    """Return whether owners' states are copied: there is no closed form for that."""
    return config.offload.is_on and is_owned(config)


def stage_alone(config: RunConfig, pp: int) -> int:
    """Return the stage of a mesh whose states no data rank shares: 0 or, to offload them, one that can."""
    if not config.offload.is_on:
        return 0
    return 1 if pp > 1 and is_here(config, "params") else 2 if is_here(config, "params") else 3


def _lies(config: RunConfig, whole: Mapping[str, Form], beside: Sequence[Beside]) -> Forms:
    """Yield each state's bytes by memory: those elsewhere first, then those where it lies itself."""
    if not config.offload.is_on:
        return
    for kind, memory in config.offload.by_state.items():
        home = "" if memory == DEVICE else memory
        found = {"" if kind == "grad" and is_beside_whole(config) else home: whole[kind]}
        if kind == "param" and home and has_whole_scales(config.tuning):  # they are no parameters, and stay
            found = {home: whole[kind] - SCALES, "": SCALES}
        for part in beside:
            if part.kind == kind:
                at = home if part.memory is None else part.memory
                found[at] = found.get(at, Form()) + part.form
        for at in sorted(found, key=lambda at: at == home):
            yield Key("lies", kind, at), found[at]


UNWAITED = "As in PyTorch's CPUOffloadPolicy, nobody waits for a gradient's copy until backward ends."
NOTES: Mapping[str, Note] = {
    "moved": lambda c: when(c.offload.is_on, "model states"),
    "memories": lambda c: when(c.offload.policy == FSDP2, UNWAITED),
}
CAPABILITY = Capability(
    forms=_forms, kept=_kept, beside=_beside, lies=_lies, notes=NOTES, measured=lambda config: not config.offload.is_on
)
