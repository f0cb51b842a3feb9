"""Pipeline parallelism: messages between stages, a tied table's gradient, and the schedule in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from zerosim.analysis import formulas
from zerosim.analysis.capability import Capability, Forms, Key, Sent, Step
from zerosim.analysis.facts import frozen_of, is_divided
from zerosim.analysis.formulas import Form
from zerosim.analysis.weights import sizes
from zerosim.config import RunConfig
from zerosim.units import counted

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved 1F1B", "zb-h1": "ZB-H1", "zb-v": "ZB-V"}


def _forms(config: RunConfig, step: Step, sent: Sent) -> Forms:
    if config.mesh.pp == 1:
        return
    yield Key("sent", "all_reduce", "pp"), formulas.tied_grads(passes=step.passes, divided=is_divided(config))
    parallel, frozen = config.parallel, frozen_of(config) is not None
    form = formulas.boundary_sends(parallel.pipeline_schedule, divided=parallel.sequence_parallel, frozen=frozen)
    yield Key("exchanged", "send", "pp"), step.passes * form


def live_micro_batches(config: RunConfig) -> Form:
    """Return the live microbatches of the configuration's schedule, with its group size if that is not p."""
    together = config.micro_batch_group
    return formulas.live_micro_batches(config.parallel.pipeline_schedule, 0 if together == config.mesh.pp else together)


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
    bubble, live = formulas.bubble(kind), str(live_micro_batches(config))
    live += " microbatches" if chunks == 1 else " chunks"
    if kind == "zb-h1":
        live += ", and what the weight gradients of i more read"
    yield (
        f"{SCHEDULES[kind]} over {of} of {each}: stage i from 0 holds the activations of up to "
        f"{live}, and waits {bubble} = {bubble.at(sizes(config))} of its busy time "
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
    if config.memory.recompute != "none":
        said += " A pending weight gradient stores the recomputed tensors, so recompute saves little here."
    return said


def _part(config: RunConfig) -> Iterator[str]:
    if config.mesh.pp > 1:
        yield "The lines are for pipeline stage 0."


CAPABILITY = Capability(forms=_forms, notes={"about": _about, "part": _part}, axes={"pp": ""})
