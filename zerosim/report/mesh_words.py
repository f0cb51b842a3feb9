"""What is said of a mesh: its shape, its pipeline, what ranks hold in copies, what a ZeRO stage costs there.

Text only, no layout. On a mesh Ψ_r are the parameters that each rank of a pipeline stage holds; Ψ is the whole model's.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.analysis import formulas
from zerosim.analysis.forms import is_owned
from zerosim.analysis.letters import exchanged, letters_of, sizes, volume_of
from zerosim.analysis.shares import alike_stages, extra_of, is_mesh, shared_grads, shares_of
from zerosim.config import RunConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.parallel.tensor import vocab_padding
from zerosim.report.names import STAGES, counted
from zerosim.train.result import RunResult

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved 1F1B", "zb-h1": "ZB-H1", "zb-v": "ZB-V"}


def shape(config: RunConfig) -> str:
    """'pp 8 x dp 8 x tp 16': the axes of a mesh; those of one rank are left out."""
    mesh = config.mesh.axes
    names = {"dp_shard": "dp"} if mesh.dp_replicate == 1 else {}
    return " x ".join(f"{names.get(axis, axis)} {size}" for axis, size in mesh.sizes.items() if size > 1)


def stage_name(run: range, pp: int) -> str:
    """'stages 1 to 6'; without a pipeline every rank is alike."""
    if pp == 1:
        return "each rank"
    return f"stage {run[0]}" if len(run) == 1 else f"stages {run[0]} to {run[-1]}"


def by_stage(values: Sequence[int], where: str = "on") -> str:
    """'5 on stage 0, 4 on stages 1 to 6'; one number where all stages have the same."""
    if len(set(values)) == 1:
        return f"{values[0]:,}"
    runs = alike_stages(values)
    return ", ".join(f"{values[run[0]]:,} {where} {stage_name(run, len(values))}" for run in runs)


def place(result: RunResult, rank: int) -> str:
    """' (pp 0, dp_shard 0, tp 0)', where a rank of a mesh stands."""
    text = result.layout.mesh.place(rank) if is_mesh(result.config) else ""
    return f" ({text})" if text else ""


def about(config: RunConfig) -> str:
    """How the model is cut and run, and what of it is held twice."""
    mesh, parallel, said = config.mesh.axes, config.parallel, []
    if mesh.pp > 1:
        said.append(_pipeline(config))
    if mesh.tp > 1 and config.model.has_blocks:
        cut = f"Linear maps, attention heads and the vocabulary are cut over {mesh.tp} ranks"
        rest = "norms, dropout and residuals by rows" if parallel.sequence_parallel else "norms are whole on each"
        said.append(f"{cut}; {rest}.")
        if config.model.kv_heads < mesh.tp:
            said.append(
                f"The {config.model.kv_heads} key-value heads are fewer than the {mesh.tp} ranks: "
                f"{mesh.tp // config.model.kv_heads} neighbours hold a copy of each, and add up its gradients."
            )
        if padding := vocab_padding(config.model.vocab, mesh.tp, padded=parallel.pad_vocab):
            said.append(f"The token table has {counted(padding, 'row')} of padding, outside of the softmax.")
    if mesh.pp > 1 and config.parallel.zero_stage >= 2:
        said.append(_zero_in_a_pipeline(config))
    return " ".join(said)


def kept_inputs(config: RunConfig) -> str:
    """How recomputed blocks keep their inputs, where it is not whole and on the device."""
    memory, t = config.memory, config.mesh.tp
    if memory.partition_activations and not config.partitions_inputs:
        waits = " They wait on the host." if memory.cpu_checkpointing else ""
        return (
            "Warning: partition_activations changes nothing here. Under sequence parallelism a rank has 1/t of a "
            f"block's input to begin with, and nothing is left to cut.{waits}"
        )
    if config.partitions_inputs:
        name, where = ("Pa+cpu", " in the host's memory") if memory.cpu_checkpointing else ("Pa", "")
        return (
            f"ZeRO-R's {name}: of a block's input each of {t} ranks keeps 1/{t}{where}, and gathers the whole before "
            "the block runs again."
        )
    return "Blocks' inputs wait in the host's memory until backward." if memory.cpu_checkpointing else ""


def _pipeline(config: RunConfig) -> str:
    mesh, kind, chunks = config.mesh.axes, config.parallel.pipeline_schedule, config.parallel.num_chunks
    model, times = config.model, config.data.accumulate
    layers, word = (model.layers, "layer") if model.has_blocks else (model.units or 0, "unit")
    each_chunk = config.layers_by_chunk(layers)
    each = counted(each_chunk[0], word)
    if len(set(each_chunk)) > 1:
        each = f"{', '.join(map(str, each_chunk))} {word}s"
    of = f"{mesh.pp} stages" + (f" x {chunks} chunks" if chunks > 1 else "")
    bubble, own_span = formulas.bubble(kind), formulas.own_span_bubble(kind).at(sizes(config))
    live = f"{formulas.live_micro_batches(kind)} {'micro-batches' if chunks == 1 else 'chunks'}"
    if kind == "zb-h1":
        live += ", and what the weight gradients of i more read"
    said = (
        f"{SCHEDULES[kind]} over {of} of {each}: stage i from 0 holds the activations of up to "
        f"{live}, and waits {bubble} = {bubble.at(sizes(config))} of the time that its slots take "
        f"(m = {times:,}, p = {mesh.pp}{f', v = {chunks}' if kind == 'interleaved' else ''})."
    )
    return f"{said} {_weights_later(config, own_span)}" if kind in ("zb-h1", "zb-v") else said


def _weights_later(config: RunConfig, own_span: object) -> str:
    """What zero bubble means, and what it costs."""
    said = (
        f"This is the bubble by makespan, until the last stage is done. By own span, from a stage's first action to "
        f"its last, as the zero-bubble papers count it, it is {own_span}. Weight gradients run later than input "
        "gradients, and keep inputs and output gradients of linear maps until then. The head's runs at once: no "
        "logits' gradient is kept."
    )
    if config.memory.recompute != "none":
        said += " A pending weight gradient keeps what was recomputed: recompute saves little here."
    return said


def _zero_in_a_pipeline(config: RunConfig) -> str:
    """What stages 2 and 3 cost where micro-batches are many."""
    times, stage = config.data.accumulate, config.parallel.zero_stage
    gathers = f", and gathers parameters for each forward and backward, {2 * times:,} times" if stage == 3 else ""
    if stage == 3 and not config.gathering.reshard_after_forward:
        gathers = f", and gathers parameters {counted(times, 'time')}"
    return (
        f"{STAGES[stage]} in a pipeline reduces gradients once per micro-batch, {counted(times, 'time')} a step, where "
        f"ZeRO-1 does once{gathers}. DeepSpeed refuses ZeRO-2 and 3 with its PipelineEngine; Megatron uses ZeRO-1."
    )


def states_note(result: RunResult, parts: str) -> str:
    """How to read the formula of the model states; `parts` is what a parameter costs."""
    config, shares = result.config, shares_of(result)
    held = by_stage([share.num_parameters for share in shares], "on each rank of")
    note = f"{parts}; N = {config.mesh.shards:,}. Ψ_r = {held}; the whole model has Ψ = {result.num_parameters:,}."
    extras = [extra_of(result, share.stage) for share in shares]
    tp = config.mesh.tp
    if any(extra.replicated for extra in extras):
        note += f" Of Ψ_r, {by_stage([extra.replicated for extra in extras])} are whole on all {tp} ranks of tp."
    if any(extra.copied for extra in extras):
        copies = tp // config.model.kv_heads
        note += (
            f" {by_stage([extra.copied for extra in extras])} are keys' and values', of which {copies} ranks hold the "
            "same."
        )
    if any(extra.padding for extra in extras):
        note += f" Padding for tp, over its ranks: {by_stage([extra.padding for extra in extras])}."
    if any(share.ends for share in shares):
        note += " The tied table is on the first and on the last stage."
    if config.mesh.dp_replicate > 1:
        note += f" N ranks hold one of R = {config.mesh.dp_replicate:,} replicas together."
    return note + padding_note(result, "unit")


def padding_note(result: RunResult, what: str) -> str:
    """Why ranks hold more than the formula says, or some more than others; '' where they do not. `what` is cut."""
    has_padding = any(memory.marks["end_of_backward"].padding for memory in result.memory)
    whole = f" Whole {result.config.gathering.piece}s belong to ranks: the formula holds for the mean."
    note = whole if is_owned(result.config) else ""
    if has_padding and (block := OPTIMIZERS[result.config.optim.optimizer].block) > 1:
        why = f"Every tensor begins at a block of {block} elements, and slices end at one"
        return f"{note} {why}: the mean without the padding between them is compared."
    if has_padding:
        note += f" N does not divide every {what}, so slices are padded: the mean without padding is compared."
    return note


def traffic_note(result: RunResult) -> str:
    """What the letters of the volumes stand for, and which part of a volume a rank sends."""
    config, mesh, said = result.config, result.config.mesh.axes, []
    n, r, t, shares = mesh.shards, mesh.dp_replicate, mesh.tp, shares_of(result)
    if config.model.has_blocks or mesh.pp > 1:
        width = "h" if config.model.has_blocks else "V"
        said.append(f"bs{width} = {sizes(config)['bsh']:,} elements, one micro-batch between two layers")
    elif t > 1:
        said.append(f"V = {config.model.vocab:,}")
    factors = [("N", "dp_shard", n), ("R", "dp_replicate", r), ("t", "tp", t)]
    said += [f"on {axis} a rank sends ({x}-1)/{x} = {size - 1}/{size}" for x, axis, size in factors if size > 1]
    if mesh.pp > 1:
        said.append("on pp all that it hands on")
    shared = [shared_grads((result.layout.flats[name] for name in share.numels), t) for share in shares]
    for ranks in sorted({ranks for of in shared for ranks in of}):
        numels = by_stage([of.get(ranks, 0) for of in shared])
        said.append(
            f"S: {numels} elements of {_shared_by(config, ranks)}, whose gradients {ranks} ranks hold shares of"
        )
    if table := next((share.numels[share.ends] for share in shares if share.ends), 0):
        said.append(f"E = {table:,}, the table that the first and the last stage add up the gradient of (1/2 of it)")
    saved = [
        letters_of(result, share.stage)["U"] if "U" in volume_of(result, share.stage).total.symbols else 0
        for share in shares
    ]
    if any(saved):
        said.append(f"U = {by_stage(saved)}, elements of units that stay gathered because they are used next again")
    if any(sums := [sum(exchanged(result, share.stage)) for share in shares]):
        said.append(f"F = {by_stage(sums)}, the sums that {config.optim.optimizer} exchanges")
    return "; ".join(said) + "."


def _shared_by(config: RunConfig, ranks: int) -> str:
    """Whose gradients so many tensor-parallel ranks hold shares of."""
    model, tp = config.model, config.mesh.tp
    names = ["norms, positions and biases"] if ranks == tp and config.parallel.sequence_parallel else []
    names += ["copied key-value heads"] if model.kv_heads < tp and tp // model.kv_heads == ranks else []
    return " and ".join(names)


def nothing_to_divide(config: RunConfig) -> str:
    """Where each part of the model is held by one data rank."""
    axes = [f"--{axis}" for axis in ("tp", "pp") if getattr(config.mesh, axis) > 1]
    return (
        "One data rank holds each part of the model: ZeRO has nothing to divide, and every stage is the same. More "
        f"--ranks, or a lower {' or '.join(axes)}, make N larger."
    )


def ddp(config: RunConfig, each: str) -> str:
    """What stage 0 does on a mesh."""
    flags = [f"--{axis} {size}" for axis in ("tp", "pp") if (size := getattr(config.mesh, axis)) > 1]
    return (
        f"Data-parallel ranks keep all of their part of the model: {each} bytes for each of Ψ_r parameters, however "
        "many of them there are. Stages 1, 2 and 3 divide them: zerosim compare "
        f"{' '.join([f'--ranks {config.mesh.ranks}', *flags])}"
    )
