"""Llama's architecture as units: embed_tokens, layers.0 .. layers.L-1, norm, lm_head.

Parameters are named and laid out as in Hugging Face's LlamaForCausalLM. A tied head is a second unit
over embed_tokens' flat buffer, as in `gpt.py`; initial weights are drawn as there: normal with std
0.8 / sqrt(D), the output projections of the two branches divided by sqrt(2L). There is no dropout.

Source: arXiv 2302.13971, section 2.2; grouped-query attention, arXiv 2307.09288, section 2.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerosim.device.device import Device
from zerosim.dtypes import DType
from zerosim.errors import InputError
from zerosim.functional.policy import DEFAULT
from zerosim.models.model import Model
from zerosim.nn import ActivationPolicy, Group, Recompute, Tensors, Unit
from zerosim.nn.group import ONE_RANK
from zerosim.nn.llama import LlamaBlock, RMSNorm
from zerosim.tensor.flat import Flat


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a Llama: `heads` query heads share `kv_heads` key and value heads; `ffn` is SwiGLU's width.

    Raises: InputError for sizes that do not fit together.
    """

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 192
    vocab: int = 256
    tied: bool = False
    norm_eps: float = 1e-5
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)}: expected at least 1")
        if self.hidden % self.heads:
            raise InputError(f"heads {self.heads} do not divide hidden {self.hidden}: choose heads that do")
        if self.hidden // self.heads % 2:
            raise InputError(
                f"hidden {self.hidden} over {self.heads} heads is {self.hidden // self.heads} columns each: "
                "rotary positions turn pairs of columns, choose sizes that make it even"
            )
        if self.heads % self.kv_heads:
            raise InputError(f"kv_heads {self.kv_heads} do not divide heads {self.heads}: choose a divisor")
        for name in ("norm_eps", "rope_base"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise InputError(f"{name} {value}: expected a number more than 0")


def build_llama(
    config: LlamaConfig,
    device: Device,
    dtype: DType,
    grad_dtype: DType,
    policy: ActivationPolicy = DEFAULT,
    group: Group = ONE_RANK,
    padding: int = 0,
    *,
    by_module: bool = False,
) -> Model:
    """The units of a Llama, declared and not yet placed: no memory is taken. Full recompute wraps its blocks.

    A tensor-parallel `group` cuts them; the token table gets `padding` rows so that it can. `by_module`: the layers of
    blocks are leaf modules (`nn/leaf.py`), and each tensor has a flat buffer.
    """

    def flat(name: str) -> Flat | Tensors:
        return (Tensors if by_module else Flat)(name, device, dtype, grad_dtype)

    d = config.hidden
    std = (0.8 / d**0.5, 0.8 / (2 * config.layers * d) ** 0.5)
    embed = flat("embed_tokens")
    split = group.maps.split((config.vocab, d), 0, padding=padding)
    table = embed.declare("model.embed_tokens.weight", (config.vocab, d), std=std[0], split=split, embedding=True)
    units = [Unit("embed_tokens", embed, lambda ids: group.maps.embedding(ids.buffer, table, split))]

    for i in range(config.layers):
        layer = flat(f"layers.{i}")
        block = LlamaBlock(
            layer,
            f"model.layers.{i}",
            d,
            config.heads,
            config.kv_heads,
            config.ffn,
            config.norm_eps,
            config.rope_base,
            std,
            policy,
            group,
        )
        unit = Unit(layer.name, layer, block)
        units.append(Recompute(unit) if policy.again.wraps(i) else unit)

    norm = flat("norm")
    last = RMSNorm(norm, "model.norm", d, config.norm_eps, policy, summed=group.rows.is_cut)
    units.append(Unit("norm", norm, last))

    head = embed if config.tied else flat("lm_head")
    weight = table if config.tied else head.declare("lm_head.weight", (config.vocab, d), std=std[0], split=split)
    units.append(
        Unit("lm_head", head, lambda x: group.maps.column_linear(x, weight, transposed=True), reduces=not config.tied)
    )
    return Model(units, group, split, width=d, head_weight=weight)
