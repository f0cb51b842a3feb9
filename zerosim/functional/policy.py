"""How ops treat what their backward will need: four choices that change bytes and work, never the meaning.

What each one keeps is documented with the ops (`norm.py`, `attention.py`) and with recompute: whole blocks in
`nn/recompute.py`, parts of them in `tensor/discarded.py`, the words for both in `config/recompute.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zerosim.config.recompute import Again, read_recompute
from zerosim.errors import InputError, did_you_mean
from zerosim.tensor.discarded import discard
from zerosim.tensor.tensor import Tensor

SAVES = ("lean", "megatron")
ATTENTIONS = ("eager", "flash")


@dataclass(frozen=True, slots=True)
class ActivationPolicy:
    """What is kept from forward to backward.

    saves       'lean': what zerosim's own kernels need; 'megatron': what Megatron's keep (2205.05198, section 4)
    attention   'eager': scores are materialised (B, H, T, T); 'flash': they never are
    fp32_softmax  eager: the softmax of half types is kept in fp32, as where a framework has no fused kernel for it
    recompute   'none'; 'selective': the attention core runs again in backward, or the parts that it lists; 'full':
                whole blocks do
    again       what `recompute` says, read

    `saves`, `recompute` and `fp32_softmax` change no bit of any result. 'flash' adds in another order than 'eager'
    and is within rounding of it. Raises: InputError for a name that is none of these.
    """

    saves: str = "lean"
    attention: str = "eager"
    recompute: str = "none"
    fp32_softmax: bool = False
    again: Again = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, known in (("saves", SAVES), ("attention", ATTENTIONS)):
            value = getattr(self, name)
            if value not in known:
                hint = did_you_mean(value, known, "")
                raise InputError(f"{name} {value!r}: expected one of {', '.join(known)}{'; ' * bool(hint)}{hint}")
        object.__setattr__(self, "again", read_recompute(self.recompute, self.attention))

    def run(self, part: str, layer: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """layer(*inputs), which is `part` of a block; where that runs again, nobody keeps the result."""
        return discard(part, layer, *inputs) if part in self.again.parts else layer(*inputs)


DEFAULT = ActivationPolicy()
