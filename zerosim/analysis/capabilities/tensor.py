"""Tensor and sequence parallelism: the boundaries of cut weights, and gradients that several ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

from zerosim.analysis import formulas
from zerosim.analysis.capability import Capability, Forms, Key, Sent, Step, when
from zerosim.analysis.facts import all_reduce_times, experts_in, frozen_of, is_by_pairs, is_divided
from zerosim.analysis.formulas.form import Form, symbol
from zerosim.analysis.reach import inputs_of_heads
from zerosim.analysis.recompute import recompute_of, tiles_rows
from zerosim.config import RunConfig
from zerosim.config.presets.recipes import PYTORCHS
from zerosim.functional.liger_loss import LIGER
from zerosim.parallel.tensor import vocab_padding
from zerosim.units import counted


def _forms(config: RunConfig, step: Step, sent: Sent) -> Forms:
    size, model, again = config.mesh.tp, config.model, recompute_of(config)
    if size == 1:
        return
    copies = max(1, size // model.kv_heads) if model.has_blocks else 1
    shared = formulas.shared_grads(copies=copies, divided=is_divided(config), pairs=is_by_pairs(config))
    yield Key("sent", "all_reduce", "tp"), shared
    times, frozen = all_reduce_times(config, size), frozen_of(config) is not None
    how = {
        "frozen": frozen,
        "side_by_side": model.has_blocks and model.decoder.block.parallel,
        "tiled": tiles_rows(config),
    }
    if not model.has_blocks:
        by_operation = formulas.flat_parallel(all_reduce=times)
    elif model.is_second:
        by_operation = formulas.second_parallel(again, all_reduce=times)
    elif divides_rows(config):
        by_operation = formulas.sequence_parallel(
            again,
            all_reduce=times,
            keep_gathered=keeps_gathered(config),
            head_again=config.memory.loss not in LIGER,
            experts=experts_in(config),
            inputs=_inputs(config),
            **how,
        )
    else:
        by_operation = formulas.tensor_parallel(
            again, all_reduce=times, experts=model.has_experts, inputs=_inputs(config), **how
        )
    for name, form in by_operation.items():
        yield Key("exchanged", name, "tp"), form
    if model.has_blocks and model.decoder.block.qk_norm == "all":
        yield Key("exchanged", "all_reduce", "tp"), formulas.head_norm_sums(all_reduce=times, frozen=frozen)


def _inputs(config: RunConfig) -> formulas.Inputs:
    """Return the inputs of attention's f: of latent attention narrow ones."""
    if not config.model.is_latent:
        return formulas.WIDE
    each = [(width, place) for width, _, place in inputs_of_heads(config.model)]
    f, read = (sum((width for width, place in each if place or not alone), Fraction(0)) for alone in (False, True))
    return formulas.Inputs(f, read)


def divides_rows(config: RunConfig) -> bool:
    """Return whether tp's ranks divide the rows between cut weights: sequence parallelism."""
    return config.parallel.sequence_parallel


def repeats_rows(config: RunConfig) -> bool:
    """Return whether each of tp's ranks has all rows between cut weights."""
    return config.mesh.tp > 1 and not divides_rows(config)


def all_reduces(config: RunConfig) -> int:
    """Return the multiple of its payload that an all-reduce over tp moves, before the factor (t-1)/t."""
    return all_reduce_times(config, config.mesh.tp)


def keeps_gathered(config: RunConfig) -> bool:
    """Return whether such gathered rows are saved for backward."""
    return config.parallel.keep_gathered


def heads_on_rank(config: RunConfig) -> Form:
    """Return the part of the heads that a rank has."""
    whole = Form() + 1
    return whole / symbol("t") if config.mesh.tp > 1 else whole


def whole_rows(config: RunConfig) -> Iterator[Mapping[str, bool]]:
    """Yield the values that turn sequence parallelism off."""
    if divides_rows(config):
        yield {"sequence_parallel": False, "keep_gathered": False}


def on_ranks(config: RunConfig, tp: int, rows: bool | None) -> dict[str, bool]:
    """Return what follows from so many ranks of tp, with or without divided `rows` (None: as the configuration has
    them). A vocabulary that they do not divide is padded."""
    parallel, uneven = config.parallel, config.model.has_blocks and config.model.vocab % tp > 0
    rows = tp > 1 and (parallel.sequence_parallel if rows is None else rows)
    return {
        "sequence_parallel": rows,
        "keep_gathered": rows and parallel.keep_gathered,
        "pad_vocab": tp > 1 and (parallel.pad_vocab or uneven),
    }


def _about(config: RunConfig) -> Iterator[str]:
    """Yield how weights are cut, and which parts are held twice."""
    size, model = config.mesh.tp, config.model
    if size == 1 or not model.has_blocks:
        return
    rest = "norms, dropout and residuals by rows" if divides_rows(config) else "norms are whole on each"
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


def _warned(config: RunConfig) -> list[str]:
    return when(
        config.mesh.tp > 1 and config.model.has_blocks and config.parallel.recipe in PYTORCHS,
        "PyTorch's DTensor keeps the token table's whole gradient on every rank of tp until zero_grad, 12/T + 4 bytes "
        "a parameter with fp32 weights and Adam. Here the gradient is cut like the table, as in Megatron",
    )


CAPABILITY = Capability(forms=_forms, notes={"about": _about, "part": _part, "warned": _warned}, axes={"tp": "t"})
