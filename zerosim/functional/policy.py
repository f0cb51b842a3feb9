"""Choices about the buffers that ops save for backward. They change bytes and work, never the result's meaning.

The ops (`norm.py`, `attention.py`) document what each choice saves. Recompute of whole blocks is in
`nn/recompute.py`, of parts of them in `tensor/discarded.py`, and the words for both are in `config/recompute.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from zerosim.config.recompute import Recomputed, read_recompute
from zerosim.errors import InputError, did_you_mean
from zerosim.tensor.discarded import discard
from zerosim.tensor.tensor import Tensor

SAVES = ("lean", "megatron", "eager", "liger", "foak", "litgpt")
OF_TRANSFORMERS = ("eager", "liger", "foak")
"""Kernels of transformers' modules, whose blocks PyTorch checkpoints."""
ATTENTIONS = ("eager", "flash")


@dataclass(frozen=True, slots=True)
class ActivationPolicy:
    """The choices about buffers saved from forward to backward.

    saves       'lean': the needs of zerosim's own kernels; 'megatron': the buffers that Megatron's kernels save
    (2205.05198, section 4); 'eager': those of transformers' own modules, whose RMS norms and gates are several ops;
    'liger': those of Liger's, fused, whose gate writes its gradient over its input; 'foak': fused norms (unsloth's)
    beside transformers' own gate, as in fms-acceleration; 'litgpt': those of its modules, which are several ops too
    attention   'eager' materialises scores (B, H, T, T); 'flash' never does
    repeat_kv   attention saves keys and values repeated to all heads of queries
    return_kv   what attention reads lives until forward ends, also where a block is recomputed
    fp32_softmax  eager: save the softmax of half types in fp32, as a framework without a fused kernel does
    recompute   'none'; 'selective': backward recomputes the attention core, or the listed parts; 'full':
                backward recomputes whole blocks. A block's own policy has no ranges (`of_block`)
    mlp_tile    the feed-forward runs for so many rows at a time; 0: for all
    loss_tile   so does the head with a chunked loss; 0: for an eighth of them
    again       the parsed form of `recompute`

    `saves`, `recompute`, `return_kv` and `fp32_softmax` change no bit of any result. `repeat_kv` rounds the sum of its
    copies' gradients, and tiles that of theirs. 'flash' adds in another order than 'eager' and is within rounding of
    it. Raises: InputError for a name that is none of these.
    """

    saves: str = "lean"
    attention: str = "eager"
    recompute: str = "none"
    fp32_softmax: bool = False
    repeat_kv: bool = False
    return_kv: bool = False
    mlp_tile: int = 0
    loss_tile: int = 0
    again: Recomputed = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, known in (("saves", SAVES), ("attention", ATTENTIONS)):
            value = getattr(self, name)
            if value not in known:
                hint = did_you_mean(value, known, "")
                raise InputError(f"{name} {value!r}: expected one of {', '.join(known)}{'; ' * bool(hint)}{hint}")
        object.__setattr__(self, "again", read_recompute(self.recompute, self.attention))

    @property
    def is_litgpt(self) -> bool:
        """Whether blocks are litgpt's: q, k and v are one map's result, with one adapter."""
        return self.saves == "litgpt"

    @property
    def keeps_ends(self) -> bool:
        """Whether a recomputed block's input and its second output live until its backward ends, as in PyTorch's
        reentrant checkpoint."""
        return self.saves in OF_TRANSFORMERS

    def of_block(self, number: int) -> ActivationPolicy:
        """Return the policy of this block, if blocks differ."""
        return replace(self, recompute=self.again.of_block(number)) if self.again.ranges else self

    def run(self, part: str, layer: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run layer(*inputs), which is `part` of a block. If that part is recomputed, the result is not saved."""
        return discard(part, layer, *inputs) if part in self.again.parts else layer(*inputs)


DEFAULT = ActivationPolicy()
