"""The benchmark of a backend: its figures, their order and their goals.

numpy: two models, 2,048 tokens a step each. Single-rank figures: one BLAS thread, fp32 unless named.

cuda: GPT-2's shape (124M parameters, its own vocabulary of 50,257) in bf16 and fp16, with eager, flash and batched
flash attention on one rank, and stage 3 over four ranks on the same global batch. Tokens are random ids, the same at
each step; no dropout. Each precision has two groups of contestants, one after the other, so that few are alive at once.

Every group of contestants is alive at once and takes turns (`contest.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from zerosim.bench import machine, pytorch
from zerosim.bench.calibrate import FULL, Sizes, measure_machine
from zerosim.bench.contest import Budget, Contestant, Progress, Rounds, interleave
from zerosim.bench.figures import (
    Figure,
    of_rounds,
    ratio,
    same_losses,
    share_of_peak,
    share_of_square,
    speed,
    step_time,
)
from zerosim.bench.plans import plan_times
from zerosim.bench.predict import MODELS, compare
from zerosim.bench.processes import against_fsdp, cold_starts
from zerosim.bench.products import BareProducts, SquareProduct, watch
from zerosim.bench.training import (
    MICRO_BATCHES,
    RANKS,
    TrainingRun,
    initial_weights,
    on_meshes,
    one_thread,
    over_ranks,
    random_tokens,
    text_tokens,
)
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import cluster_of

GOALS = {"turns": 1.15, "side by side": 0.75, "meshes": 1.3, "bf16": 1.5, "fp16": 1.7, "recording": 1.03,
         "clock": 15.0}  # fmt: skip
ATTENTIONS: Mapping[str, tuple[Mapping[str, Any], str]] = MappingProxyType({
    "eager": ({"attention": "eager"}, "PyTorch eager"),
    "flash": ({"attention": "flash"}, "PyTorch flash"),
    "batched flash": ({"attention": "flash", "batched_flash": True}, "PyTorch flash"),
})  # fmt: skip
"""zerosim's attentions on a GPU: their options, and PyTorch's beside each."""

FEW = {"micro_batch": 1, "seq": 16}
"""A batch with almost no work for the same kernels. The remaining time is launches and the optimizer."""

NOTHING = Budget(0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class Budgets:
    """The amount of measuring per group of contestants. `square`: the side of the GPU's bare product, `repeats` of it;
    `clock`: the clock's calibration on this machine, None to leave it out."""

    one_rank: Budget
    ranks: Budget
    recording: Budget = NOTHING
    start_up: Budget = NOTHING
    fsdp: Budget = NOTHING
    square: int = 8192
    repeats: int = 10
    clock: Sizes | None = None


@dataclass(frozen=True, slots=True)
class Suite:
    """Everything that depends on the backend.

    models           the small one, then the large one
    default          the one without --model, unless --quick is given
    pytorch_goal     for models of at least `goal_from` parameters
    same_loss        the tolerance between the first `num_losses` losses of zerosim and PyTorch
    method           the method of measurement, for JSON; explanation: the printed lines
    """

    backend: str
    models: Mapping[str, RunConfig]
    default: str
    precisions: tuple[str, ...]
    tokens: Callable[[RunConfig], Any]
    full: Budgets
    quick: Budgets
    torch_device: str
    pytorch_goal: float
    goal_from: int
    num_losses: int
    same_loss: float
    method: str
    explanation: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One model in one precision: the weights and tokens of every contestant, and the method of measurement."""

    suite: Suite
    budgets: Budgets
    device: Mapping[str, Any]  # as `machine.describe` returns it
    progress: Progress
    label: str
    config: RunConfig
    weights: Mapping[str, Any]
    tokens: Any

    @property
    def pytorch_goal(self) -> float | None:
        num_parameters = sum(int(values.size) for values in self.weights.values())
        return self.suite.pytorch_goal if num_parameters >= self.suite.goal_from else None

    def run(self, config: RunConfig, *, record: bool = True) -> TrainingRun:
        return TrainingRun(config, self.weights, self.tokens, record=record)

    def interleave(self, contestants: Mapping[str, Contestant], budget: Budget, title: str) -> dict[str, Rounds]:
        """Return the rounds of contestants that are already running."""
        return interleave(contestants, budget, self.progress, f"{self.label}, {title}")

    def race(self, runs: Mapping[str, TrainingRun], budget: Budget, title: str) -> dict[str, Rounds]:
        """Run training runs in turn and return their rounds. The runs begin and end here."""
        self.progress(f"{self.label}, {title}: first steps")
        with ExitStack() as running:
            for run in runs.values():
                running.enter_context(run)
            return self.interleave(runs, budget, title)


@dataclass(frozen=True, slots=True)
class Group:
    """The figures of contestants that took turns and, for JSON, every round of each of them."""

    figures: list[Figure]
    rounds: Mapping[str, Any] | None = None


def measure(
    suite: Suite,
    models: Mapping[str, RunConfig],
    budgets: Budgets,
    device: Mapping[str, Any],
    progress: Progress,
    *,
    torch_distributed: bool = False,
) -> Iterator[Group]:
    """Yield every figure of every model as soon as it is measured; `device` is as `machine.describe` returns it.

    Raises: InputError if a GPU's memory is too small, before anything is measured.
    """
    on_gpu = suite.backend == "cuda"
    if on_gpu:
        models = {model: machine.fitting(model, config, budgets.square) for model, config in models.items()}
    else:
        yield Group(list(cold_starts(budgets.start_up, progress)))
        yield Group(list(plan_times(budgets.start_up, progress)))
    with one_thread():
        for model, config in models.items():
            progress(f"{model}: drawing weights")
            weights, tokens = initial_weights(config), suite.tokens(config)
            for precision in suite.precisions:
                label = f"{model} {precision}" if on_gpu else model
                if on_gpu and (why := machine.precision_fault(precision)):
                    yield Group([Figure(label, "all figures", None, note=why)], {"title": label, "note": why})
                    continue
                config = config.replace(precision=precision)
                case = Case(suite, budgets, device, progress, label, config, weights, tokens)
                groups = (one_rank_on_gpu, four_ranks_on_gpu) if on_gpu else (one_rank, four_ranks, meshes, recording)
                for group in groups:
                    yield group(case)
    if budgets.clock is not None:
        yield modelled(budgets.clock, progress)
    if torch_distributed:
        yield Group([against_fsdp(model, config, budgets.fsdp, progress) for model, config in models.items()])


def one_rank(case: Case) -> Group:
    """Compare the step with its products, with PyTorch, and the half types with fp32."""
    label, config = case.label, case.config
    with ExitStack() as running:
        fp32, bf16, fp16 = (
            running.enter_context(case.run(config.replace(precision=name))) for name in ("fp32", "bf16", "fp16")
        )
        bare = BareProducts(watch(fp32.step))
        check_products(config, bare)
        theirs, notes = torch_runs(case, {"PyTorch": "flash"}, running)
        contestants = {"step": fp32, "products": bare, "bf16": bf16, "fp16": fp16, **theirs}
        measured = case.interleave(contestants, case.budgets.one_rank, "one rank")
        notes |= compared_losses(case, {"PyTorch": fp32}, theirs)
    name = "step / PyTorch eager, one thread"
    halves = [ratio(label, f"{half} / fp32", measured, half, "step", GOALS[half]) for half in ("bf16", "fp16")]
    return Group([
        ratio(label, "step / its bare matrix products", measured, "step", "products"),
        ratio(label, name, measured, "step", "PyTorch", case.pytorch_goal, notes["PyTorch"]),
        *halves,
    ])  # fmt: skip


def four_ranks(case: Case) -> Group:
    """Compare ZeRO-3 over four ranks with one rank, on the same global batch."""
    sharded = over_ranks(case.config)
    runs = {"N=1": case.config, "in turn": sharded, "side by side": sharded.replace(parallel=2)}
    contestants = {name: case.run(config) for name, config in runs.items()}
    measured = case.race(contestants, case.budgets.ranks, f"{RANKS} ranks")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    note = "of minima" if cores >= 2 else "this machine has one core"
    turns, both = f"N = {RANKS} stage 3, in turn / N = 1", f"N = {RANKS} stage 3, two side by side / N = 1"
    return Group([
        ratio(case.label, turns, measured, "in turn", "N=1", GOALS["turns"]),
        ratio(case.label, both, measured, "side by side", "N=1", GOALS["side by side"], note, of_minima=True),
    ])  # fmt: skip


def meshes(case: Case) -> Group:
    """Compare two ranks of each mesh with one rank, on the same global batch."""
    runs = {name: case.run(config) for name, config in {"N=1": case.config, **on_meshes(case.config)}.items()}
    measured = case.race(runs, case.budgets.ranks, "meshes")
    names = {"tp 2": "tp 2, in turn / N = 1", "pp 2": f"pp 2, {MICRO_BATCHES} microbatches, in turn / N = 1"}
    figures = []
    for name, title in names.items():
        note = same_losses([runs["N=1"].first_loss], [runs[name].first_loss], case.suite.same_loss)
        figures.append(ratio(case.label, title, measured, name, "N=1", GOALS["meshes"], note))
    return Group(figures)


def recording(case: Case) -> Group:
    """Compare events and ledgers on with off, where there are most events: four ranks at ZeRO-3."""
    sharded = over_ranks(case.config)
    runs = {"on": case.run(sharded), "off": case.run(sharded, record=False)}
    measured = case.race(runs, case.budgets.recording, "recording")
    name = f"recording on / off, N = {RANKS} stage 3"
    return Group([ratio(case.label, name, measured, "on", "off", GOALS["recording"])])


def modelled(sizes: Sizes, progress: Progress) -> Group:
    """Compare the clock with steps of two ranks, after it was calibrated on this machine (`calibrate.py`)."""
    device = measure_machine(sizes, "fp32", 2, progress)
    figures = []
    for one in compare(MODELS, cluster_of(device), progress):
        name, error = f"the clock off the step, N = {one.ranks} stage {one.stage}", 100 * one.error
        seconds = {"modelled": one.modelled_s, "measured": one.measured_s}
        cpu = "" if one.cpu_error is None else f", of a rank's CPU time {100 * one.cpu_error:+.1f} %"
        note = f"{error:+.1f} %{cpu}"
        figures.append(of_rounds(one.model, name, [abs(error)], "%", GOALS["clock"], seconds, note))
    return Group(figures)


def one_rank_on_gpu(case: Case) -> Group:
    """Compare each attention with PyTorch's, with the peak, and with their launches alone."""
    label, config, budgets = case.label, case.config, case.budgets
    hardware = machine.published(case.device["gpu"])
    case.progress(f"{label}, one rank: first steps, in which kernels are compiled")
    with ExitStack() as running:
        ours = {kind: running.enter_context(case.run(config.replace(**way))) for kind, (way, _) in ATTENTIONS.items()}
        few = config.replace(positions=config.model.positions, **FEW)
        launches = running.enter_context(TrainingRun(few, case.weights, case.suite.tokens(few)))
        square = SquareProduct(budgets.square, config.precision.param_dtype, budgets.repeats)
        theirs, missing = torch_runs(case, {"PyTorch eager": "eager", "PyTorch flash": "flash"}, running)
        contestants = {**ours, "launches": launches, "square": square, **theirs}
        measured = case.interleave(contestants, budgets.one_rank, "one rank")
        notes = {
            kind: missing[name]
            if name in missing
            else compared_losses(case, {name: ours[kind]}, {name: theirs[name]})[name]
            for kind, (_, name) in ATTENTIONS.items()
        }
    figures, square_name = [], f"a bare {budgets.square:,} x {budgets.square:,} product"
    for kind, (_, name) in ATTENTIONS.items():
        rounds, what = measured[kind], f"{kind} attention"
        both = "explicit attention in both" if kind == "eager" else f"{kind} against scaled_dot_product_attention"
        figures += [
            step_time(label, f"step, {what}", rounds),
            speed(label, f"speed, {what}", rounds),
            share_of_peak(label, f"products / published peak, {what}", rounds, hardware, case.device["gpu"]),
            share_of_square(label, f"products / {square_name}, {what}", rounds, measured["square"]),
            ratio(label, f"step / PyTorch eager, {both}", measured, kind, name, case.pytorch_goal, notes[kind]),
        ]
    few_name = f"the same kernels on {few.model.seq} tokens / step, eager attention"
    figures += [
        speed(label, f"speed, {square_name}", measured["square"]),
        ratio(label, few_name, measured, "launches", "eager", None, "near 1: launching sets the pace"),
    ]
    return Group(figures, to_json(f"{label}, one rank", config, measured))


def four_ranks_on_gpu(case: Case) -> Group:
    """Compare ZeRO-3 over four ranks on one GPU with one rank on the same global batch, with recording on and off."""
    label, num_gpus, sharded = case.label, case.device["gpus"], over_ranks(case.config)
    runs = {"N=1": case.run(case.config), "on": case.run(sharded), "off": case.run(sharded, record=False)}
    measured = case.race(runs, case.budgets.ranks, f"{RANKS} ranks")
    name = f"N = {RANKS} stage 3 on {'one GPU' if num_gpus == 1 else f'{min(RANKS, num_gpus)} GPUs'}"
    note = "" if num_gpus == 1 else "CUDA_VISIBLE_DEVICES=0 puts all on one"
    figures = [
        step_time(label, f"step, {name}", measured["on"]),
        ratio(label, f"{name} / N = 1", measured, "on", "N=1", None, note),
        ratio(label, f"recording on / off, N = {RANKS} stage 3", measured, "on", "off"),
    ]
    return Group(figures, to_json(f"{label}, {RANKS} ranks", sharded, measured))


def to_json(title: str, config: RunConfig, measured: Mapping[str, Rounds]) -> dict[str, Any]:
    contestants = {
        name: {"device_s": rounds.device_s, "host_s": rounds.host_s, "flops": dict(rounds.flops)}
        for name, rounds in measured.items()
    }
    return {"title": title, "config": config.to_dict(), "contestants": contestants}


def torch_runs(
    case: Case, kinds: Mapping[str, str], running: ExitStack
) -> tuple[dict[str, pytorch.TorchTraining], dict[str, str]]:
    """Return PyTorch's runs after a first step, by name with the attention named, or the reason why there is none.

    An error in PyTorch does not end the benchmark.
    """
    device = case.suite.torch_device
    if why := pytorch.unusable(device):
        return {}, dict.fromkeys(kinds, why)
    found: dict[str, pytorch.TorchTraining] = {}
    missing: dict[str, str] = {}
    for name, kind in kinds.items():
        try:
            run = pytorch.TorchTraining(case.config, case.weights, case.tokens, kind, device)
            run.step()
            found[name] = run
            running.callback(run.close)
        except Exception as error:
            missing[name] = f"PyTorch failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        pytorch.release(device)
    return found, missing


def compared_losses(
    case: Case, ours: Mapping[str, TrainingRun], theirs: Mapping[str, pytorch.TorchTraining]
) -> dict[str, str]:
    """Return '' by name if both computed the same first losses, else a warning."""
    num, within = case.suite.num_losses, case.suite.same_loss
    return {name: same_losses(ours[name].losses[0][:num], run.losses[:num], within) for name, run in theirs.items()}


def check_products(config: RunConfig, bare: BareProducts) -> None:
    """Check that the observed products include those of the linear maps, three per weight and token."""
    weights = 12 * config.model.layers * config.model.hidden**2 + config.model.vocab * config.model.hidden
    needed, seen = 6 * weights * config.global_batch * config.model.seq, sum(bare.flops.values())
    if seen < needed:
        raise RuntimeError(f"saw products of {seen} flops, the linear maps alone have {needed}")


_CPU: dict[str, Any] = {"stage": 0, "ranks": 1, "precision": "fp32", "lr": 1e-3}
_CPU_METHOD = (
    "Contestants take turns in one process after a warm-up. A figure is the median of the ratios of single rounds "
    "(on two cores: the ratio of minima). The spread is their middle half"
)
_GPU = RunConfig(
    model="gpt2", stage=0, ranks=1, micro_batch=8, precision="bf16", dropout=0.0, lr=3e-4, initial_scale_power=12,
    backend="cuda",
)  # fmt: skip
_GPU_METHOD = (
    "A step is timed between two events on an otherwise idle GPU, and by the host's clock. A turn is one uncounted "
    "step, then the median of the counted ones. Contestants take turns in one process after a warm-up, in which "
    "kernels are compiled, and free their caches after each turn. A figure is the median over turns, a ratio the "
    "median of single rounds, and the spread their middle half. Flops are recorded with the kernels of one step: "
    "attention over all T x T pairs, including flash's second product of scores in backward. Shares of a peak are "
    "matrix products only, divided by the time of the whole step"
)
_GPU_PYTORCH = (
    "An eager nn.Module with the same weights and tokens. Parameters and gradients are in the half type; masters, "
    "their gradients and moments are fp32. torch.optim.Adam runs with its defaults (foreach), GradScaler in fp16, and "
    "the loss on half-precision logits. Attention is op by op against zerosim's eager, and "
    "scaled_dot_product_attention against its flash. zerosim also computes the gradients' norm and records every event"
)

SUITES = {
    "numpy": Suite(
        backend="numpy",
        models={
            "0.8M": RunConfig(**_CPU, layers=4, hidden=128, heads=4, seq=128, micro_batch=16),
            "10.7M": RunConfig(**_CPU, layers=6, hidden=384, heads=6, seq=256, micro_batch=8),
        },
        default="both",
        precisions=("fp32",),
        tokens=text_tokens,
        full=Budgets(
            one_rank=Budget(40.0, min_rounds=4, max_rounds=40),
            ranks=Budget(25.0, min_rounds=4, max_rounds=40),
            recording=Budget(20.0, min_rounds=5, max_rounds=60),
            start_up=Budget(8.0, min_rounds=5, max_rounds=20, warm_ups=1),
            fsdp=Budget(45.0, min_rounds=2, max_rounds=3, warm_ups=0),
            clock=FULL,
        ),
        quick=Budgets(
            one_rank=Budget(6.0, min_rounds=3, max_rounds=10, warm_ups=1),
            ranks=Budget(5.0, min_rounds=3, max_rounds=10, warm_ups=1),
            recording=Budget(5.0, min_rounds=3, max_rounds=20, warm_ups=1),
            start_up=Budget(2.0, min_rounds=3, max_rounds=5, warm_ups=1),
            fsdp=Budget(0.0, min_rounds=1, max_rounds=1, warm_ups=0),
        ),
        torch_device="cpu",
        pytorch_goal=1.1,
        goal_from=0,
        num_losses=1,
        same_loss=1e-3,
        method=_CPU_METHOD,
        explanation=(f"Method: {_CPU_METHOD}. Times are of one step of 2,048 tokens, or of a process.",),
    ),
    "cuda": Suite(
        backend="cuda",
        models={
            "45M": _GPU.replace(layers=6, hidden=512, heads=8, seq=512, positions=512, ffn=2048, kv_heads=8),
            "124M": _GPU,
        },
        default="large",
        precisions=("bf16", "fp16"),
        tokens=random_tokens,
        full=Budgets(
            one_rank=Budget(20.0, min_rounds=5, max_rounds=15, timed_steps=3, untimed_steps=1),
            ranks=Budget(12.0, min_rounds=5, max_rounds=15, timed_steps=3, untimed_steps=1),
        ),
        quick=Budgets(
            one_rank=Budget(4.0, min_rounds=3, max_rounds=6, warm_ups=1, timed_steps=2, untimed_steps=1),
            ranks=Budget(3.0, min_rounds=3, max_rounds=6, warm_ups=1, timed_steps=2, untimed_steps=1),
        ),
        torch_device="cuda",
        pytorch_goal=1.3,
        goal_from=10**8,
        num_losses=3,
        same_loss=0.1,  # PyTorch's losses are rounded to bf16, 0.03 at 10
        method=f"{_GPU_METHOD}. PyTorch: {_GPU_PYTORCH}",
        explanation=(f"Method: {_GPU_METHOD}.", f"PyTorch: {_GPU_PYTORCH}."),
    ),
}  # fmt: skip
