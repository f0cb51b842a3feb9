"""Products of the blocks' linear maps in 8 bits."""

from __future__ import annotations

from dataclasses import replace

from zerosim.config import RunConfig
from zerosim.functional.fp8_recipes import History, Products, deepseek, torchao, transformer_engine
from zerosim.parallel.pieces import Pieces, Place


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add how maps multiply. What a map keeps from step to step is allocated in its first use, so that blocks' records
    are not repeated then."""
    fp8 = config.fp8
    if not fp8.is_on:
        return made
    products = products_of(config)
    exact = {*range(fp8.exact_first), *range(config.model.layers - fp8.exact_last, config.model.layers)}
    group = replace(made.group, products=lambda number: None if number in exact else products)
    keeps = products.caches or products.history is not None
    return made._replace(group=group, repeats=made.repeats and not keeps and not exact)


def products_of(config: RunConfig) -> Products:
    """Return the products of the run's recipe. Weights that stage 3 frees have no codes that stay."""
    fp8 = config.fp8
    if fp8.library == "torchao":
        return torchao(fp8.kind, fp8.rounding, exact_wgrad=fp8.exact_wgrad)
    if fp8.library == "deepseek":
        return deepseek()
    history = History(fp8.amax_history, fp8.amax_algo)
    stays = config.parallel.zero_stage < 3
    return transformer_engine(fp8.kind, fp8.form, history, fp8.margin, exact_wgrad=fp8.exact_wgrad, caches=stays)
