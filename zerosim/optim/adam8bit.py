"""8-bit Adam (Dettmers and others, 2110.02861) as bitsandbytes has it: Adam with two states of one byte each.

A step decodes the states to fp32, takes AdamW's step, and quantises both states again (`backends/numpy/quantize.py`),
in blocks of 256 elements of one tensor, counted from its beginning: signed for exp_avg, unsigned for exp_avg_sq. It
moves the weights before it rounds the states.

    bytes a parameter    1 + 1 + 2 * 4 / 256 = 2.03125, with an fp32 master K = 6.03125

States stay in fp32, 8 bytes, for
    tensors of fewer than 4096 elements   (min_8bit_size; the tensor's, however it is sliced)
    embeddings: the token and position tables, even if the head uses one. In bitsandbytes that is the rule of
                bnb.nn.Embedding and StableEmbedding, and the paper's (section 2.3); a torch.nn.Embedding gets 8 bits

torchao's AdamW8bit (`whole_blocks`) has another rule for the floats, and no exception for embeddings. States stay
in the weights' format for tensors of fewer than 4096 elements, and for those whose elements are no multiple of 256. It
asks about a rank's local tensor, we ask about the whole one, so that every ZeRO stage takes the same step. It also
stores each table of codes with each state: 1,024 bytes, which we omit.

Weight decay is decoupled, in Adam8bit too. Two things differ from bitsandbytes. Here a code is always the
nearest entry's, while its CPU kernel may be 2^-15 of absmax further away. And its CUDA kernel moves a code that lost
the sign of exp_avg. The square of a gradient far below its block's largest gets the code of 0. Its
weight then moves by lr * m / eps, in both.

Without fp32 masters (`--precision bf16-pure`) codes are decoded to fp32, and weights are rounded as `rounding.py` says.

Sources: bitsandbytes 0.50, optim/optimizer.py (Optimizer2State), backends/cpu/ops.py; torchao 0.18, optim/adam.py
(_new_buffer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from zerosim.backends.kernels import Coded, Rule, Storing
from zerosim.device.device import Buffer
from zerosim.device.work import work_of
from zerosim.dtypes import DType, bf16, fp32, uint8
from zerosim.optim.adam import Adam
from zerosim.optim.elementwise import Now
from zerosim.optim.optimizer import Add, Step
from zerosim.optim.states import StateArray, by_weight, sized
from zerosim.placement.formats import DYNAMIC8
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


def has_whole_blocks(weight: WeightSpec) -> bool:
    """Return whether torchao's states of a tensor are codes."""
    return weight.numel >= MIN_8BIT_SIZE and weight.numel % DYNAMIC8.block == 0


def has_no_whole_blocks(weight: WeightSpec) -> bool:
    """Return whether torchao's states of a tensor are floats."""
    return not has_whole_blocks(weight)


@dataclass(frozen=True)
class Adam8bit(Adam):
    """`Optimizer` documents its members. Codes and floats of a slice omit the gaps between its tensors.

    whole_blocks   which tensors have floats: torchao's rule, not bitsandbytes'
    """

    cut: ClassVar[str] = "blocks"
    decoupled: bool = True
    whole_blocks: bool = False

    @property
    def foreach_temporaries(self) -> int:
        """It has no foreach form."""
        return 0

    def arrays(self, spec: FlatSpec, own: Slice, dtype: DType) -> Sequence[StateArray]:
        return sized(_states(dtype, self.whole_blocks), spec, own)

    def step(self, flat: Flat, now: Step, add: Add) -> None:
        weights, grad, states = flat.weights(), flat.grad_shard, flat.states
        assert grad is not None, f"{flat.name} has no gradient"
        for mine, places in by_weight(_states(weights.dtype, self.whole_blocks), flat.spec, flat.own):
            here, decays = slice(mine.at, mine.at + mine.numel), now.decays(mine.weight)
            own = {name: states[name][place] for name, place in places.items()}
            storing = None if now.storing is None else now.storing(flat, mine)
            if "exp_avg" not in own:
                kept = {name: own[f"{name}_float"] for name in self.states}
                self.update(weights[here], grad[here], kept, now, decays=decays, storing=storing)
                continue
            m, v = (Coded(own[name].array, own[f"{name}_absmax"].array) for name in self.states)
            self._move(weights[here], grad[here], m, v, now, decays=decays, storing=storing)

    def _move(
        self, weights: Buffer, grad: Buffer, m: Coded, v: Coded, now: Step, *, decays: bool, storing: Storing | None
    ) -> None:
        """Move weights whose states are codes."""
        arrays, hyper = (weights.array, grad.array, m, v), self.numbers(now, decays=decays)
        flops = (self.flops + 6) * weights.numel  # for each state *, / and max
        work, device = work_of("adam8bit", flops, (*arrays, hyper)), weights.device
        if storing is None:
            device.kernels([work], device.backend.adam8bit, *arrays, hyper)
            return
        if storing.compensation is not None:
            work = work._replace(
                bytes_read=work.bytes_read + weights.nbytes, bytes_written=work.bytes_written + weights.nbytes
            )
        rule = Rule(self.rule, Now(now.lr, now.number, hyper.weight_decay), now.grad_scale)
        device.kernels([work], device.backend.adam8bit, *arrays, hyper, (rule, storing))


@lru_cache(maxsize=8)
def _states(dtype: DType, whole_blocks: bool) -> tuple[StateArray, ...]:
    coded, others = (has_whole_blocks, has_no_whole_blocks) if whole_blocks else (has_8_bits, has_no_8_bits)
    floats = dtype if whole_blocks or dtype is not bf16 else fp32
    return (
        StateArray("exp_avg", 0, uint8, of=coded),
        StateArray("exp_avg_sq", 0, uint8, of=coded),
        StateArray("exp_avg_absmax", 0, fp32, 0, "blocks", coded),
        StateArray("exp_avg_sq_absmax", 0, fp32, 0, "blocks", coded),
        StateArray("exp_avg_float", 0, floats, of=others),
        StateArray("exp_avg_sq_float", 0, floats, of=others),
    )
