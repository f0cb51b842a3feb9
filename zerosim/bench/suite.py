"""What is measured, in which order, against which goals.

Two models, 2,048 tokens a step each. Single-rank figures: one BLAS thread, fp32 unless named. Every group
of contestants is alive at once and takes turns (`contest.py`).
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits  # type: ignore[import-untyped]

from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.bench import processes, pytorch
from zerosim.bench.contest import Contestant, Effort, Say, interleave
from zerosim.bench.figures import Figure, difference, ratio
from zerosim.bench.products import BareProducts, watch
from zerosim.bench.training import TrainingRun, global_batch
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.models.model import initial_values
from zerosim.train.build import build_model

SMALL = RunConfig(stage=0, layers=4, hidden=128, heads=4, seq=128, micro_batch=16, ranks=1, precision="fp32", lr=1e-3)
LARGE = RunConfig(stage=0, layers=6, hidden=384, heads=6, seq=256, micro_batch=8, ranks=1, precision="fp32", lr=1e-3)
MODELS = {"0.8M": SMALL, "10.7M": LARGE}
RANKS = 4
GOALS = {
    "PyTorch": 1.1,
    "turns": 1.15,
    "side by side": 0.75,
    "bf16": 1.5,
    "fp16": 1.7,
    "recording": 1.03,
    "start-up": 0.15,
    "plan": 1.5,
    "ranks": 1.1,
}
PLANS = {"gpt3-175b": "16GB", "1t": "32GB"}
"""Models, and bytes per device that they do not fit."""
FSDP_GOALS = {"0.8M": 0.25, "10.7M": 0.5}
FSDP_STEPS = 20
SAME_LOSS = 1e-3


@dataclass(frozen=True, slots=True)
class Efforts:
    """How long each group of contestants is measured."""

    single: Effort
    ranks: Effort
    recording: Effort
    start_up: Effort
    fsdp: Effort


FULL = Efforts(
    single=Effort(40.0, least=4, most=40),
    ranks=Effort(25.0, least=4, most=40),
    recording=Effort(20.0, least=5, most=60),
    start_up=Effort(8.0, least=5, most=20, warm_ups=1),
    fsdp=Effort(45.0, least=2, most=3, warm_ups=0),
)
QUICK = Efforts(
    single=Effort(6.0, least=3, most=10, warm_ups=1),
    ranks=Effort(5.0, least=3, most=10, warm_ups=1),
    recording=Effort(5.0, least=3, most=20, warm_ups=1),
    start_up=Effort(2.0, least=3, most=5, warm_ups=1),
    fsdp=Effort(0.0, least=1, most=1, warm_ups=0),
)


def measure(
    models: Mapping[str, RunConfig], efforts: Efforts, say: Say, *, torch_distributed: bool = False
) -> Iterator[Figure]:
    """Every figure of every model, as they are had."""
    yield from start_up(efforts.start_up, say)
    yield from plans(efforts.start_up, say)
    with one_thread():
        for model, config in models.items():
            yield from single_rank(model, config, efforts.single, say)
            yield from several_ranks(model, config, efforts.ranks, say)
            yield from recording(model, config, efforts.recording, say)
    if torch_distributed:
        for model, config in models.items():
            yield from against_fsdp(model, config, efforts.fsdp, say)


@contextmanager
def one_thread() -> Iterator[None]:
    """BLAS on one thread, for every contestant of this process."""
    NumpyBackend()  # as in a run, before any thread is there: it settles how memory is kept for those to come
    with threadpool_limits(limits=1, user_api="blas"):
        yield


def start_up(effort: Effort, say: Say) -> Iterator[Figure]:
    name = "zerosim --help, start-up over bare Python"
    try:
        measured = interleave(processes.start_up(), effort, say, "start-up")
    except processes.ProcessFailed as error:
        yield Figure("", name, None, "s", GOALS["start-up"], note=str(error))
    else:
        yield difference("", name, measured, "zerosim --help", "python -c pass", GOALS["start-up"])


def plans(effort: Effort, say: Say) -> Iterator[Figure]:
    """`zerosim plan` from a cold start, less Python's own; and what a thousand ranks cost over eight."""
    for model, limit in PLANS.items():
        name, goal = f"zerosim plan, {model} on 1,024 ranks that do not hold it, over bare Python", GOALS["plan"]
        try:
            measured = interleave(processes.plans(model, limit), effort, say, f"plan of {model}")
        except processes.ProcessFailed as error:
            yield Figure("", name, None, "s", goal, note=str(error))
            return
        yield difference("", name, measured, processes.TOO_SMALL, "python -c pass", goal)
    yield ratio("", "zerosim plan, 1,024 ranks / 8 ranks", measured, "1,024 ranks", "8 ranks", GOALS["ranks"])


def single_rank(model: str, config: RunConfig, effort: Effort, say: Say) -> Iterator[Figure]:
    """The step against its products, against PyTorch, and the half types against fp32."""
    with ExitStack() as running:
        fp32, bf16, fp16 = (
            running.enter_context(TrainingRun(config.replace(precision=name))) for name in ("fp32", "bf16", "fp16")
        )
        bare = BareProducts(watch(fp32.step))
        check_products(config, bare)
        contestants: dict[str, Contestant] = {"step": fp32, "products": bare, "bf16": bf16, "fp16": fp16}
        if pytorch.installed():
            tokens = global_batch(config)
            contestants["PyTorch"] = torch_run = pytorch.TorchRun(config, initial_weights(config), tokens)
        measured = interleave(contestants, effort, say, f"{model}, one rank")
        yield ratio(model, "step / its bare matrix products", measured, "step", "products")
        name = "step / PyTorch eager, one thread"
        if pytorch.installed():
            note = same_losses(fp32.losses[0][:1], torch_run.losses[:1])
            yield ratio(model, name, measured, "step", "PyTorch", GOALS["PyTorch"], note)
        else:
            yield Figure(model, name, None, goal=GOALS["PyTorch"], note="PyTorch is not installed")
        for half in ("bf16", "fp16"):
            yield ratio(model, f"{half} / fp32", measured, half, "step", GOALS[half])


def several_ranks(model: str, config: RunConfig, effort: Effort, say: Say) -> Iterator[Figure]:
    """Stage 3 over four ranks against one, on the same global batch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sharded = over_ranks(config)
    with ExitStack() as running:
        contestants: dict[str, Contestant] = {
            "N=1": running.enter_context(TrainingRun(config)),
            "in turn": running.enter_context(TrainingRun(sharded)),
            "side by side": running.enter_context(TrainingRun(sharded.replace(parallel=2))),
        }
        measured = interleave(contestants, effort, say, f"{model}, {RANKS} ranks")
    note = "of minima" if cores >= 2 else "this machine has one core"
    yield ratio(model, f"N = {RANKS} stage 3, in turn / N = 1", measured, "in turn", "N=1", GOALS["turns"])
    name = f"N = {RANKS} stage 3, two side by side / N = 1"
    yield ratio(model, name, measured, "side by side", "N=1", GOALS["side by side"], note, of_minima=True)


def recording(model: str, config: RunConfig, effort: Effort, say: Say) -> Iterator[Figure]:
    """Events and ledgers on against off, where there are most events: four ranks at stage 3."""
    sharded = over_ranks(config)
    with TrainingRun(sharded) as on, TrainingRun(sharded, record=False) as off:
        measured = interleave({"on": on, "off": off}, effort, say, f"{model}, recording")
    yield ratio(model, f"recording on / off, N = {RANKS} stage 3", measured, "on", "off", GOALS["recording"])


def against_fsdp(model: str, config: RunConfig, effort: Effort, say: Say) -> Iterator[Figure]:
    """Process start to process end of 20 steps: `zerosim run` and four processes of FSDP2 on gloo."""
    name, goal = f"{FSDP_STEPS} steps start to finish / FSDP2, 4 processes", FSDP_GOALS.get(model)
    if not pytorch.installed():
        yield Figure(model, name, None, goal=goal, note="PyTorch is not installed")
        return
    sharded = over_ranks(config).replace(parallel=2)
    tokens = np.stack([global_batch(sharded.replace(seed=step)) for step in range(FSDP_STEPS)])
    with tempfile.TemporaryDirectory(prefix="zerosim-bench-") as place:
        folder = Path(place)
        try:
            contestants = processes.start_to_finish(sharded, initial_weights(config), tokens, folder)
            measured = interleave(contestants, effort, say, f"{model}, start to finish")
            ours, theirs = processes.losses_of(folder, RANKS)
        except processes.ProcessFailed as error:
            yield Figure(model, name, None, goal=goal, note=str(error))
            return
    yield ratio(model, name, measured, "zerosim", "FSDP2", goal, same_losses(ours[0], theirs[0]))


def over_ranks(config: RunConfig) -> RunConfig:
    """The same global batch over four ranks at stage 3."""
    return config.replace(stage=3, ranks=RANKS, micro_batch=config.data.micro_batch // RANKS)


def initial_weights(config: RunConfig) -> dict[str, Any]:
    """What zerosim begins with, by name."""
    layout = build_model(config, Device(0, NumpyBackend()))
    return {
        weight.name: initial_values(weight, config.data.seed) for flat in layout.flats for weight in flat.spec.weights
    }


def same_losses(ours: Any, theirs: Any) -> str:
    """'' if both computed the same first losses, else a warning: then the figure compares different things."""
    gap = float(np.max(np.abs(np.asarray(ours) - np.asarray(theirs))))
    return "" if gap < SAME_LOSS else f"NOT the same computation: first losses differ by {gap:.2g}"


def check_products(config: RunConfig, bare: BareProducts) -> None:
    """The products seen must be at least those of the linear maps, three per weight and token."""
    weights = 12 * config.model.layers * config.model.hidden**2 + config.model.vocab * config.model.hidden
    needed = 6 * weights * config.global_batch * config.model.seq
    if bare.flops < needed:
        raise RuntimeError(f"saw products of {bare.flops} flops, the linear maps alone have {needed}")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    blas = [f"{pool['internal_api']} {pool['version']}" for pool in threadpool_info() if pool["user_api"] == "blas"]
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": blas,
        "torch": pytorch.version() if pytorch.installed() else None,
    }
