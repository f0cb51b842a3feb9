"""8-bit Adam (Dettmers and others, 2110.02861) as bitsandbytes has it: Adam with two states of one byte each.

A step decodes the states to fp32, takes AdamW's step, and quantises both states again (`backends/numpy/quantize.py`),
in blocks of 256 elements of one tensor, counted from its beginning: signed for exp_avg, unsigned for exp_avg_sq. It
moves the weights before it rounds the states.

    bytes a parameter    1 + 1 + 2 * 4 / 256 = 2.03125, with an fp32 master K = 6.03125

States stay in fp32, 8 bytes, for
    tensors of fewer than 4096 elements   (min_8bit_size; the tensor's, however it is sliced)
    embeddings: the token and position tables, even if the head uses one. In bitsandbytes that is the rule of
                bnb.nn.Embedding and StableEmbedding, and the paper's (section 2.3); a torch.nn.Embedding gets 8 bits

Weight decay is decoupled, in Adam8bit too. Two things differ from bitsandbytes. Here a code is always the
nearest entry's, while its CPU kernel may be 2^-15 of absmax further away. And its CUDA kernel moves a code that lost
the sign of exp_avg. The square of a gradient far below its block's largest gets the code of 0. Its
weight then moves by lr * m / eps, in both.

Source: bitsandbytes 0.50, optim/optimizer.py (Optimizer2State), backends/cpu/ops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from zerosim.backends.kernels import Coded
from zerosim.dtypes import DType, fp32, uint8
from zerosim.optim.adam import Adam
from zerosim.optim.optimizer import Add, Step
from zerosim.optim.states import StateArray, by_weight, sized
from zerosim.placement.partition import Slice
from zerosim.placement.spec import FlatSpec, WeightSpec
from zerosim.tensor.flat import Flat

MIN_8BIT_SIZE = 4096


def has_8_bits(weight: WeightSpec) -> bool:
    """Return whether a tensor's states are codes."""
    return weight.numel >= MIN_8BIT_SIZE and not weight.embedding


def has_no_8_bits(weight: WeightSpec) -> bool:
    """Return whether a tensor's states are floats."""
    return not has_8_bits(weight)


@dataclass(frozen=True)
class Adam8bit(Adam):
    """`Optimizer` documents its members. Codes and floats of a slice omit the gaps between its tensors."""

    cut: ClassVar[str] = "blocks"
    decoupled: bool = True

    @property
    def foreach_temporaries(self) -> int:
        """It has no foreach form."""
        return 0

    def arrays(self, spec: FlatSpec, own: Slice, dtype: DType) -> Sequence[StateArray]:
        return sized(_states(dtype), spec, own)

    def step(self, flat: Flat, now: Step, add: Add) -> None:
        weights, grad, states = flat.weights(), flat.grad_shard, flat.states
        assert grad is not None, f"{flat.name} has no gradient"
        device = flat.device
        for mine, places in by_weight(_states(weights.dtype), flat.spec, flat.own):
            here, decays = slice(mine.at, mine.at + mine.numel), now.decays(mine.weight)
            own = {name: states[name][place] for name, place in places.items()}
            if "exp_avg" not in own:
                kept = {name: own[f"{name}_float"] for name in self.states}
                self.update(weights[here], grad[here], kept, now, decays=decays)
                continue
            m, v = (Coded(own[name].array, own[f"{name}_absmax"].array) for name in self.states)
            arrays = weights[here].array, grad[here].array, m, v
            flops = (self.flops + 6) * mine.numel  # for each state *, / and max
            device.kernel(flops, device.backend.adam8bit, *arrays, self.numbers(now, decays=decays))


@lru_cache(maxsize=4)
def _states(dtype: DType) -> tuple[StateArray, ...]:
    return (
        StateArray("exp_avg", 0, uint8, of=has_8_bits),
        StateArray("exp_avg_sq", 0, uint8, of=has_8_bits),
        StateArray("exp_avg_absmax", 0, fp32, 0, "blocks", has_8_bits),
        StateArray("exp_avg_sq_absmax", 0, fp32, 0, "blocks", has_8_bits),
        StateArray("exp_avg_float", 0, dtype, of=has_no_8_bits),
        StateArray("exp_avg_sq_float", 0, dtype, of=has_no_8_bits),
    )
