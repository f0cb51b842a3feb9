"""Which closed forms ZeRO++ and MiCS bring to a run, and what leaves a node: counted, and beside its form."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.analysis import formulas
from zerosim.analysis.formulas import Form
from zerosim.config import RunConfig
from zerosim.dtypes import dtype


def gathers_otherwise(config: RunConfig) -> bool:
    """Return whether parameters are gathered otherwise than by stage 3's all_gather among all ranks that hold
    shards."""
    gathering = config.gathering
    return gathering.quantized_weights or gathering.hierarchical_gather or config.mesh.secondary_shard > 0


def gathers_of(config: RunConfig, passes: int = 1) -> formulas.Gathers:
    """Return what stage 3 gathers in a step."""
    gathering, is_cut = config.gathering, config.mesh.pp > 1
    return formulas.gathers(
        micro_batches=passes * config.data.accumulate,
        tied=config.model.has_blocks and config.model.tie_embeddings,
        keep_last_unit=gathering.keep_last_unit and not is_cut,
        keep_root_units=gathering.keep_root_units,
        persistent=gathering.persistent_numel > 0,
        again=gathering.by_module,
        kept=passes if gathering.keep_last_unit and is_cut else 0,
        reshard_after_forward=gathering.reshard_after_forward,
    )


def params_sent(config: RunConfig, passes: int) -> Iterator[tuple[formulas.Operation, Form]]:
    """Yield the bytes of parameters that a rank sends per step, by operation and its group's purpose."""
    found: dict[formulas.Operation, Form] = {}
    for operation, form in formulas.params_sent(
        gathers_of(config, passes),
        param_bytes=dtype(config.precision.stored).itemsize,
        secondary=config.mesh.secondary_shard > 0,
        quantized=config.gathering.quantized_weights,
        hierarchical=config.gathering.hierarchical_gather,
    ):
        found[operation] = found.get(operation, Form()) + form
    yield from found.items()


def grads_sent(config: RunConfig, passes: int) -> Iterator[tuple[formulas.Operation, Form]]:
    """Yield the same for gradients that are sent as int4 codes."""
    reductions = passes * (config.data.accumulate if config.grads.sync else 1)
    yield from formulas.grads_sent(reductions=reductions, grad_bytes=dtype(config.precision.grad_dtype).itemsize)


def second(config: RunConfig) -> Form:
    """Return the bytes of hpZ's second shard on a rank."""
    gathering = config.gathering
    return formulas.secondary_states(
        dtype(config.precision.stored).itemsize,
        keep_root_units=gathering.keep_root_units,
        persistent=gathering.persistent_numel > 0,
    )
