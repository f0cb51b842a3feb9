"""Closed forms of a run's values: the list FORMULAS, from `analysis/formulas`.

Nothing is counted in here. What a schedule gathers more or less often than Ψ is read off the units of the
run's model (`analysis/compare.py`), as the tables of a run do.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

from zerosim.analysis import formulas
from zerosim.analysis.compare import cost_of, gathers_of, volume_of
from zerosim.analysis.expect.asked import Asked, Quantity, several_ranks
from zerosim.config import RunConfig
from zerosim.dtypes import dtype
from zerosim.errors import InputError


def _formula_states(asked: Asked) -> Fraction:
    config = asked.config
    states = formulas.optimizer_step_states(
        config.stage,
        _psi(config),
        config.dp_shard,
        cost_of(config),
        upcast_grads=asked.at == "gradients_upcast" and config.schedule_choices.upcast_grads,
    )
    return sum(states.values(), Fraction(0))


def _formula_volume(asked: Asked) -> Fraction:
    result, psi, ranks = asked.result, _psi(asked.config), several_ranks(asked.config)
    elements = volume_of(result).sent_bytes(psi, ranks, 1, 1, *gathers_of(result))
    return elements * Fraction(ranks, ranks - 1) / psi


def _formula_block(asked: Asked) -> Fraction:
    c = _with_blocks(asked.config)
    return formulas.block_activations(c.seq, c.micro_batch, c.hidden, c.heads, ffn=c.ffn, recompute=c.recompute)


def _formula_largest(asked: Asked) -> Fraction:
    config = asked.config
    return formulas.largest_model(asked.memory, config.stage, config.dp_shard, cost_of(config), asked.mp)


def _twelve_elements(asked: Asked) -> int:
    c = _with_blocks(asked.config)
    return formulas.zero_paper_elements(c.seq, c.micro_batch, c.hidden, c.layers)


def _checkpoint_elements(asked: Asked) -> Fraction:
    c = _with_blocks(asked.config)
    return Fraction(formulas.checkpoint_elements(c.seq, c.micro_batch, c.hidden, c.layers), asked.mp)


def _itemsize(asked: Asked) -> int:
    return dtype(asked.config.precision).itemsize


def _checkpoints_and_block(asked: Asked) -> Fraction:
    live = Fraction(_twelve_elements(asked), asked.config.layers)
    return (_checkpoint_elements(asked) + live) * _itemsize(asked)


def _calculator(asked: Asked) -> Fraction | None:
    known = {calculator.name: calculator for calculator in formulas.calculators()}
    return known[asked.calculator].model_states(asked.config.stage, _psi(asked.config), asked.config.dp_shard)


def _megatron_parameters(asked: Asked) -> Fraction:
    c = _with_blocks(asked.config)
    return formulas.megatron_parameters(c.layers, c.hidden, c.vocab, c.positions)


def _twelve_l_h_squared(asked: Asked) -> Fraction:
    c = _with_blocks(asked.config)
    return Fraction(formulas.twelve_l_h_squared(c.layers, c.hidden))


def _psi(config: RunConfig) -> int:
    """Parameters by the formula of the model's family."""
    c = config
    if c.family == "flat":
        assert c.params is not None  # scenario has filled it in
        return c.params
    if c.family == "gpt":
        return formulas.gpt2_parameters(c.layers, c.hidden, c.vocab, c.positions, ffn=c.ffn, tied=c.tie_embeddings)
    if c.family == "llama":
        sizes = c.layers, c.hidden, c.ffn, c.vocab, c.heads, c.kv_heads
        return formulas.llama_parameters(*sizes, tied=c.tie_embeddings)
    raise InputError(f"model {c.model}: no formula for its parameters; choose gpt, llama or flat, or count them")


def _with_blocks(config: RunConfig) -> RunConfig:
    if config.family not in ("gpt", "llama"):
        raise InputError(f"model {config.model} has no blocks: choose a gpt")
    return config


FORMULAS: Mapping[str, Quantity] = MappingProxyType(
    {
        "model_states_bytes": Quantity(
            _formula_states, "bytes", "(2 + 2 + K) Ψ, divided as the stage does", takes=("at",)
        ),
        "sent_over_psi": Quantity(_formula_volume, "volume", "2Ψ, 2Ψ, 2Ψ, 3Ψ with accumulation and recipe"),
        "block_activation_bytes": Quantity(_formula_block, "bytes", "34sbh + 5as²b of arXiv 2205.05198"),
        "parameters": Quantity(lambda asked: Fraction(_psi(asked.config)), "count", "by the family's formula"),
        "largest_model": Quantity(
            _formula_largest, "count", "memory x mp / bytes per parameter", needs=("memory",), takes=("mp",)
        ),
        "zero_activation_bytes": Quantity(
            lambda asked: Fraction(_twelve_elements(asked) * _itemsize(asked)), "bytes", "12 hbsL elements"
        ),
        "checkpoint_elements": Quantity(_checkpoint_elements, "count", "hbsL elements, over mp", takes=("mp",)),
        "checkpoint_bytes": Quantity(
            lambda asked: _checkpoint_elements(asked) * _itemsize(asked),
            "bytes",
            "hbsL elements, over mp",
            takes=("mp",),
        ),
        "checkpoints_and_block_bytes": Quantity(
            _checkpoints_and_block, "bytes", "hbsL elements and the 12 hbs of one live block"
        ),
        "megatron_parameters": Quantity(_megatron_parameters, "count", "12Lh² (1 + 13/(12h) + (V+s)/(12Lh))"),
        "twelve_l_h_squared": Quantity(_twelve_l_h_squared, "count", "12Lh²"),
        "calculator": Quantity(_calculator, "bytes", "a published calculator's rule", needs=("calculator",)),
    }
)
