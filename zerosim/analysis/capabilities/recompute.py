"""Recompute and ZeRO-R: one block's activations, and blocks' inputs in parts or on the host."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.analysis import formulas
from zerosim.analysis.capabilities.experts import kept_routes
from zerosim.analysis.capabilities.tensor import divides_rows, keeps_gathered
from zerosim.analysis.capability import Capability, Forms, Key, Sent, Step, when
from zerosim.analysis.facts import frozen_of
from zerosim.analysis.formulas import Form
from zerosim.analysis.formulas.form import symbol
from zerosim.analysis.recompute import described, differ, recompute_of
from zerosim.config import RunConfig
from zerosim.config.parts.tuning import widens_norms
from zerosim.dtypes import dtype


def _forms(config: RunConfig, step: Step, sent: Sent) -> Forms:
    """Yield the forms of inputs and of one block; if every K-th block is recomputed, of a block that saves everything.
    The bytes saved for frozen maps depend on the maps, and have no form."""
    if config.mesh.tp > 1 and config.partitions_inputs:
        yield Key("exchanged", "all_gather", "tp"), formulas.input_gathers()
    if config.memory.cpu_checkpointing:
        divided = config.partitions_inputs or divides_rows(config)
        moved = step.passes * _inputs(formulas.inputs_moved(divided=divided), config)
        yield Key("copied", "device to host"), moved
        yield Key("copied", "host to device"), moved
    if config.model.has_blocks and frozen_of(config) is None:
        yield Key("kept", "block"), block_form(config)


def _inputs(form: Form, config: RunConfig) -> Form:
    """Return the form of all inputs where they are fp32: all but the first block's, which is if the table is normed."""
    if not config.model.has_blocks or not widens_norms(config.tuning, config.model.decoder.block):
        return form
    narrow = config.memory.again.wraps(0) and not has_wide_input(config)
    return 2 * form - form.where(r=1) if narrow else 2 * form


def has_wide_input(config: RunConfig) -> bool:
    """Return whether the first block's input is fp32 beside half-type weights: the result of a norm under autocast."""
    return widens_norms(config.tuning, config.model.decoder.block) and bool(config.model.decoder.table_norm)


def block_form(config: RunConfig, block: int = 0) -> Form:
    """Return the form of the activation bytes that this block saves. Queries of a part of a row have scores with all
    of its keys."""
    form = formulas.block_activations(
        recompute_of(config, block),
        sequence_parallel=divides_rows(config),
        keep_gathered=keeps_gathered(config),
        partitioned=config.partitions_inputs,
        on_host=config.memory.cpu_checkpointing,
        fp32_softmax=config.memory.fp32_softmax,
    )
    form = form.where(a=config.mesh.cp * symbol("a"))
    return form + kept_routes(config, block) if config.memory.again.wraps(block) else form


def nearest_form(config: RunConfig) -> Form:
    """Return a block's form or, where a premise fails, the nearest one: without scores that flash attention does not
    save, and scaled to the bytes of the parameters."""
    has_no_scores = config.memory.attention == "flash" and config.memory.recompute == "none"
    form = block_form(config.replace(recompute="selective") if has_no_scores else config)
    return form * dtype(config.precision.stored).itemsize / 2


def keeps_on_host(config: RunConfig) -> bool:
    """Return whether blocks' inputs wait on the host."""
    return config.memory.cpu_checkpointing


def block_parts(config: RunConfig) -> dict[str, Form]:
    """Return the parts that add up to a block's form; none where tp cuts or recompute leaves out some of them."""
    is_sum = config.mesh.tp == 1 and config.memory.recompute == "none"
    parts = formulas.block_parts(fp32_softmax=config.memory.fp32_softmax) if is_sum else {}
    return {name: part.where(a=config.mesh.cp * symbol("a")) for name, part in parts.items()}


def recomputes_all(config: RunConfig) -> bool:
    """Return whether every block is recomputed whole, so that each keeps its input alone."""
    return config.memory.again.every == 1


def _kept(config: RunConfig) -> Iterator[str]:
    """Yield how recomputed blocks store their inputs, if not whole and on the device."""
    memory, t = config.memory, config.mesh.tp
    if differ(config):
        yield f"Recompute: {described(config)}."
    if memory.partition_activations and not config.partitions_inputs:
        waits = " They wait on the host." if memory.cpu_checkpointing else ""
        yield (
            "Warning: partition_activations changes nothing here. Under sequence parallelism a rank has 1/t of a "
            f"block's input to begin with, and nothing is left to cut.{waits}"
        )
    elif config.partitions_inputs:
        name, where = ("Pa+cpu", " in the host's memory") if memory.cpu_checkpointing else ("Pa", "")
        yield (
            f"ZeRO-R's {name}: of a block's input each of {t} ranks keeps 1/{t}{where}, and gathers the whole before "
            "the block runs again."
        )
    elif memory.offload_activations:
        yield "The buffers that blocks save for backward wait in host memory."
    elif memory.cpu_checkpointing:
        yield "Blocks' inputs wait in host memory until backward."


def _explained(config: RunConfig) -> Iterator[str]:
    if config.memory.cpu_checkpointing:
        yield "Inputs wait in host memory."
    if config.memory.partition_activations and not config.partitions_inputs:
        yield "Pa changes nothing here: under sequence parallelism a rank already has only 1/t of the input."


def _again(config: RunConfig) -> Iterator[str]:
    memory = config.memory
    if memory.mlp_tile:
        yield f"Backward recomputes each feed-forward, {memory.mlp_tile:,} tokens at a time."
    if memory.again.every > 1:
        yield f"One block in {memory.again.every} is recomputed whole and stores only its input."
        yield "The line is for the other blocks."
    elif differ(config):
        yield f"Backward recomputes {described(config)}. The first line is for block 0."
    elif memory.recompute == "none":
        yield "Nothing else is recomputed." if memory.mlp_tile else "Nothing is recomputed."
    elif memory.again.every:
        yield "With full recompute a block stores only its input. Backward also holds one recomputed block at a time."
    else:
        yield f"Backward computes again: {', '.join(formulas.parts_again(memory.recompute))}."


def _moved(config: RunConfig) -> list[str]:
    memory = config.memory
    return when(memory.cpu_checkpointing, "kept inputs") + when(memory.offload_activations, "saved buffers")


def _premises(config: RunConfig) -> list[str]:
    return when(config.memory.mlp_tile > 0, "feed-forwards run in tiles of tokens")


CAPABILITY = Capability(
    forms=_forms,
    notes={
        "premises": _premises, "kept": _kept, "activations": _explained, "again": _again, "moved": _moved,
        "sources": lambda c: when(c.partitions_inputs or c.memory.cpu_checkpointing, "ZeRO, section 6.1"),
        "assumed": lambda c: [f"recompute {'by ranges of blocks' if differ(c) else c.memory.recompute}"],
        "roomier": lambda c: when(c.model.has_blocks and c.memory.recompute != "full", "--recompute full makes room"),
    },
)  # fmt: skip
