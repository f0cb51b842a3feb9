"""What FSDP1 keeps of a frozen block whose checkpoint is reentrant: the block's input and that input's gradient, until
the whole backward ends. So backward's peak is at the first block, not at the last.

                            from forward on    from its backward on    L blocks, at the first one's backward
    a recomputed block      its input          nothing                 one input
    kept by FSDP1           its input          both                    L inputs, L - 1 gradients

A frozen flat parameter has no gradient whose arrival could free it, so FSDP1 hooks the block's inputs. A reentrant
checkpoint runs the block again on a detached input, a leaf. The hook's closure holds the leaf, which has the input's
bytes and its gradient, until FSDP1 ends backward. Without reentrant checkpoints the inputs are no leaves, and trained
parameters have hooks of their own.

The first block's input, the frozen table's output, has a gradient too: a reentrant checkpoint without an input that
requires one would train nothing, so PEFT and transformers ask for it (`enable_input_require_grads`). So the first
block's backward is as large as any other's.

Source: PyTorch 2.13, distributed/fsdp/_runtime_utils.py (_register_post_backward_reshard_only_hook, _finalize_params),
autograd/graph.py (register_multi_grad_hook); peft 0.21.2, peft_model.py (_prepare_model_for_gradient_checkpointing);
transformers 5.24, modeling_utils.py (gradient_checkpointing_enable, enable_input_require_grads).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from zerosim.device.device import Buffer, Kind
from zerosim.nn.unit import Unit
from zerosim.tensor.tensor import Tensor


class Retained(Unit):
    """A unit around a recomputed block: it holds what FSDP1 holds, until `close`."""

    def __init__(self, unit: Unit) -> None:
        super().__init__(unit.name, unit, unit.function, reduces=unit.reduces, reads=unit.reads)
        self.unit = unit
        self._inputs: dict[int, Buffer] = {}
        self._held: list[Buffer] = []

    def reach(self, sends_back: bool, trained: Collection[str]) -> None:
        """Set how far backward goes. A block whose backward runs computes its leaf's gradient, even the first one."""
        super().reach(sends_back, trained)
        self.unit.reach(self.goes_back, trained)

    def turns_back(self) -> Sequence[Unit]:
        return self.unit.turns_back()

    def forward(self, x: Tensor, slot: int = 0, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        if x.device.grad_enabled and self.goes_back:
            self._inputs[slot] = x.buffer
        return self.unit.forward(x, slot, function)

    def backward(self, grads: list[Buffer], slot: int = 0, *, defers: bool = False) -> None:
        self._held.append(self._inputs.pop(slot))
        self.unit.backward(grads, slot, defers=defers)
        for grad in grads:
            grad.device.retag(grad, Kind.KEPT)
            self._held.append(grad)
        if not self.sends_back:
            grads.clear()

    def backward_weights(self, slot: int = 0) -> None:
        self.unit.backward_weights(slot)

    def close(self) -> None:
        self._held.clear()

    def forget(self) -> None:
        self._inputs.clear()
        self._held.clear()
        self.unit.forget()
