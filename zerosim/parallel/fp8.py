"""Products of the blocks' linear maps in 8 bits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from zerosim.config import RunConfig
from zerosim.config.parts.tuning import is_adapter
from zerosim.functional.fp8_recipes import History, Products, deepseek, torchao, transformer_engine
from zerosim.parallel.pieces import Pieces, Place
from zerosim.placement.spec import WeightSpec, is_block


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add how maps multiply. What a map keeps from step to step is allocated in its first use, so that blocks' records
    are not repeated then."""
    fp8 = config.fp8
    if not fp8.is_on:
        return made
    products = products_of(config)
    exact = exact_blocks(config)
    group = replace(made.group, products=lambda number: None if number in exact else products)
    keeps = products.caches or products.history is not None
    return made._replace(group=group, repeats=made.repeats and not keeps and not exact)


def exact_blocks(config: RunConfig) -> frozenset[int]:
    """Return the numbers of the blocks that are not in 8 bits."""
    fp8, layers = config.fp8, config.model.layers
    return frozenset([*range(fp8.exact_first), *range(layers - fp8.exact_last, layers)])


def is_in_8_bits(unit: str, weight: WeightSpec, exact: Collection[int]) -> bool:
    """Return whether a weight of this unit is a linear map's whose products are in 8 bits."""
    role = weight.role
    is_map = role is not None and role.is_map and len(weight.shape) == 2 and not is_adapter(weight.name)
    return is_map and is_block(unit) and int(unit.rpartition(".")[2]) not in exact


def products_of(config: RunConfig) -> Products:
    """Return the products of the run's recipe. Weights that stage 3 frees have no codes that stay; adapters read their
    map's input as numbers, so these are gathered."""
    made = _of_library(config)
    return made._replace(gathers_codes=made.gathers_codes and not config.tuning.is_on)


def _of_library(config: RunConfig) -> Products:
    fp8 = config.fp8
    if fp8.library == "torchao":
        return torchao(fp8.kind, fp8.rounding, exact_wgrad=fp8.exact_wgrad)
    if fp8.library == "deepseek":
        return deepseek()
    history = History(fp8.amax_history, fp8.amax_algo)
    caches = config.parallel.zero_stage < 3
    return transformer_engine(fp8.kind, fp8.form, history, fp8.margin, exact_wgrad=fp8.exact_wgrad, caches=caches)
