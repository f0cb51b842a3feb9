"""A block's feed-forward of experts (`functional/experts.py`), from its row (`placement/block.py`, Experts).

One leaf module has all of it, as DeepSpeed is told by `set_z3_leaf_modules`: which expert runs depends on the tokens.
Under tensor parallelism f and g stand around all of it, shared experts included. Each rank has some columns of every
expert; what it computes of the router's gradient is a share, which is summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from zerosim import functional as F
from zerosim.dtypes import compute_dtype
from zerosim.nn.context import LayerContext
from zerosim.nn.experts_router import Router
from zerosim.nn.experts_shared import Beside, Halves, SharedExperts
from zerosim.nn.lora import in_autocast
from zerosim.nn.lora_stacks import DOWN, UP, AdaptedStack
from zerosim.placement.block import Experts, Role
from zerosim.tensor.discarded import discard
from zerosim.tensor.tensor import Operand, Parameter, Tensor

Layer = Callable[[Tensor], Tensor]


class ExpertsLayer:
    """The router, the experts that are here, and shared experts. Shapes: x and y (..., D).

    `between` is the function between an expert's maps; `shared` declares shared experts.
    """

    def __init__(
        self, here: LayerContext, row: Experts, between: Layer, shared: Callable[[LayerContext], Halves] | None
    ) -> None:
        sizes, maps, block = here.sizes, here.group.maps, here.block
        self.row, self.maps, self.experts, self.policy = row, maps, here.group.experts, here.policy
        self.applied = here.experts.applied(row)
        self.fuses = block.is_gated and here.policy.saves == "megatron"
        self.between, self.part = between, block.mlp.columns.part
        self.hidden, self.here, self.kernel = sizes.hidden, here, here.experts.experts_kernel
        composed = here.policy.saves == "eager" and self.kernel != "eager"  # which weighs an expert's rows at a time
        self.weigh = partial(F.weigh, composed=composed)
        self.router = Router(here, row)
        inner = sizes.expert_ffn * (2 if block.is_gated else 1)
        self.up, of_up = self._stack(here, "columns", sizes.hidden, inner), self._biases(here, False, inner)
        self.down = self._stack(here, "rows", sizes.expert_ffn, sizes.hidden)
        self.biases = of_up, self._biases(here, True, sizes.hidden)
        self.shared = None
        if shared is not None:
            inside = here.group if self.experts.axes else replace(here.group, maps=maps.inside())
            self.shared = SharedExperts(here._replace(group=inside), row, shared)

    def _stack(self, here: LayerContext, place: str, inner: int, wide: int) -> AdaptedStack:
        """Declare the first or the last map of all experts."""
        is_first, sizes = place == "columns", here.sizes
        outputs = 1 if self.row.layout == "out_in" else 2
        shape = (sizes.experts, wide, inner) if outputs == 1 else (sizes.experts, inner, wide)
        of, parts = (outputs, self._parts(here, wide)) if is_first else (3 - outputs, 1)
        how = self.experts.stack(self.maps, shape, of=of, parts=parts)
        at = here.taking(Role(1, "columns" if is_first else "rows")) / self.row.stacks[not is_first]
        name, _, last = at.name.rpartition(".")
        stack = at.named(name).declare(last, shape, std=here.std if is_first else here.std_out, **how)
        return AdaptedStack(at, self.row, stack, UP if is_first else DOWN, inner, wide)

    def _biases(self, here: LayerContext, last: bool, wide: int) -> Parameter | None:
        """Declare the biases of all experts' first or `last` maps, if they have some. Of the last ones a rank that has
        some of the experts' columns has some of the model's: the sum over the ranks has each bias once."""
        if not self.row.bias:
            return None
        shape, at = (here.sizes.experts, wide), here.taking(Role(1, "rows" if last else "columns"))
        at, parts = at / f"{self.row.stacks[last]}_bias", 1 if last else self._parts(here, wide)
        name, _, own = at.name.rpartition(".")
        how = self.experts.stack(self.maps, shape, of=1, parts=parts)
        return at.named(name).declare(own, shape, reads_input=False, **how)

    def _parts(self, here: LayerContext, wide: int) -> int:
        """Return how many parts of an expert's first map are cut apart: one, where neighbours belong together."""
        return 1 if here.block.between == "clamped_swiglu" else wide // here.sizes.expert_ffn

    def __call__(self, x: Tensor) -> Tensor:
        if self.experts.axes:
            return self._whole(x)
        return self.maps.leave(self._whole(self.maps.enter(x)))

    def _whole(self, x: Tensor) -> Tensor:
        if self.shared is not None and self.experts.overlaps:
            beside = Beside(self.shared, x)
            y = self._of_chosen(x, beside)
            return F.promoted_sum(y, beside.take())
        y = self._of_chosen(x)
        return y if self.shared is None else F.promoted_sum(y, self.shared(x))

    def _of_chosen(self, x: Tensor, beside: Beside | None = None) -> Tensor:
        """Return the sum of each token's experts, weighed."""
        half = (None, None) if beside is None else (beside.into, beside.back)
        weights, chosen = self.router(x)
        inside = self.applied != "results"
        way, rows, of_rows = self.experts.dispatch(x, weights, chosen, inside=inside, beside=half[0])
        del weights, chosen
        self.router.note(x.device, way)
        rows = self._maps(rows, way.counts, of_rows if inside else None)
        wide = None if self.here.experts.weigh_dtype is None else compute_dtype(x.dtype)
        return self.experts.combine(
            way,
            rows,
            None if inside else partial(self.weigh, weights=of_rows, dtype=wide),
            x.shape,
            half[1],
        )

    def _maps(self, rows: Tensor, counts: tuple[int, ...], weights: Tensor | None) -> Tensor:
        """Return the experts' maps of their rows, which are weighed before or between them.

        Megatron's kernel computes a gated function and weighs its result at once: it saves what the function read.
        """
        run, given = self.policy.run, rows.dtype
        up, down = self.up.read(), self.down.read()
        biases: list[Operand] = [one for one in self.biases if one is not None]
        product = partial(
            F.grouped_linear,
            counts=counts,
            transposed=self.row.layout == "out_in",
            grad_scale=self.experts.grad_scale,
            kernel=self.kernel,
        )
        if self.kernel != "grouped":  # torch's grouped product is on no list of autocast's
            (rows, *_), ([up], [down], biases) = in_autocast(self.here, rows, [up], [down], biases)
        of_up, of_down = biases or (None, None)
        if weights is not None and self.applied == "inputs":
            rows, weights = self.weigh(rows, weights), None

        def adapted(rows: Tensor, of: AdaptedStack, **how: Any) -> Tensor:
            y = product(rows, **how)
            return y if of.beside is None else of.beside(y, rows, counts)

        into = partial(adapted, of=self.up, stack=up, bias=of_up)
        of_act = partial(discard if weights is not None and self.fuses else run, "mlp_act", self.between)
        rows = of_act(run(self.part, into, rows))
        if weights is not None:
            rows = run("mlp_act", self.weigh, rows, weights)
        size, index = self.experts.width_of(self.maps)
        first = 0
        if of_down is not None and of_down.shape[1] * size == self.hidden:
            first = index * of_down.shape[1]
        return F.cast(adapted(rows, self.down, stack=down, bias=of_down, first=first), given)
