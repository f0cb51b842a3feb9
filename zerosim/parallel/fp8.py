"""Products of the blocks' linear maps in 8 bits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from zerosim.config import RunConfig
from zerosim.config.parts.parallel import gathers_params
from zerosim.functional.fp8_recipes import History, Products, deepseek, torchao, transformer_engine
from zerosim.nn.halves import is_matrix_of_map
from zerosim.parallel.fp8_stored import coded_shards
from zerosim.parallel.pieces import Pieces, Place
from zerosim.placement.spec import FlatSpec, WeightSpec, is_block
from zerosim.placement.stages import number_of


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add how maps multiply."""
    fp8 = config.fp8
    if not fp8.is_on:
        return made
    products = products_of(config)
    exact = exact_blocks(config)
    group = replace(made.group, products=lambda number: None if number in exact else products)
    made = _storing(made, place) if products.stores_codes else made
    return made._replace(group=group)


def _storing(made: Pieces, place: Place) -> Pieces:
    groups = place.groups
    return made if groups is None else made._replace(shards=lambda updater: coded_shards(groups))


def exact_blocks(config: RunConfig) -> frozenset[int]:
    """Return the numbers of the blocks that are not in 8 bits."""
    fp8, layers = config.fp8, config.model.depths[0]
    return frozenset([*range(fp8.exact_first), *range(layers - fp8.exact_last, layers)])


def multiplies_in_8_bits(unit: str, weight: WeightSpec, exact: Collection[int]) -> bool:
    """Return whether a weight of this unit is a linear map's whose products are in 8 bits."""
    return is_matrix_of_map(weight.name, weight.shape, weight.role) and is_block(unit) and number_of(unit) not in exact


def has_codes(config: RunConfig, flat: FlatSpec) -> bool:
    """Return whether a flat buffer's weights are stored as codes of 8 bits, beside masters."""
    if not (config.fp8.gather or config.fp8.param_gather) or not flat.weights:
        return False
    return multiplies_in_8_bits(flat.unit, flat.weights[0], exact_blocks(config))


def products_of(config: RunConfig) -> Products:
    """Return the products of the run's recipe. Weights that stage 3 frees have no codes that stay; adapters read their
    map's input as numbers, so these are gathered."""
    made = _of_library(config)
    gathers = made.gathers_codes and not config.tuning.is_on
    return made._replace(gathers_codes=gathers, stores_codes=config.fp8.gather or config.fp8.param_gather)


def _of_library(config: RunConfig) -> Products:
    fp8 = config.fp8
    if fp8.library == "torchao":
        return torchao(fp8.kind, fp8.rounding, exact_wgrad=fp8.exact_wgrad)
    if fp8.library == "deepseek":
        return deepseek()
    history = History(fp8.amax_history, fp8.amax_algo)
    caches = not gathers_params(config.parallel)
    return transformer_engine(fp8.kind, fp8.form, history, fp8.margin, exact_wgrad=fp8.exact_wgrad, caches=caches)
