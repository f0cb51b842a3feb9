"""Pipeline parallelism: messages between stages, a tied table's gradient, and the schedule in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from zerosim.analysis import formulas
from zerosim.analysis.capabilities.tensor import divides_rows
from zerosim.analysis.capability import Capability, Forms, Key, Sent, Step
from zerosim.analysis.facts import frozen_of, is_divided
from zerosim.analysis.formulas import Form
from zerosim.analysis.recompute import differ, period_of, recompute_of
from zerosim.analysis.weights import sizes
from zerosim.config import RunConfig
from zerosim.config.presets.recipes import PYTORCHS
from zerosim.errors import InputError
from zerosim.units import counted

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved 1F1B", "zb-h1": "ZB-H1", "zb-v": "ZB-V"}


def _forms(config: RunConfig, step: Step, sent: Sent) -> Forms:
    if config.mesh.pp == 1:
        return
    yield Key("sent", "all_reduce", "pp"), formulas.tied_grads(passes=step.passes, divided=is_divided(config))
    kind, frozen = config.parallel.pipeline_schedule, frozen_of(config) is not None
    form = formulas.boundary_sends(kind, divided=divides_rows(config), frozen=frozen)
    yield Key("exchanged", "send", "pp"), step.passes * form


def live_micro_batches(config: RunConfig) -> Form:
    """Return the live microbatches of the configuration's schedule, with its group size if that is not p."""
    together = config.micro_batch_group
    return formulas.live_micro_batches(config.parallel.pipeline_schedule, 0 if together == config.mesh.pp else together)


def bubble(config: RunConfig) -> Form:
    """Return the share of its busy time that a pipeline stage waits."""
    return formulas.bubble(config.parallel.pipeline_schedule)


def live_weights(config: RunConfig) -> Form:
    """Return the live microbatches, with those whose weight gradients are still to come."""
    return live_micro_batches(config) + formulas.live_weights(config.parallel.pipeline_schedule)


def live_inputs(config: RunConfig, stage: int, held: Mapping[str, int]) -> int | None:
    """Return the most inputs that a pipeline stage holds; None if live chunks have different numbers of blocks."""
    chunks, layers = config.parallel.num_chunks, config.layers_by_chunk(config.model.layers)
    sizes = [layers[number] for number in config.chunks.of_stage(stage)]
    if len(set(sizes)) > 1 or (chunks > 1 and (period_of(config) > 1 or differ(config))):
        return None
    return int(live_micro_batches(config).at(held) * held["r"]) // chunks


def layers_by_stage(config: RunConfig) -> list[int]:
    """Return how many layers each pipeline stage has."""
    by_chunk = config.layers_by_chunk(config.model.layers)
    return [sum(by_chunk[one] for one in config.chunks.of_stage(stage)) for stage in range(config.mesh.pp)]


def live_layers(config: RunConfig) -> float:
    """Return how many layers' activations of a microbatch one of the first two pipeline stages holds before its first
    backward, at least."""
    chunks, by_chunk, found = config.chunks, config.layers_by_chunk(config.model.layers), [0.0]
    for stage in range(min(2, config.mesh.pp)):
        layers = [by_chunk[one] for one in chunks.of_stage(stage)]
        live = live_micro_batches(config).at(sizes(config) | {"i": stage})
        found.append(min(float(live), len(layers) * config.data.accumulate) * min(layers))
    return max(found)


def begins_sooner(config: RunConfig) -> bool:
    """Return whether a stage may begin before the stages before it have had a microbatch's whole forward or wait for
    its whole backward."""
    return config.parallel.pipeline_schedule in ("interleaved", "zb-h1", "zb-v")


def fewest_micro_batches(config: RunConfig) -> int:
    """Return the fewest microbatches that the schedule takes."""
    return config.parallel.fewest_micro_batches(config.mesh.pp)


def layer_steps(config: RunConfig) -> tuple[int, int]:
    """Return two numbers: layers that divide evenly are multiples of the first minus the second."""
    return config.chunks.last + 1, 2 * config.parallel.balance_ends


def check_layers(config: RunConfig) -> None:
    """Check that the number of layers may change. Raises: InputError."""
    if config.parallel.stage_layers is not None:
        raise InputError(
            f"--find layers: --stage-layers {config.parallel.stage_layers} already sets the number of layers; leave "
            "it out"
        )


def schedule_name(config: RunConfig) -> str | None:
    """Return the schedule, as --pipeline takes it; None without a pipeline."""
    return config.parallel.pipeline_schedule if config.mesh.pp > 1 else None


def _about(config: RunConfig) -> Iterator[str]:
    """Yield how layers are cut, what a stage holds live and how long it waits."""
    if config.mesh.pp == 1:
        return
    mesh, kind, chunks = config.mesh.axes, config.parallel.pipeline_schedule, config.parallel.num_chunks
    model, times = config.model, config.data.accumulate
    layers, word = (model.layers, "layer") if model.has_blocks else (model.units or 0, "unit")
    layers_of = config.layers_by_chunk(layers)
    each = counted(layers_of[0], word) if len(set(layers_of)) == 1 else f"{_listed(layers_of)} {word}s"
    of = f"{mesh.pp} stages" + (f" x {chunks} chunks" if chunks > 1 else "")
    waits, live = bubble(config), str(live_micro_batches(config))
    live += " microbatches" if chunks == 1 else " chunks"
    if kind == "zb-h1":
        live += ", and what the weight gradients of i more read"
    yield (
        f"{SCHEDULES[kind]} over {of} of {each}: stage i from 0 holds the activations of up to "
        f"{live}, and waits {waits} = {waits.at(sizes(config))} of its busy time "
        f"(m = {times:,}, p = {mesh.pp}{f', v = {chunks}' if kind == 'interleaved' else ''})."
    )
    if kind in ("zb-h1", "zb-v"):
        yield _weights_later(config, formulas.own_span_bubble(kind).at(sizes(config)))


def _listed(sizes: Sequence[int]) -> str:
    """Return '1, 2, 1', or of a long list '0, 126 times 1, 0'."""
    if len(sizes) <= 8:
        return ", ".join(map(str, sizes))
    runs = ((size, len(list(same))) for size, same in groupby(sizes))
    return ", ".join(f"{times} times {size}" if times > 1 else str(size) for size, times in runs)


def _weights_later(config: RunConfig, own_span: object) -> str:
    """Return what zero bubble means, and its cost."""
    said = (
        f"This is the bubble by makespan: until the last stage is done. By own span, from a stage's first action to "
        f"its last, as the zero-bubble papers count it, it is {own_span}. Weight gradients run later than input "
        "gradients, so inputs and output gradients of linear maps are stored until then. The head's runs at once: no "
        "logits' gradient is kept."
    )
    if recompute_of(config) != "none":
        said += " A pending weight gradient stores the recomputed tensors, so recompute saves little here."
    return said


def _part(config: RunConfig) -> Iterator[str]:
    if config.mesh.pp > 1:
        yield "The lines are for pipeline stage 0."


def _warned(config: RunConfig) -> Iterator[str]:
    """Yield what PyTorch's own schedules refuse, and what they run more often (torch 2.13, distributed.pipelining)."""
    stages, times, kind = config.mesh.pp, config.data.accumulate, config.parallel.pipeline_schedule
    if stages == 1:
        return
    is_pytorchs, rounds = config.parallel.recipe in PYTORCHS, max(1, times // stages)
    if times % rounds and (kind == "zb-h1" or (kind == "interleaved" and is_pytorchs)):
        yield f"PyTorch refuses {times:,} microbatches in {rounds:,} rounds: --accumulate {times - times % rounds}"
    if kind == "1f1b" and is_pytorchs and times < stages:
        yield f"PyTorch's Schedule1F1B refuses fewer microbatches than pipeline stages: --accumulate {stages}"
    if is_pytorchs and config.model.has_blocks and config.model.tie_embeddings:
        yield (
            "PyTorch's torch.distributed.pipelining unties the token table without a word, and makes three of it. Here "
            "the first and the last pipeline stage add up their gradients, as in Megatron"
        )
    if kind in ("zb-h1", "zb-v") and recompute_of(config) != "none":
        yield (
            "PyTorch's zero bubble runs a checkpointed block again for each group of its parameters, eight times for "
            "two norms and four maps. Here it runs once, as it does in both under --pipeline 1f1b"
        )


CAPABILITY = Capability(forms=_forms, notes={"about": _about, "part": _part, "warned": _warned}, axes={"pp": ""})
