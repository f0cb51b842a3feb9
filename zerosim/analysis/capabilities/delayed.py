"""A delayed parameter update: what it holds beside model states."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.analysis import formulas
from zerosim.analysis.capabilities.offload import is_here
from zerosim.analysis.capability import Beside, Capability, Step, when
from zerosim.analysis.facts import frozen_of
from zerosim.analysis.formulas import BytesPerParameter
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.placement.memories import HOST
from zerosim.train.result import RunResult


def _beside(config: RunConfig, cost: BytesPerParameter, step: Step) -> Iterator[Beside]:
    """Yield the previous step's gradients, and new parameters, which wait on the host."""
    if not config.grads.late or not step.late:
        return
    late = formulas.late_states(cost, frozen_of(config))
    waits = HOST if is_here(config, "params") else None
    yield Beside("param", late["param"], waits, at=("states", "upcast"))
    yield Beside("grad", late["grad"])


def lags(config: RunConfig) -> bool:
    """Return whether an update is delayed, so that weights lag by one."""
    return config.grads.late > 0


def updated_by(result: RunResult, step: int) -> int | None:
    """Return the step whose gradients update the parameters in a step: its own or, once the update is
    delayed, the previous one. None: no step's, because the gradients wait or overflowed."""
    late = result.config.grads.late
    own = step if not late or step < late - 1 else step - 1
    waits = bool(late) and step == late - 1
    return None if waits or ((report := result.report(own)) is not None and report.skipped) else own


def has_late(result: RunResult) -> bool:
    """Return whether a delayed update ran beside the last step's forward and backward."""
    late, last = result.config.grads.late, result.last_step
    return 0 < late <= last and updated_by(result, last) is not None


def can_delay(config: RunConfig) -> bool:
    """Return whether the CPU's update could run beside the next step, and does not."""
    try:
        config.replace(delayed_update=1)
    except InputError:
        return False
    return not lags(config)


BOTH = "With a delayed update the host holds gradients of two steps, and new parameters beside the old ones."
CAPABILITY = Capability(beside=_beside, notes={"memories": lambda c: when(c.grads.late, BOTH)})
