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
from zerosim.config import ModelConfig, RunConfig
from zerosim.dtypes import dtype
from zerosim.errors import InputError


def _formula_states(asked: Asked) -> Fraction:
    config = asked.config
    states = formulas.optimizer_step_states(
        config.parallel.zero_stage,
        _psi(config),
        config.mesh.dp_shard,
        cost_of(config),
        upcast_grads=asked.at == "gradients_upcast" and config.recipe_choices.upcast_grads,
    )
    return sum(states.values(), Fraction(0))


def _formula_volume(asked: Asked) -> Fraction:
    result, psi, ranks = asked.result, _psi(asked.config), several_ranks(asked.config)
    elements = volume_of(result).sent_bytes(psi, ranks, 1, 1, *gathers_of(result))
    return elements * Fraction(ranks, ranks - 1) / psi


def _formula_block(asked: Asked) -> Fraction:
    model, rows = _with_blocks(asked.config), asked.config.data.micro_batch
    recompute = asked.config.memory.recompute
    return formulas.block_activations(model.seq, rows, model.hidden, model.heads, ffn=model.ffn, recompute=recompute)


def _formula_largest(asked: Asked) -> Fraction:
    config, stage = asked.config, asked.config.parallel.zero_stage
    return formulas.largest_model(asked.memory, stage, config.mesh.dp_shard, cost_of(config), asked.mp)


def _twelve_elements(asked: Asked) -> int:
    model = _with_blocks(asked.config)
    return formulas.zero_paper_elements(model.seq, asked.config.data.micro_batch, model.hidden, model.layers)


def _checkpoint_elements(asked: Asked) -> Fraction:
    model, rows = _with_blocks(asked.config), asked.config.data.micro_batch
    return Fraction(formulas.checkpoint_elements(model.seq, rows, model.hidden, model.layers), asked.mp)


def _itemsize(asked: Asked) -> int:
    return dtype(asked.config.precision.param_dtype).itemsize


def _checkpoints_and_block(asked: Asked) -> Fraction:
    live = Fraction(_twelve_elements(asked), asked.config.model.layers)
    return (_checkpoint_elements(asked) + live) * _itemsize(asked)


def _calculator(asked: Asked) -> Fraction | None:
    known = {calculator.name: calculator for calculator in formulas.calculators()}
    config, calculator = asked.config, known[asked.calculator]
    return calculator.model_states(config.parallel.zero_stage, _psi(config), config.mesh.dp_shard)


def _megatron_parameters(asked: Asked) -> Fraction:
    model = _with_blocks(asked.config)
    return formulas.megatron_parameters(model.layers, model.hidden, model.vocab, model.positions)


def _twelve_l_h_squared(asked: Asked) -> Fraction:
    model = _with_blocks(asked.config)
    return Fraction(formulas.twelve_l_h_squared(model.layers, model.hidden))


def _psi(config: RunConfig) -> int:
    """Parameters by the formula of the model's family."""
    model = config.model
    if model.family == "flat":
        assert model.params is not None  # the configuration has filled it in
        return model.params
    if model.family == "gpt":
        sizes = model.layers, model.hidden, model.vocab, model.positions
        return formulas.gpt2_parameters(*sizes, ffn=model.ffn, tied=model.tie_embeddings)
    if model.family == "llama":
        of_llama = model.layers, model.hidden, model.ffn, model.vocab, model.heads, model.kv_heads
        return formulas.llama_parameters(*of_llama, tied=model.tie_embeddings)
    raise InputError(f"model {model.name}: no formula for its parameters; choose gpt, llama or flat, or count them")


def _with_blocks(config: RunConfig) -> ModelConfig:
    if not config.model.has_blocks:
        raise InputError(f"model {config.model.name} has no blocks: choose a gpt")
    return config.model


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
