"""Adapters of experts' stacks: merged into a copy of all experts' maps, or beside them by rows
(`functional/lora_stacks.py`).

Under expert parallelism a rank has the adapters of the experts that are here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zerosim import functional as F
from zerosim.nn.context import LayerContext
from zerosim.nn.lora import is_target
from zerosim.tensor.tensor import Operand, Parameter, Tensor

Beside = Callable[[Tensor, Tensor, tuple[int, ...]], Tensor]
"""Adds the adapter's share to the stack's product of rows, from (product, rows, the rows of each expert)."""


class AdaptedStack:
    """A stack of maps (`inner`, `wide`) and, if it is a target, a new adapter.

    read    returns what rows are multiplied by: the stack or, merged, its copy with the adapter
    beside  adds the adapter's share by rows; None: there is none
    """

    def __init__(self, at: LayerContext, stack: Parameter, inner: int, wide: int, *, transposed: bool) -> None:
        tuning, experts = at.tuning, at.sizes.experts
        self.read: Callable[[], Operand] = lambda: stack
        self.beside: Beside | None = None
        if not tuning.lora_rank or not any(
            is_target(word, at.name, ("experts",), is_part=True) for word in tuning.targets
        ):
            return
        rank, cut = tuning.lora_rank, at.group.experts.adapters
        std = float((3 * inner) ** -0.5)  # as of other adapters
        shapes = (rank * experts, inner), (wide, rank * experts)
        by_rows = tuning.lora_by_rows
        a = at.declare("lora_A.weight", shapes[0], std=std, reads_input=by_rows, **cut(shapes[0], 0, 1))
        b = at.declare("lora_B.weight", shapes[1], reads_input=False, **cut(shapes[1], 1, rank))
        if by_rows:
            add = partial(F.add_adapter, a=a, b=b, scale=tuning.scale, grad_scale=at.group.experts.grad_scale)
            self.beside = lambda y, rows, counts: add(y, rows, counts=counts)
        else:
            self.read = lambda: F.stack_with_adapter(stack, a, b, tuning.scale, transposed=transposed)
