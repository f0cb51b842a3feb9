"""The optimizer in backward: an option of `grads.py`."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.config.option import Exclusion
from zerosim.config.parts.data import DataConfig
from zerosim.config.parts.grads import GradMemory
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.offload import OffloadConfig
from zerosim.config.parts.optim import OptimConfig
from zerosim.config.parts.precision import PrecisionConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import InputError, wrong

_NAME = "optimizer_in_backward"
_LIVES = "each gradient is freed when its buffer is updated"
_UNKNOWN = "the norm of all gradients is known only after backward"
EXCLUSIONS = (
    Exclusion(_NAME, "persistent_grads", _LIVES),
    Exclusion(_NAME, "keep_upcast", _LIVES),
    Exclusion(_NAME, "keep_grads", _LIVES),
    Exclusion(_NAME, "clip_norm", _UNKNOWN),
    Exclusion(_NAME, "skip_nonfinite", _UNKNOWN),
    Exclusion(_NAME, "delayed_update", "a delayed update keeps all gradients for the next step"),
)


def rules(
    grads: GradMemory, data: DataConfig, mesh: MeshConfig, offload: OffloadConfig, optim: OptimConfig,
    precision: PrecisionConfig,
) -> Iterator[InputError]:  # fmt: skip
    """Yield what keeps a gradient from being complete, or known, inside backward."""
    if not grads.in_backward:
        return
    for axis in ("pp", "tp", "dp_replicate"):
        if (size := getattr(mesh, axis)) > 1:
            yield wrong(_NAME, f": with {axis} {size} gradients are complete only after backward; choose {axis} 1")
    if (times := data.accumulate) > 1:
        yield wrong(_NAME, f": with accumulate {times} a gradient is the sum of {times} backwards; choose accumulate 1")
    if precision.loss_scale is not None:
        yield wrong(
            _NAME,
            f": loss_scale {precision.loss_scale} finds an overflow only after backward; choose precision bf16 or fp32",
        )
    if offload.cpu_steps:
        yield wrong(_NAME, f": offload {offload.where!r} lets the CPU step after backward; leave one of them out")
    if grads.buckets == "views":
        yield wrong(_NAME, f": grad_buckets 'views' hold gradients for the whole run, but {_LIVES}; choose copies")
    if OPTIMIZERS[optim.optimizer].estimates_every:
        yield from no_estimates(grads, optim.optimizer)


def no_estimates(grads: GradMemory, optimizer: str) -> Iterator[InputError]:
    """Yield what refuses an optimizer that estimates curvature."""
    if grads.in_backward:
        yield wrong(_NAME, f": {optimizer} estimates from a second backward, which moves no weight; choose adamw")
