"""Tensor and sequence parallelism: the boundaries of cut weights, and gradients that several ranks share."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.analysis import formulas
from zerosim.analysis.capability import Capability, Forms, Key, Sent, Step
from zerosim.analysis.facts import all_reduce_times, frozen_of, is_by_pairs, is_divided
from zerosim.config import RunConfig
from zerosim.parallel.tensor import vocab_padding
from zerosim.units import counted


def _forms(config: RunConfig, step: Step, sent: Sent) -> Forms:
    size, model, parallel = config.mesh.tp, config.model, config.parallel
    if size == 1:
        return
    copies = max(1, size // model.kv_heads) if model.has_blocks else 1
    shared = formulas.shared_grads(copies=copies, divided=is_divided(config), pairs=is_by_pairs(config))
    yield Key("sent", "all_reduce", "tp"), shared
    times, again, frozen = all_reduce_times(config, size), config.memory.recompute, frozen_of(config) is not None
    side_by_side = model.has_blocks and model.decoder.block.parallel
    if not model.has_blocks:
        by_operation = formulas.flat_parallel(all_reduce=times)
    elif model.is_second:
        by_operation = formulas.second_parallel(again, all_reduce=times)
    elif parallel.sequence_parallel:
        by_operation = formulas.sequence_parallel(
            again, all_reduce=times, keep_gathered=parallel.keep_gathered, frozen=frozen, side_by_side=side_by_side
        )
    else:
        by_operation = formulas.tensor_parallel(again, all_reduce=times, frozen=frozen, side_by_side=side_by_side)
    for name, form in by_operation.items():
        yield Key("exchanged", name, "tp"), form
    if model.has_blocks and model.decoder.block.qk_norm == "all":
        yield Key("exchanged", "all_reduce", "tp"), formulas.head_norm_sums(all_reduce=times, frozen=frozen)


def _about(config: RunConfig) -> Iterator[str]:
    """Yield how weights are cut, and which parts are held twice."""
    size, model, parallel = config.mesh.tp, config.model, config.parallel
    if size == 1 or not model.has_blocks:
        return
    rest = "norms, dropout and residuals by rows" if parallel.sequence_parallel else "norms are whole on each"
    yield f"Linear maps, attention heads and the vocabulary are cut over {size} ranks; {rest}."
    if model.kv_heads < size:
        yield (
            f"The {model.kv_heads} key-value heads are fewer than the {size} ranks: {size // model.kv_heads} "
            "neighbours hold a copy of each, and add up its gradients."
        )
    if padding := _padding(config):
        yield f"The token table has {counted(padding, 'row')} of padding, outside of the softmax."


def _part(config: RunConfig) -> Iterator[str]:
    if config.mesh.tp > 1 and config.model.has_blocks:
        yield "Norms, positions and row-parallel biases are whole on each rank of tp."
        if padding := _padding(config):
            yield f"The token table has {padding:,} rows of padding."


def _padding(config: RunConfig) -> int:
    return vocab_padding(config.model.vocab, config.mesh.tp, padded=config.parallel.pad_vocab)


CAPABILITY = Capability(forms=_forms, notes={"about": _about, "part": _part}, axes={"tp": "t"})
