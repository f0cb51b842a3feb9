"""Adapters of weights that are no modules, experts' stacks and the router's map: merged into a copy of the weight, or
beside a stack by rows (`functional/lora_stacks.py`).

Under expert parallelism a rank has the adapters of the experts that are here, and those of the router whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zerosim import functional as F
from zerosim.config.parts.tuning import is_target, renames
from zerosim.nn.context import LayerContext
from zerosim.placement.block import Experts, expert_words
from zerosim.tensor.tensor import Operand, Parameter, Tensor

Beside = Callable[[Tensor, Tensor, tuple[int, ...]], Tensor]
"""Adds the adapter's share to the stack's product of rows, from (product, rows, the rows of each expert)."""
UP, DOWN, ROUTER = range(3)


class AdaptedStack:
    """A stack of maps (`inner`, `wide`), the experts' first (UP) or last (DOWN), and, if it is a target, a new adapter.

    read    returns what rows are multiplied by: the stack or, merged, its copy with the adapter
    beside  adds the adapter's share by rows; None: there is none
    """

    def __init__(self, at: LayerContext, row: Experts, stack: Parameter, place: int, inner: int, wide: int) -> None:
        tuning, experts = at.tuning, at.sizes.experts
        self.read: Callable[[], Operand] = lambda: stack
        self.beside: Beside | None = None
        if not (rank := _rank(at, row, place)):
            return
        cut = at.group.experts.adapters
        std = _std(inner)
        shapes = (rank * experts, inner), (wide, rank * experts)
        by_rows = tuning.lora_by_rows
        a = at.declare("lora_A.weight", shapes[0], std=std, reads_input=by_rows, **cut(shapes[0], 0, 1))
        b = at.declare("lora_B.weight", shapes[1], reads_input=False, **cut(shapes[1], 1, rank))
        if by_rows:
            add = partial(F.add_adapter, a=a, b=b, scale=tuning.scale, grad_scale=at.group.experts.grad_scale)
            self.beside = lambda y, rows, counts: add(y, rows, counts=counts)
        else:
            self.read = lambda: F.stack_with_adapter(stack, a, b, tuning.scale, transposed=row.layout == "out_in")


def adapted_router(at: LayerContext, row: Experts, weight: Parameter) -> Callable[[], Operand]:
    """Return what reads a router's weight (E, D): if it is a target, a copy with a new adapter."""
    if not (rank := _rank(at, row, ROUTER)):
        return lambda: weight
    wide, inner = weight.shape
    a = at.declare("lora_A.weight", (rank, inner), std=_std(inner), reads_input=False)
    b = at.declare("lora_B.weight", (wide, rank), reads_input=False)
    return lambda: F.stack_with_adapter(weight, a, b, at.tuning.scale)


def _rank(at: LayerContext, row: Experts, place: int) -> int:
    """Return the rank of an adapter, 0 for none. PEFT gives gate and up in one weight twice the rank, and alpha."""
    tuning = at.tuning
    words = expert_words(row, renames=renames(at.block, tuning))[place]
    asked = [word for word in tuning.targets if is_target(word, at.name, words)]
    is_two = place == UP and any(word in words and word != "experts" for word in asked)
    return tuning.lora_rank * (2 if is_two else bool(asked))


def _std(inner: int) -> float:
    """Return the spread that PEFT's uniform draw has."""
    return float((3 * inner) ** -0.5)
