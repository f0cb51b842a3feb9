"""What is measured on a GPU, in which order, against which goals.

GPT-2's shape (124M parameters, its own vocabulary of 50,257) in bf16 and fp16, with eager and with flash attention on
one rank, and stage 3 over four ranks on the same global batch. Tokens are random ids, the same at each step; no
dropout. Two groups of contestants for each precision, one after the other, so that few are alive at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.bench import cuda_device, cuda_figures, cuda_pytorch
from zerosim.bench.contest import Effort, Say
from zerosim.bench.cuda_training import CudaTraining, SquareProduct
from zerosim.bench.cuda_turns import GpuContestant, Rounds, take_turns
from zerosim.bench.figures import Figure
from zerosim.bench.suite import RANKS, initial_weights, over_ranks
from zerosim.config import RunConfig

_COMMON = RunConfig(
    model="gpt2", stage=0, ranks=1, micro_batch=8, precision="bf16", dropout=0.0, lr=3e-4, initial_scale_power=12,
    backend="cuda",
)  # fmt: skip
SMALL = _COMMON.replace(layers=6, hidden=512, heads=8, seq=512, positions=512, ffn=2048, kv_heads=8)
LARGE = _COMMON
MODELS = {"45M": SMALL, "124M": LARGE}
PRECISIONS = ("bf16", "fp16")
ATTENTIONS = ("eager", "flash")
PYTORCH_GOAL = 1.3
GOAL_FROM = 10**8
"""Parameters from which on the goal against PyTorch holds."""

FEW = {"micro_batch": 1, "seq": 16}
"""A batch on which the same kernels have next to nothing to do: what is left is launching them, and the optimizer."""

LOSSES = 3
SAME_LOSS = 0.1
"""How far apart the first three losses may be: PyTorch's are rounded to bf16, 0.03 at 10."""

METHOD = (
    "a step lies between two events on an otherwise idle GPU, with the host's clock beside it; a turn is one step that "
    "does not count and the median of those that do; contestants take turns in one process after a warm-up, in which "
    "kernels are compiled, and free their caches after each turn; a figure is the median over turns, a ratio that of "
    "single rounds, the spread the middle half; flops are those recorded with the kernels of one step (attention over "
    "all T x T pairs, flash's second product of scores in backward included), shares of a peak are of matrix products "
    "alone, by the time of the whole step"
)
PYTORCH = (
    "eager nn.Module with the same weights and tokens; parameters and gradients in the half type, fp32 masters, their "
    "gradients and moments; torch.optim.Adam as it comes (foreach); GradScaler in fp16; loss on half-precision logits; "
    "attention op by op against zerosim's eager, scaled_dot_product_attention against its flash. zerosim also computes "
    "the gradients' norm and records every event"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. `steps`: timed ones in a turn; `square`: the side of the bare product, `repeats` of it."""

    one: Effort
    ranks: Effort
    steps: int = 3
    square: int = 8192
    repeats: int = 10


FULL = Plan(one=Effort(20.0, least=5, most=15), ranks=Effort(12.0, least=5, most=15))
QUICK = Plan(one=Effort(4.0, least=3, most=6, warm_ups=1), ranks=Effort(3.0, least=3, most=6, warm_ups=1), steps=2)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one group, and the group itself as JSON has it: every round of every contestant."""

    figures: list[Figure]
    group: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One model in one precision: what every contestant begins with and trains on."""

    label: str
    config: RunConfig
    weights: Mapping[str, Any]
    tokens: Any

    @property
    def num_parameters(self) -> int:
        return sum(int(values.size) for values in self.weights.values())


def measure(
    models: Mapping[str, RunConfig], plan: Plan, device: Mapping[str, Any], say: Say, *, torch_device: str = "cuda"
) -> Iterator[Outcome]:
    """Everything of every model, as it is had; `device` as `cuda_device.describe` has it.

    Raises: InputError where memory is short, before anything is measured.
    """
    fitted = {model: cuda_device.fitting(model, config, plan.square) for model, config in models.items()}
    for model, config in fitted.items():
        say(f"{model}: drawing weights")
        weights, tokens = initial_weights(config), random_tokens(config)
        for precision in PRECISIONS:
            label = f"{model} {precision}"
            if why := cuda_device.precision_fault(precision):
                yield Outcome([Figure(label, "all figures", None, note=why)], {"title": label, "note": why})
                continue
            case = Case(label, config.replace(precision=precision), weights, tokens)
            yield one_rank(case, plan, device, say, torch_device)
            yield four_ranks(case, plan, device, say)


def one_rank(case: Case, plan: Plan, device: Mapping[str, Any], say: Say, torch_device: str) -> Outcome:
    """Both attentions against PyTorch's, against the peak, and against their launches alone."""
    config, title = case.config, f"{case.label}, one rank"
    with ExitStack() as running:
        say(f"{title}: first steps, in which kernels are compiled")
        contestants: dict[str, GpuContestant] = {}
        losses: dict[str, list[float]] = {}
        for kind in ATTENTIONS:
            run = running.enter_context(CudaTraining(config.replace(attention=kind), case.weights, case.tokens))
            contestants[kind], losses[kind] = run, run.losses[0]
        few = config.replace(positions=config.model.positions, **FEW)
        contestants["launches"] = running.enter_context(CudaTraining(few, case.weights, random_tokens(few)))
        contestants["square"] = SquareProduct(plan.square, config.precision.param_dtype, plan.repeats)
        theirs, notes = _pytorch(case, torch_device)
        contestants.update({f"PyTorch {kind}": run for kind, run in theirs.items()})
        measured = take_turns(contestants, plan.steps, plan.one, say, title)
        for kind, torch_run in theirs.items():
            notes[kind] = _same(losses[kind], torch_run.losses)
            torch_run.close()
    figures = [figure for kind in ATTENTIONS for figure in _attention(case, kind, measured, plan, device, notes[kind])]
    square = f"speed, a bare {plan.square:,} x {plan.square:,} product"
    figures.append(cuda_figures.speed(case.label, square, measured["square"]))
    name, note = (
        f"the same kernels on {few.model.seq} tokens / step, eager attention",
        "near 1: launching sets the pace",
    )
    figures.append(cuda_figures.over(case.label, name, measured, "launches", "eager", None, note))
    return Outcome(figures, _group(title, config, measured))


def _attention(
    case: Case, kind: str, measured: Mapping[str, Rounds], plan: Plan, device: Mapping[str, Any], note: str
) -> list[Figure]:
    """The figures of one rank with that attention; `note` is on PyTorch's."""
    label, rounds, what, gpu = case.label, measured[kind], f"{kind} attention", device["gpu"]
    square = f"products / a bare {plan.square:,} x {plan.square:,} product, {what}"
    hardware = cuda_device.published(gpu)
    goal = PYTORCH_GOAL if case.num_parameters >= GOAL_FROM else None
    both = "explicit attention in both" if kind == "eager" else "flash against scaled_dot_product_attention"
    name, other = f"step / PyTorch eager, {both}", f"PyTorch {kind}"
    return [
        cuda_figures.step_time(label, f"step, {what}", rounds),
        cuda_figures.speed(label, f"speed, {what}", rounds),
        cuda_figures.share_of_peak(label, f"products / published peak, {what}", rounds, hardware, gpu),
        cuda_figures.share_of_square(label, square, rounds, measured["square"]),
        cuda_figures.over(label, name, measured, kind, other, goal, note)
        if other in measured
        else Figure(label, name, None, goal=goal, note=note),
    ]


def four_ranks(case: Case, plan: Plan, device: Mapping[str, Any], say: Say) -> Outcome:
    """Stage 3 over four ranks on one GPU against one rank on the same global batch; recording on and off."""
    label, title, num_gpus = case.label, f"{case.label}, {RANKS} ranks", device["gpus"]
    sharded = over_ranks(case.config)
    with ExitStack() as running:
        say(f"{title}: first steps")
        contestants: dict[str, GpuContestant] = {}
        for name, config, record in (("N=1", case.config, True), ("on", sharded, True), ("off", sharded, False)):
            run = CudaTraining(config, case.weights, case.tokens, record=record)
            contestants[name] = running.enter_context(run)
        measured = take_turns(contestants, plan.steps, plan.ranks, say, title)
    where = "one GPU" if num_gpus == 1 else f"{min(RANKS, num_gpus)} GPUs"
    note = "" if num_gpus == 1 else "CUDA_VISIBLE_DEVICES=0 puts all on one"
    name = f"N = {RANKS} stage 3 on {where}"
    figures = [
        cuda_figures.step_time(label, f"step, {name}", measured["on"]),
        cuda_figures.over(label, f"{name} / N = 1", measured, "on", "N=1", None, note),
        cuda_figures.over(label, f"recording on / off, N = {RANKS} stage 3", measured, "on", "off"),
    ]
    return Outcome(figures, _group(title, sharded, measured))


def random_tokens(config: RunConfig) -> Any:
    """One global batch (rows, seq + 1), int64: ids spread over the vocabulary."""
    return np.random.default_rng(config.data.seed).integers(
        0, config.model.vocab, (config.global_batch, config.model.seq + 1), np.int64
    )


def _pytorch(case: Case, device: str) -> tuple[dict[str, cuda_pytorch.TorchTraining], dict[str, str]]:
    """PyTorch's runs by attention, after a first step; and why there is none. What it raises ends no benchmark."""
    if device == "cuda" and (why := cuda_pytorch.why_not()):
        return {}, dict.fromkeys(ATTENTIONS, why)
    found: dict[str, cuda_pytorch.TorchTraining] = {}
    missing: dict[str, str] = {}
    for kind in ATTENTIONS:
        try:
            run = cuda_pytorch.TorchTraining(case.config, case.weights, case.tokens, kind, device)
            run.step()
            found[kind] = run
        except Exception as error:
            missing[kind] = f"PyTorch failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        cuda_pytorch.release(device)
    return found, missing


def _same(ours: list[float], theirs: list[float]) -> str:
    """'' if the first losses agree, else a warning: then the figure compares different things."""
    gap = float(np.max(np.abs(np.subtract(ours[:LOSSES], theirs[:LOSSES]))))
    return "" if gap < SAME_LOSS else f"NOT the same computation: the first {LOSSES} losses differ by {gap:.2g}"


def _group(title: str, config: RunConfig, measured: Mapping[str, Rounds]) -> dict[str, Any]:
    return {
        "title": title,
        "config": config.to_dict(),
        "contestants": {
            name: {"device_s": rounds.device_s, "host_s": rounds.host_s, "flops": dict(rounds.flops)}
            for name, rounds in measured.items()
        },
    }
