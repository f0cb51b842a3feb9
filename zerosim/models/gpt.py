"""GPT-2's architecture as units: wte, wpe, h.0 .. h.L-1, ln_f, lm_head.

The token table is a unit of its own, so that a tied head can share exactly it: `lm_head` is then a
second unit over wte's flat buffer, gathered at each use and reduced once, after wte's backward.
Names and layouts are GPT-2's. Initial weights are normal with std 0.8 / sqrt(D), which is GPT-2's
0.02 at its largest width, 1600, and keeps narrow models from crawling; output projections of the two
branches are divided by sqrt(2L), as in GPT-2; biases are 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.device.device import Device
from zerosim.dtypes import DType
from zerosim.errors import InputError
from zerosim.functional.policy import DEFAULT
from zerosim.models.model import Model
from zerosim.nn import ActivationPolicy, Block, Dropout, Group, LayerNorm, Recompute, Tensors, Unit
from zerosim.nn.group import ONE_RANK
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import DropoutKeys


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a GPT. `seq` is the longest context: the number of learned positions. `ffn` None is 4 hidden.

    Raises: InputError for sizes that do not fit together.
    """

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    seq: int = 64
    vocab: int = 256
    tied: bool = True
    dropout: float = 0.0
    ffn: int | None = None
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq", "vocab", "ffn"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} {value}: expected at least 1")
        if self.hidden % self.heads:
            raise InputError(f"heads {self.heads} do not divide hidden {self.hidden}: choose heads that do")
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"dropout {self.dropout}: expected a chance in [0, 1)")


def build_gpt(
    config: GPTConfig,
    device: Device,
    dtype: DType,
    grad_dtype: DType,
    keys: DropoutKeys,
    policy: ActivationPolicy = DEFAULT,
    group: Group = ONE_RANK,
    padding: int = 0,
    *,
    by_module: bool = False,
) -> Model:
    """The units of a GPT, declared and not yet placed: no memory is taken. Full recompute wraps its blocks.

    A tensor-parallel `group` cuts them; the token table gets `padding` rows so that it can. `by_module`: the layers of
    blocks are leaf modules (`nn/leaf.py`), and each tensor has a flat buffer.
    """

    def flat(name: str) -> Flat | Tensors:
        return (Tensors if by_module else Flat)(name, device, dtype, grad_dtype)

    d = config.hidden
    std = (0.8 / d**0.5, 0.8 / (2 * config.layers * d) ** 0.5)
    wte = flat("wte")
    split = group.maps.split((config.vocab, d), 0, padding=padding)
    table = wte.declare("wte.weight", (config.vocab, d), std=std[0], split=split, embedding=True)
    units = [Unit("wte", wte, lambda ids: group.maps.embedding(ids.buffer, table, split))]

    wpe = flat("wpe")
    positions = wpe.declare("wpe.weight", (config.seq, d), std=std[0], summed=group.rows.is_cut, embedding=True)
    dropout = Dropout("embd", config.dropout, keys, group)
    units.append(Unit("wpe", wpe, lambda x: dropout(group.rows.add_positions(x, positions))))

    inner = config.ffn or 4 * d
    for i in range(config.layers):
        h = flat(f"h.{i}")
        block = Block(
            h,
            h.name,
            d,
            config.heads,
            std,
            config.dropout,
            keys,
            inner=inner,
            eps=config.eps,
            policy=policy,
            group=group,
        )
        unit = Unit(h.name, h, block)
        units.append(Recompute(unit) if policy.again.wraps(i) else unit)

    ln_f = flat("ln_f")
    units.append(
        Unit("ln_f", ln_f, LayerNorm(ln_f, "ln_f", d, eps=config.eps, policy=policy, summed=group.rows.is_cut))
    )

    head = wte if config.tied else flat("lm_head")
    weight = table if config.tied else head.declare("lm_head.weight", (config.vocab, d), std=std[0], split=split)
    units.append(
        Unit("lm_head", head, lambda x: group.maps.column_linear(x, weight, transposed=True), reduces=not config.tied)
    )
    return Model(units, group, split, width=d, head_weight=weight)
