"""A run in sentences: how the model is cut, what was trained, what a ZeRO stage did. How to read the tables:
`notes.py`.

Text only, no layout. Ψ are the whole model's parameters, Ψ_r those of each rank of a pipeline stage if that is a part
of them. Ratios to DDP are of the closed forms, which the tables compare with the count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from zerosim.analysis import formulas
from zerosim.analysis.capabilities import note_of
from zerosim.analysis.capabilities.experts import psi_of
from zerosim.analysis.checks import Checks
from zerosim.analysis.compare import last_whole_step
from zerosim.analysis.cost import cost_of
from zerosim.analysis.expect.closed_forms import active_of, parameters_of
from zerosim.analysis.facts import all_reduce_times, frozen_of, is_owned
from zerosim.analysis.forms import divided, forms, of
from zerosim.analysis.shares import Placed, alike_stages
from zerosim.analysis.weights import passes_of
from zerosim.config import RunConfig
from zerosim.config.parts.mtp import further_blocks
from zerosim.placement.axes import place_of
from zerosim.placement.mesh import DATA, EXPERT_CUTS, SHARES
from zerosim.report.look import spread
from zerosim.report.names import OPTIMIZERS, STAGES, counted
from zerosim.train.check_trained import num_trained
from zerosim.train.result import RunResult


# -- ranks, stages, parts ---------------------------------------------------------------------------
def headline(config: RunConfig, of: str = "") -> str:
    """Return the ZeRO stage, the ranks, `of` which device, and their mesh."""
    where = f": {of_mesh}" if (of_mesh := shape(config)) else ""
    if config.world.transport == "mpi":
        processes = config.mesh.ranks // config.world.ranks_per_process
        where += f", in {counted(processes, 'process', 'processes')} over MPI"
    if config.world.backend == "cuda":
        where += ", on GPUs"
    return f"{STAGES[config.parallel.zero_stage]} on {counted(config.mesh.ranks, 'rank')}{of}{where}"


def shape(*configs: RunConfig) -> str:
    """Return 'pp 8 x dp 8 x tp 16': the axes of a mesh that have more than one rank; '' if ZeRO's is the only one. For
    runs that differ 'dp 2 to 128 x tp 2'."""
    found = {axis: {config.mesh.axes.size(axis) for config in configs} - {1} for axis in configs[0].mesh.axes.sizes}
    sizes = {axis: spread(sorted(several)) for axis, several in found.items() if several}
    names = {} if "dp_replicate" in sizes else {"dp_shard": "dp"}
    dense, experts = (
        " x ".join(f"{names.get(axis, axis)} {size}" for axis, size in sizes.items() if (axis in EXPERT_CUTS) == own)
        for own in (False, True)
    )
    return "" if sizes.keys() <= {"dp_shard"} else ", experts ".join(filter(None, (dense, experts)))


def stage_name(run: range) -> str:
    """Return 'stages 1 to 6', a run of pipeline stages."""
    return f"stage {run[0]}" if len(run) == 1 else f"stages {run[0]} to {run[-1]}"


def by_stage(values: Sequence[int | Fraction]) -> str:
    """Return '5 on stage 0, 4 on stages 1 to 6'; one number if all stages have the same."""
    said = [f"{int(value):,}" if value == int(value) else f"{float(value):,.1f}" for value in values]
    if len(set(values)) == 1:
        return said[0]
    return ", ".join(f"{said[run[0]]} on {stage_name(run)}" for run in alike_stages(values))


def place(result: RunResult, rank: int) -> str:
    """Return ' (pp 0, dp_shard 0, tp 0)', a rank's place in a mesh."""
    return f" ({place_of(result.layout.mesh, rank)})" if shape(result.config) else ""


def of_rank(found: Sequence[Checks]) -> Callable[[str], str]:
    """Return a formula of a rank's bytes: with Ψ_r for Ψ if that is a part of the parameters, with Ψ_d if it is all but
    experts."""
    letter = psi_of(found[0].of.held, is_part=holds_part(found))
    return lambda text: re.sub("Ψ(?!_)", letter, text)


def holds_part(found: Sequence[Checks]) -> bool:
    """Return whether a rank, before ZeRO divides anything, holds a part of the parameters."""
    return any(one.of.share.num_parameters != one.of.result.num_parameters for one in found)


# -- what was trained ---------------------------------------------------------------------------
def trained(result: RunResult) -> str:
    """Return which model was trained on what."""
    config = result.config
    steps = len(result.losses)
    source = config.data.tokens or config.data.file or "the packaged primer on ZeRO"
    return (
        f"{model_name(config)} of Ψ = {result.num_parameters:,} parameters{trained_of(result)} in "
        f"{pieces(result)}, in {config.precision.param_dtype} with "
        f"{OPTIMIZERS[config.optim.optimizer]}, trained for {counted(steps, 'step')} of "
        f"{config.global_batch:,} x {config.model.row_tokens:,} tokens "
        f"({steps * config.tokens:,} in all) of {source}."
    )


def trained_of(placed: Placed) -> str:
    """Return ' (4,096 of them trained, 1.8 %)' if some are frozen, and how many work for a token if not all do."""
    found = list[str]()
    if placed.config.model.has_experts:
        active = active_of(placed.config.model, further_blocks(placed.config.mtp))
        found.append(f"{active:,} active for a token, {100 * active / parameters_of(placed.config):.3g} %")
    if frozen_of(placed.config) is not None:
        trained = num_trained(placed.layout)
        found.append(f"{trained:,} of them trained, {100 * trained / placed.num_parameters:.3g} %")
    return f" ({'; '.join(found)})" if found else ""


def pieces(result: RunResult) -> str:
    """Return the model's flat buffers: '6 units', or '28 tensors in 16 modules'."""
    flats = result.layout.flats.values()
    if (piece := note_of(result.config, "piece")) == "unit":
        return counted(len(flats), piece)
    return f"{counted(len(flats), 'tensor')} in {counted(len({flat.module for flat in flats}), 'module')}"


def model_name(config: RunConfig) -> str:
    """Return 'A GPT', or the name that was asked for."""
    families = {"gpt": "A GPT", "llama": "A Llama", "mlp": "An MLP", "flat": "A flat model"}
    return families.get(config.model.name, config.model.name)


def notes_of_file(config: RunConfig) -> str:
    """Return what a config.json says that is not modelled, or was assumed; '' for other models."""
    model = config.model
    return " ".join(f"Model {model.name}: {note}." for note in model.notes) if model.is_of_file else ""


def learned(result: RunResult) -> str:
    """Return the first and the last loss, beside that of random guessing."""
    vocab, losses = result.config.model.vocab, result.mean_losses
    return (
        f"Loss {losses[0]:.3f} → {losses[-1]:.3f}. Random guessing over {vocab:,} tokens would score "
        f"ln {vocab:,} = {math.log(vocab):.3f}."
    )


def scaled(result: RunResult) -> str | None:
    """Return loss scale and skipped steps; None if neither occurs."""
    skipped = [step for step, report in enumerate(result.steps, result.first_step) if report.skipped]
    scales = [report.loss_scale for report in result.steps]
    if not skipped and scales[0] == scales[-1] == 1.0:
        return None
    first, last = (f"{scale:,.12g}" for scale in (scales[0], scales[-1]))
    scale = f"Loss scale {first}" + (f" → {last}" if last != first else " throughout")
    if not skipped:
        return f"{scale}; no step was skipped."
    which = ", ".join(str(step) for step in skipped[:8]) + (", ..." if len(skipped) > 8 else "")
    return (
        f"{scale}; {len(skipped)} of {counted(len(result.steps), 'step')} skipped because a gradient was not finite "
        f"(step {which}): such a step changes no weight."
    )


def dropped(result: RunResult) -> str | None:
    """Return how many choices of experts were dropped, if some were."""
    choices, lost = result.routed.choices, result.routed.dropped
    if not lost:
        return None
    return (
        f"Dropped: {lost:,} of {choices:,} choices of an expert, {100 * lost / choices:.3g} %, were beyond its "
        "capacity. Such a token goes on without that expert."
    )


def lost(result: RunResult) -> str | None:
    """Return how many updates left bf16 weights without masters unchanged."""
    if not result.lost_updates:
        return None
    share, kind = sum(result.lost_updates) / len(result.lost_updates), result.config.precision.rounding
    first, last = (f"{100 * float(result.lost_updates[step]):.3g} %" for step in (0, -1))
    after = {
        "nearest": "Such an update is lost: it is less than half a unit in the weight's last place",
        "stochastic": "On average none is lost: a weight moves by one unit as often as its updates add up to one unit",
        "kahan": "None is lost: the compensation holds each weight's remainder",
    }[kind or "nearest"]
    stuck = ""
    if moments := result.stuck_moments:
        stuck = (
            f" Whatever the rounding of weights, {100 * float(moments[-1]):.3g} % of Adam's second moments stayed as "
            "they were in the last step: each is rounded to the nearest and cannot fall by a thousandth of itself."
        )
    return (
        f"No fp32 masters, rounding {kind}: {100 * float(share):.3g} % of the weights stayed as they were in a step on "
        f"average ({first} in the first, {last} in the last) although their update was nonzero. {after}.{stuck}"
    )


# -- where and when ------------------------------------------------------------------------------
def traffic_title(result: RunResult) -> str:
    step = last_whole_step(result)
    if step is None:
        return "Traffic: every step was skipped, so there is no complete step to show"
    last = "the last" if step == result.last_step else "the last that was not skipped"
    with_it = ", with the estimate of curvature after it" if passes_of(result, step) > 1 else ""
    return f"Bytes sent per rank in step {step}, {last}{with_it}"


def moment(step: int, phase: str, unit: str) -> str:
    """Return a moment in words, such as 'step 0, backward of h.3'."""
    if phase == "init":
        return f"at the start, while {unit or 'the model'} was placed"
    where = phase.replace("_", " ") + (f" of {unit}" if unit else "")
    return f"while the sample was drawn, {where}" if step < 0 else f"in step {step}, {where}"


# -- what the stage did -----------------------------------------------------------------------------
def closing(found: Sequence[Checks]) -> str:
    """Return what the ZeRO stage did, in a line or two."""
    result = found[0].of.result
    config, stage = result.config, result.config.parallel.zero_stage
    cost, grads = formulas.figure(cost_of(result).total), ", gradient" if cost_of(result).grad else ""
    if config.mesh.ranks == 1:
        return (
            "With one rank there is nothing to divide and nothing to send: every ZeRO stage is the same. Try --ranks 4."
        )
    mesh, of_part = config.mesh, ", of its part of the model," if holds_part(found) else ""
    if stage == 0:
        flags = _other_axes(config)
        return (
            f"DDP keeps every parameter{grads} and optimizer state{of_part} on every rank: {cost} bytes per "
            f"parameter, however many {'data ranks' if of_part else 'ranks'} there are. Stages 1, 2 and 3 divide them: "
            + " ".join(["zerosim compare --ranks", str(mesh.ranks), *(f"{flag} {flags[flag]}" for flag in flags)])
        )
    if why := undivided(config):
        return why
    shares = [one.of.share for one in found]
    ddp = sum((cost_of(result, share.stage).total * share.num_parameters for share in shares), Fraction(0))
    mine = sum((one.states[-1].formula or 0 for one in found), Fraction(0))
    owned = " on average" if is_owned(config) else ""
    less = (
        f"{float(ddp / mine):.3g} times fewer bytes than DDP's {cost}{'Ψ_r' if holds_part(found) else 'Ψ'}"
        if mine < ddp
        else "as many bytes as DDP, because this optimizer has no states to divide"
    )
    return f"{STAGES[stage]} keeps on each rank{owned} {note_of(config, 'holds')}: {less}. {_price(found)}"


def undivided(config: RunConfig) -> str:
    """Return why this ZeRO stage divides nothing; '' if it divides the model states, and for stage 0."""
    mesh, stage = config.mesh, config.parallel.zero_stage
    if stage == 0 or mesh.shards > 1:
        return ""
    if mesh.ranks == 1:
        return f"{STAGES[stage]} divides nothing on one rank."
    flags = _other_axes(config)
    used = " x ".join(f"{flag} {size}" for flag, size in flags.items())
    where = " in each replica" if mesh.dp_replicate > 1 else ""
    return (
        f"{STAGES[stage]} divides nothing here: it divides model states among data ranks, and {used} on {mesh.ranks:,} "
        f"ranks leaves one data rank{where}. Pass more --ranks, or a lower {' or '.join(flags)}."
    )


def _other_axes(config: RunConfig) -> dict[str, int]:
    """Return the flags of a mesh along which ZeRO divides nothing, with their sizes."""
    mesh = config.mesh
    sizes = {"--dp-replicate": mesh.dp_replicate, "--tp": mesh.tp, "--pp": mesh.pp}
    return {flag: size for flag, size in sizes.items() if size > 1}


def _price(found: Sequence[Checks]) -> str:
    """Return the stage's traffic compared with DDP's."""
    config = found[0].of.result.config
    data_ranks = config.mesh.axes.size(*DATA, *SHARES)
    plain = divided(config, formulas.volume(0, all_reduce=all_reduce_times(config, data_ranks)).total)
    sends = of(forms(config), "sent")
    zero = formulas.total(form for (_, use), form in sends.items() if use in ("states", "replicas"))
    ddp = sent = Fraction(0)
    for one in found:
        ddp += plain.at({**one.of.held, "N": data_ranks, "N_e": one.of.held.get("N_e", 1) * config.mesh.dp_replicate})
        sent += zero.at(one.of.held)
    ratio, states = sent / ddp, " over the data ranks" if holds_part(found) else ""
    if ratio == 1:
        return f"It sends exactly as much as DDP{states}."
    price = "The price: it sends" if ratio > 1 else "It sends"
    return f"{price} {float(ratio):.3g} times as much as DDP{states}."
