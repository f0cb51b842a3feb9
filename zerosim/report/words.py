"""What the numbers mean, in sentences: what was trained, what each kind of memory is, what a stage did.

Text only, no layout. Ratios to DDP are of the closed forms, which the tables compare with the count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from zerosim.analysis import forms, formulas
from zerosim.analysis.compare import check_states, last_whole_step
from zerosim.analysis.forms import all_reduce_times, is_by_pairs, is_owned
from zerosim.analysis.letters import exchanged, letters_of, passes_of, volume_of
from zerosim.analysis.shares import cost_of, is_mesh, shares_of
from zerosim.config import RunConfig
from zerosim.config.presets.optimizers import OPTIMIZERS as PRESETS
from zerosim.placement.mesh import DATA
from zerosim.report import mesh_words
from zerosim.report.look import spread
from zerosim.report.names import OPTIMIZERS, STAGES, counted, local
from zerosim.train.result import RunResult


def headline(config: RunConfig, of: str = "") -> str:
    """The ZeRO stage, the ranks, `of` which device, and the mesh that they form."""
    where = f" ({replicas(config)})" if config.mesh.dp_replicate > 1 and not is_mesh(config) else ""
    if config.world.transport == "mpi":
        processes = config.mesh.ranks // config.world.ranks_per_process
        where += f", in {counted(processes, 'process', 'processes')} over MPI"
    if config.world.backend == "cuda":
        where += ", on GPUs"
    ranks = f"{STAGES[config.parallel.zero_stage]} on {counted(config.mesh.ranks, 'rank')}"
    return f"{ranks}{of}: {mesh_words.shape(config)}{where}" if is_mesh(config) else f"{ranks}{where}{of}"


def replicas(config: RunConfig) -> str:
    """'2 replicas of 4 ranks each'."""
    return f"{counted(config.mesh.dp_replicate, 'replica')} of {counted(config.mesh.shards, 'rank')} each"


def trained(result: RunResult) -> str:
    """Which model was trained on what."""
    config = result.config
    steps = len(result.losses)
    source = config.data.tokens or config.data.file or "the packaged primer on ZeRO"
    return (
        f"{model_name(config)} of Ψ = {result.num_parameters:,} parameters in "
        f"{pieces(result)}, in {config.precision.param_dtype} with "
        f"{OPTIMIZERS[config.optim.optimizer]}, trained for {counted(steps, 'step')} of "
        f"{config.global_batch:,} x {config.model.seq:,} tokens "
        f"({steps * config.global_batch * config.model.seq:,} in all) of {source}."
    )


def pieces(result: RunResult) -> str:
    """What the model's flat buffers are: '6 units', or '28 tensors in 16 modules'."""
    flats = result.layout.flats.values()
    if result.config.gathering.gather == "unit":
        return counted(len(flats), "unit")
    return f"{counted(len(flats), 'tensor')} in {counted(len({flat.module for flat in flats}), 'module')}"


def model_name(config: RunConfig) -> str:
    """'A GPT', or the name that was asked for."""
    families = {"gpt": "A GPT", "llama": "A Llama", "mlp": "An MLP", "flat": "A flat model"}
    return families.get(config.model.name, config.model.name)


def learned(result: RunResult) -> str:
    """From which loss to which, beside that of knowing nothing."""
    vocab, losses = result.config.model.vocab, result.mean_losses
    return (
        f"Loss {losses[0]:.3f} → {losses[-1]:.3f}. To guess evenly among {vocab:,} tokens would be "
        f"ln {vocab:,} = {math.log(vocab):.3f}."
    )


def scaled(result: RunResult) -> str | None:
    """Loss scale and skipped steps; None where neither plays a part."""
    skipped = [step for step, report in enumerate(result.steps) if report.skipped]
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


def lost(result: RunResult) -> str | None:
    """How many updates bf16 weights without masters did not feel."""
    if not result.lost_updates:
        return None
    share, kind = sum(result.lost_updates) / len(result.lost_updates), result.config.precision.rounding
    first, last = (f"{100 * float(result.lost_updates[step]):.3g} %" for step in (0, -1))
    after = {
        "nearest": "Such an update is lost: it is less than half a unit in the weight's last place",
        "stochastic": "On average none is lost: a weight moves by a whole unit as often as its updates add up to one",
        "kahan": "None is lost: what a weight does not feel is in its compensation",
    }[kind or "nearest"]
    return (
        f"No fp32 masters, rounding {kind}: {100 * float(share):.3g} % of the weights stayed as they were in a step on "
        f"average ({first} in the first, {last} in the last) although their update was not 0. {after}."
    )


def states_note(result: RunResult) -> str:
    """How to read the formula of the model states."""
    config, cost = result.config, cost_of(result)
    parts = f"{cost.param} + {cost.grad} + {formulas.figure(cost.optim)} bytes per parameter"
    if is_mesh(config):
        return mesh_words.states_note(result, f"{parts} (param + grad + optim)")
    note = f"{parts} (param + grad + optim); Ψ = {result.num_parameters:,}, N = {config.mesh.shards:,}."
    if config.mesh.dp_replicate > 1:
        note += f" N ranks hold one of R = {config.mesh.dp_replicate:,} replicas together."
    if exchanged(result) and config.mesh.shards > 1:
        note += (
            " Each rank with a part of a matrix keeps the averages of all its rows and columns: the bytes include such "
            f"copies, {formulas.figure(cost.optim)} does not."
        )
    return note + mesh_words.padding_note(result, config.gathering.piece)


def volume_note(result: RunResult, step: int) -> str:
    """How to read the formula of a step's traffic."""
    config, passes = result.config, passes_of(result, step)
    volume = volume_of(result, passes=passes)
    ranks = config.mesh.shards
    held, letters = letters_of(result), volume.total.symbols
    note = f"Of a volume of {volume} elements a rank sends (N-1)/N = {Fraction(ranks - 1, ranks)}"
    if is_by_pairs(config) and config.parallel.zero_stage == 0:
        note += f"; by all pairs an all-reduce moves NΨ = {ranks}Ψ, where direct and ring move 2Ψ"
    if "VD" in letters:
        keeps = ", which stays gathered when forward ends" if config.gathering.keep_last_unit else ""
        note += f"; VD = {result.tied_numel:,}, the tied table{keeps}"
    if sums := exchanged(result):
        note += f", and of {all_reduce_times(config, ranks)}F more"
        note += f"; F = {sum(sums):,}, the sums that {config.optim.optimizer} exchanges"
    if "U" in letters:
        note += f"; U = {held['U']:,}, the last unit, which stays gathered"
    if "R" in letters:
        note += f"; R = {held['R']:,}, the units outside the blocks, which stay gathered until backward ends"
    if "P" in letters:
        what = config.gathering.piece
        note += f"; P = {held['P']:,}, the small {what}s, which are never freed"
    if "M" in letters:
        note += f"; M = {held['M']:,}, the modules that backward runs a second time"
    if config.data.accumulate > 1 and config.parallel.zero_stage >= 2:
        note += f"; each of {config.data.accumulate} micro-batches is reduced" + (
            " and gathers" if config.parallel.zero_stage == 3 else ""
        )
    if (count := config.mesh.dp_replicate) > 1:
        of = forms.forms(config, passes=passes)[forms.Key("sent", "all_reduce", "replicas")]
        note += f"; of {of.elements} across R = {count} replicas, (R-1)/R = {Fraction(count - 1, count)}"
    return note + "."


def closing(result: RunResult) -> str:
    """What the stage did, in a line or two."""
    config, cost = result.config, cost_of(result)
    ranks, stage = config.mesh.shards, config.parallel.zero_stage
    if config.mesh.ranks == 1:
        return "With one rank there is nothing to divide and nothing to send: every stage is the same. Try --ranks 4."
    whole = formulas.total(formulas.model_states(0, cost).values())
    ddp, mine = (
        formulas.total(formulas.model_states(at, cost).values()).at(Ψ=result.num_parameters, N=ranks)
        for at in (0, config.states_stage)
    )
    if exchanged(result) and not is_mesh(config):
        mine = check_states(result)[-1].formula
    if stage == 0:
        if is_mesh(config):
            return mesh_words.ddp(config, formulas.figure(cost.total))
        return (
            "DDP keeps every parameter, gradient and optimizer state on every rank: "
            f"{formulas.figure(cost.total)} bytes per parameter, however many ranks there are. Stages 1, 2 and 3 "
            f"divide them: zerosim compare --ranks {ranks}"
        )
    if ranks == 1 and is_mesh(config) and config.mesh.dp_replicate == 1:
        return mesh_words.nothing_to_divide(config)
    if ranks == 1:
        return "Each rank is a replica of its own: nothing is divided, and every stage is DDP. Lower --dp-replicate."
    share = f"1/{ranks}"
    what = {
        1: f"{share} of the optimizer states; parameters and gradients stay whole"
        + ("" if config.states_stage == 1 else " until they are reduced"),
        2: f"{share} of the optimizer states and gradients; parameters stay whole",
        3: f"{share} of every model state, and gathers a {config.gathering.gather}'s parameters "
        + ("only while it is used" if config.gathering.reshard_after_forward else "once, for forward and backward"),
    }[stage]
    whole_text = local(str(whole)) if is_mesh(config) else str(whole)
    owned = " on average" if is_owned(config) else ""
    less = (
        f"{float(ddp / mine):.3g} times fewer bytes than DDP's {whole_text}"
        if mine < ddp
        else "as many bytes as DDP, for this optimizer keeps nothing that could be divided"
    )
    return f"{STAGES[stage]} keeps on each rank{owned} {what}: {less}. {_price(result)}"


def _price(result: RunResult) -> str:
    """What the stage sends against DDP."""
    config = result.config
    data_ranks = config.mesh.axes.size(*DATA)
    sends = forms.of(forms.forms(config), "sent")
    zero = formulas.total(form for (_, use), form in sends.items() if use in ("states", "replicas"))
    ddp = sent = Fraction(0)
    for share in shares_of(result):
        held = letters_of(result, share.stage)
        plain = formulas.volume(0, all_reduce=all_reduce_times(config, data_ranks))
        ddp += plain.total.at(held, N=data_ranks)
        sent += zero.at(held)
    ratio, states = sent / ddp, " over the data ranks" if is_mesh(config) else ""
    if ratio == 1:
        return f"It sends exactly as much as DDP{states}."
    price = "The price: it sends" if ratio > 1 else "It sends"
    return f"{price} {float(ratio):.3g} times as much as DDP{states}."


def control(result: RunResult, sent: Sequence[int]) -> str:
    """What each rank sent for norms and overflow flags."""
    if any(sent):
        return f"Control traffic (norm and overflow flags): {spread(sent)} B per rank."
    why = "there is one rank" if result.config.mesh.ranks == 1 else "every rank has all gradients"
    return f"Control traffic: none, for {why}."


def traffic_title(result: RunResult) -> str:
    step = last_whole_step(result)
    if step is None:
        return "Traffic: every step was skipped, so there is no whole one to show"
    last = "the last" if step == len(result.steps) - 1 else "the last that was not skipped"
    with_it = ", with the estimate of curvature after it" if result.steps[step].estimated else ""
    return f"Bytes sent per rank in step {step}, {last}{with_it}"


def curvature_note(result: RunResult, step: int) -> str | None:
    """What a step's traffic has in it that most steps have not."""
    if not result.steps[step].estimated:
        return None
    every = PRESETS[result.config.optim.optimizer].estimates_every
    what = f"Every {every}th step" if every else "Such a step"  # of an optimizer of one's own nothing is known here
    return (
        f"{what} is followed by a second forward and backward, on labels that the model draws; they are counted here."
    )


def moment(step: int, phase: str, unit: str) -> str:
    """When something happened, such as 'step 0, backward of h.3'."""
    if phase == "init":
        return f"at the start, while {unit or 'the model'} was placed"
    where = phase.replace("_", " ") + (f" of {unit}" if unit else "")
    return f"while the sample was drawn, {where}" if step < 0 else f"in step {step}, {where}"
