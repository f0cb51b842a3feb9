"""A norm of rows, as the block's row says."""

from __future__ import annotations

from zerosim import functional as F
from zerosim.config.parts.tuning import widens_norms
from zerosim.nn.context import LayerContext
from zerosim.tensor.tensor import Tensor


class Norm:
    """The row's norm of the last dim, `functional.layer_norm` or `rms_norm`, which changes nothing else at first."""

    def __init__(self, here: LayerContext, width: int = 0, eps: float = 0.0) -> None:
        shape, summed, kind = (width or here.sizes.hidden,), here.group.rows.axes, here.block.norm
        self.is_rms, self.plus_one = kind in ("rms", "rms + 1"), kind == "rms + 1"
        self.rounds_last = here.block.rounds_last
        self.weight = here.declare("weight", shape, fill=0.0 if self.plus_one else 1.0, summed=summed)
        self.bias = here.declare("bias", shape, summed=summed) if kind == "layer" else None
        self.eps = eps or here.sizes.norm_eps
        self.policy, self.widens = here.policy, widens_norms(here.tuning, here.block)

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_rms:
            how = {"plus_one": self.plus_one, "rounds_last": self.rounds_last}
            return F.rms_norm(x, self.weight, self.eps, **how, policy=self.policy)
        return F.layer_norm(x, self.weight, self.bias, self.eps, widens=self.widens, policy=self.policy)
