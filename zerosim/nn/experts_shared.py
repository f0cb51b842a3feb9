"""The shared experts of a layer: one feed-forward for every token, whose result a gate may weigh.

It has two halves. With --shared-expert-overlap they run while rows are on their way (Megatron-LM d98e8a6,
core/transformer/moe/shared_experts.py and token_dispatcher.py, --moe-shared-expert-overlap):

    rows go to their experts       the first map and the function behind it
    results come back              the last map, and the gate's weight

Backward has the same pairs in the other order: each half's gradients while gradients of rows are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from zerosim import functional as F
from zerosim.backends.forms import Choice
from zerosim.nn.context import LayerContext
from zerosim.nn.experts_router import router_map
from zerosim.placement.block import Experts
from zerosim.tensor.order import ran_after
from zerosim.tensor.tensor import Tensor


class Halves(Protocol):
    """A feed-forward in two halves."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def into(self, x: Tensor) -> Tensor: ...
    def back(self, x: Tensor) -> Tensor: ...


class SharedExperts:
    """Shapes: x and y (..., D)."""

    def __init__(self, here: LayerContext, row: Experts, make: Callable[[LayerContext], Halves]) -> None:
        self.layer, self.here, self.gate = make(here / row.shared), here, None
        if row.shared_gate:
            at = here / row.shared_gate
            self.gate = at.declare("weight", (1, here.sizes.hidden), std=here.std, summed=here.group.maps.axes)

    def __call__(self, x: Tensor) -> Tensor:
        weights = self.weights(x)
        return weighed(self.layer(x), weights)

    def weights(self, x: Tensor) -> Tensor | None:
        """Return the gate's weights, if there is one."""
        if self.gate is None:
            return None
        weights, _ = F.choose(router_map(self.here, x, self.gate), 1, Choice("sigmoid"))
        return weights


def weighed(y: Tensor, weights: Tensor | None) -> Tensor:
    """Return the feed-forward's result as the gate weighs it."""
    return y if weights is None else F.weigh(y, weights)


class Beside:
    """Shared experts of x, each half beside an exchange. A half is given what was sent, and backward visits it before
    that: after gradients have left, and before they have arrived."""

    def __init__(self, shared: SharedExperts, x: Tensor) -> None:
        self.shared, self.x = shared, x
        self._weights: Tensor | None = None
        self._made = list[Tensor]()  # the last one, which is taken out where it is read

    def into(self, sent: Tensor) -> Tensor:
        x = ran_after(self.x, sent)
        self._weights = self.shared.weights(x)
        self._made.append(self.shared.layer.into(x))
        return self._made[-1]

    def back(self, sent: Tensor) -> Tensor:
        y = self.shared.layer.back(ran_after(self._made.pop(), sent))
        self._made.append(weighed(y, self._weights))
        return self._made[-1]

    def take(self) -> Tensor:
        """Return the result."""
        return self._made.pop()
