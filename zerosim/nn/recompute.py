"""Recompute: a unit that stores only its input, and runs forward again when backward needs the rest.

(Chen et al. 1604.06174; "activation checkpointing" in ZeRO's paper, section 3.2, and in PyTorch.) Between
forward and backward one input per slot is kept (`kept_inputs.py` says how). A strategy's hooks are the same:
stage 3 gathers once in backward, for the second forward and the backward after it. Dropout masks are a function
of where they are used (`tensor/rng.py`), so the second run drops what the first dropped, and every bit of the
result is that of a run that keeps all. By leaf module stage 3 gathers twice: each leaf for the second forward, and
again for its backward (DeepSpeed's checkpoints).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from zerosim.device.device import Buffer
from zerosim.nn.kept_inputs import Restore, StoredInputs
from zerosim.nn.kept_routes import KeptRoutes
from zerosim.nn.unit import Unit
from zerosim.tensor.tensor import Tensor


class Recompute(Unit):
    """A unit around a unit. `inputs` stores its input; backward recomputes everything else.

    keeps_ends   the input and the second output live until its backward ends (PyTorch's CheckpointFunction, reentrant)
    graph        buffers that live until their graph dies: those of the second forward until its backward ends
    routes       keeps what routers return in the first forward
    """

    def __init__(
        self,
        unit: Unit,
        inputs: StoredInputs | None = None,
        *,
        keeps_ends: bool = False,
        graph: list[Buffer] | None = None,
        routes: KeptRoutes | None = None,
    ) -> None:
        super().__init__(unit.name, unit, unit.function, reduces=unit.reduces, reads=unit.reads)
        self.unit = unit
        self.inputs = inputs or StoredInputs()
        self.keeps_ends = keeps_ends
        self.graph = [] if graph is None else graph
        self.routes = routes or KeptRoutes()
        self._kept: dict[int, Restore] = {}

    def reach(self, sends_back: bool, trained: Collection[str]) -> None:
        super().reach(sends_back, trained)
        self.unit.reach(sends_back, trained)

    def turns_back(self) -> Sequence[Unit]:
        again = self.turns() if self.leaves and self.goes_back else ()
        return (*again, *super().turns_back())

    def forward(self, x: Tensor, slot: int = 0, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the unit's output and leave nothing of its graph."""
        assert function is None, "a unit that runs again has one function"
        device = x.device
        if not device.grad_enabled or not self.goes_back:
            return self.unit.forward(x, slot)
        self._kept[slot] = self.inputs.keep(x.buffer)
        with device.no_grad(), self.routes.keeping():
            return self.unit.forward(x, slot)

    def backward(self, grads: list[Buffer], slot: int = 0, *, defers: bool = False) -> None:
        """Forward once more, of which only the graph is wanted; then the unit's backward."""
        self.open_asides()
        before = len(self.graph)
        _ends = self._again(slot)  # live to the end of this call
        self.unit.backward(grads, slot, defers=defers)
        del self.graph[before:]

    def _again(self, slot: int) -> tuple[Tensor, Tensor] | None:
        """Run forward once more; return its input and output if they are to be held."""
        if self.keeps_ends:
            return (x := Tensor(self._kept.pop(slot)())), self.unit.forward(x, slot)
        self.unit.forward(Tensor(self._kept.pop(slot)()), slot)
        return None

    def backward_weights(self, slot: int = 0) -> None:
        self.unit.backward_weights(slot)

    def forget(self) -> None:
        """Drop stored inputs, and graphs, that no backward will need."""
        self._kept.clear()
        self.inputs.forget()
        self.routes.forget()
        self.unit.forget()
