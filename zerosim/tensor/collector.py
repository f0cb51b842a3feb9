"""What collects one flat buffer's gradient, weight by weight, until a strategy takes the whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from zerosim.device.device import Buffer
from zerosim.dtypes import DType
from zerosim.tensor.dummy_grads import DummyGrads
from zerosim.tensor.sums import GradProbe


@dataclass(slots=True)
class Collector:
    """The gradient of the current microbatch while it is computed, in `dtype`.

    stays_whole   the finished gradient is stored whole
    dummies       where gradients of linear maps in blocks are written, if anywhere
    probe         checks whether finished gradients are finite
    grad          the whole gradient; `given`: weights whose window was handed out; `collected`: those with a gradient
    lasting       the permanent gradient buffer, if there is one, to which `Flat.grad_whole` or `grad_shard` points
    waiting       gradients of earlier microbatches, whole and not reduced
    later         collects weights' gradients for later
    sums          those are added in `dtype`
    sent          a dtype in which a finished gradient may be sent as it is, beside that in which it is stored
    """

    dtype: DType
    stays_whole: bool = False
    dummies: DummyGrads | None = None
    probe: GradProbe | None = None
    grad: Buffer | None = None
    given: set[int] = field(default_factory=set)
    collected: set[int] = field(default_factory=set)
    lasting: Buffer | None = None
    waiting: Buffer | None = None
    later: deque[Callable[[], None]] | None = None
    sent: DType | None = None
    sums: bool = False

    def note(self, index: int) -> None:
        """Note that the gradient of weight `index` was collected."""
        self.given.add(index)
        self.collected.add(index)

    def look(self, whole: Buffer) -> Buffer:
        """Return a finished gradient, after the probe."""
        if self.probe is not None:
            self.probe.look(whole)
        return whole

    def close(self) -> None:
        """Forget the microbatch's gradient, which somebody has taken."""
        self.grad = None
        self.given.clear()
        self.collected.clear()
