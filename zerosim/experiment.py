"""From a RunConfig to a RunResult: read the inputs, launch the program on every rank, gather what it leaves.

Bad input is found here before any rank starts. Weights are put together from the ranks' own slices
on the host, as a sharded checkpoint is consolidated: that is no traffic of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim import data, engine
from zerosim.build import build_model, build_updater, place_model
from zerosim.device import Device
from zerosim.errors import InputError, OutOfMemory
from zerosim.ledger import ActivationLedger, CommLedger, MemoryLedger
from zerosim.models.model import Model, check_weights, draw_flat, load_flat
from zerosim.optim.updater import StepReport
from zerosim.parallel.base import Strategy
from zerosim.planner.search import cheapest_fit
from zerosim.record import Event, Reader
from zerosim.result import RankMemory, RunResult, unit_infos
from zerosim.rng import generator
from zerosim.runtime import Context, World, launch, make_backend
from zerosim.scenario import RunConfig
from zerosim.shapes import peak_of
from zerosim.sharding import Flat
from zerosim.units import format_bytes

DEFAULT_STEPS = 60
Progress = Callable[[int, int, float], None]
"""Called as progress(rank, step, loss) on the rank's own thread."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What is read before ranks start: batches by step, and weights to begin with."""

    steps: int
    batch: Callable[[int], Any]
    weights: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class _RankOutcome:
    losses: list[float]
    steps: list[StepReport]
    pieces: dict[str, tuple[int, Any]]
    sample: bytes | None


def run(config: RunConfig, *, progress: Progress | None = None, keep_events: bool = False) -> RunResult:
    """Train as `config` says.

    `keep_events` keeps every rank's whole record in the result (memory grows with steps).

    Raises: InputError (bad input, before any rank starts), OutOfMemory (with the cheapest change
    that fits, found by trying), RankFailed.
    """
    layout = build_model(config, Device(0, make_backend("numpy")))
    inputs = _read_inputs(config, layout)
    _check_capacity(config, layout)
    try:
        return _run(config, layout, inputs, progress, keep_events)
    except OutOfMemory as error:
        assert config.capacity is not None
        error.advice = cheapest_fit(config.replace(capacity=None, steps=1), config.capacity, peak_of)
        raise


def _run(config: RunConfig, layout: Model, inputs: _Inputs, progress: Progress | None, keep_events: bool) -> RunResult:
    memory = [MemoryLedger() for _ in range(config.ranks)]
    traffic = [CommLedger() for _ in range(config.ranks)]
    activations = ActivationLedger()  # of rank 0: every rank saves the same
    histories: list[list[Event]] = [[] for _ in range(config.ranks)]

    def program(ctx: Context) -> _RankOutcome:
        try:
            return _train_rank(ctx, config, inputs, progress)
        except OutOfMemory as error:
            ctx.device.recorder.drain()
            refusal = memory[ctx.rank].refusal
            error.live = dict(refusal.by_kind) if refusal else {}
            raise
        finally:
            histories[ctx.rank] = ctx.device.recorder.history

    world = World(
        ranks=config.ranks,
        parallel=config.parallel,
        collective=config.collective,
        bucket_bytes=config.bucket_bytes,
        capacity=config.capacity,
        keep_events=keep_events,
    )

    def readers(rank: int) -> tuple[Reader, ...]:
        return (memory[rank], traffic[rank], *([activations] if rank == 0 else []))

    outcomes = launch(program, world, readers)
    return RunResult(
        config=config,
        num_parameters=layout.num_parameters,
        units=unit_infos(config, layout),
        tied_numel=layout.tied_numel,
        losses=[list(step) for step in zip(*(outcome.losses for outcome in outcomes), strict=True)],
        steps=outcomes[0].steps,
        memory=[RankMemory(dict(ledger.marks), ledger.peak) for ledger in memory],
        traffic=[ledger.rows() for ledger in traffic],
        weights=_assemble(layout, [outcome.pieces for outcome in outcomes]),
        sample=outcomes[0].sample,
        live_bytes_after=[ledger.live_bytes for ledger in memory],
        events=histories if keep_events else [],
        stands_for=list(range(config.ranks)),
        saved=activations.saved(),
        saved_again=activations.saved_again(),
    )


def _train_rank(ctx: Context, config: RunConfig, inputs: _Inputs, progress: Progress | None) -> _RankOutcome:
    """The program of one rank: the same on all of them."""
    device = ctx.device
    updater = build_updater(config, inputs.steps)
    model, strategy = place_model(ctx, config, updater, _writer(config, inputs.weights))

    losses: list[float] = []
    for micro_losses in engine.train(model, _batches(ctx, config, inputs), strategy, device):
        losses.append(sum(micro_losses) / len(micro_losses))
        if progress is not None:
            progress(ctx.rank, len(losses) - 1, losses[-1])
    with device.scope(step=len(losses)):  # what is recorded from here on comes after the last step
        sample = None if config.sample is None else _sample(config, model, strategy, device)
    to_host = device.backend.to_host
    pieces = {flat.name: (flat.own.start, to_host(flat.weights().array)) for flat in model.flats}
    return _RankOutcome(losses, updater.reports, pieces, sample)


def _read_inputs(config: RunConfig, layout: Model) -> _Inputs:
    weights = None
    if config.weights is not None:
        weights = data.read_weights(config.weights)
        check_weights({name: array.shape for name, array in weights.items()}, layout.shapes())
    rows, seq = config.global_batch, config.seq
    if config.tokens is not None:
        if config.data is not None:
            raise InputError("data and tokens are both given: choose one")
        tokens = data.read_tokens(config.tokens, rows, seq, config.vocab, config.steps)
        return _Inputs(len(tokens), lambda step: tokens[step], weights)
    text = data.read_text(config.data, seq, config.vocab)
    steps = config.steps or DEFAULT_STEPS
    return _Inputs(steps, lambda step: data.sample_batch(text, config.seed, step, rows, seq), weights)


def _check_capacity(config: RunConfig, layout: Model) -> None:
    largest = max(layout.flats, key=lambda flat: flat.numel)
    needed = largest.numel * largest.dtype.itemsize
    if config.capacity is not None and config.capacity < needed:
        raise InputError(
            f"capacity {format_bytes(config.capacity)} is too small for one unit: the parameters of "
            f"{largest.name} alone take {format_bytes(needed)} while they are used, in any stage"
        )


def _writer(config: RunConfig, weights: Mapping[str, Any] | None) -> Callable[[Flat], None]:
    exact = config.master_init == "exact"
    if weights is None:
        return lambda flat: draw_flat(flat, config.seed, exact_master=exact)
    return lambda flat: load_flat(flat, weights, exact_master=exact)


def _batches(ctx: Context, config: RunConfig, inputs: _Inputs) -> Iterator[list[Any]]:
    for step in range(inputs.steps):
        yield data.micro_batches(inputs.batch(step), ctx.rank, config.ranks, config.accumulate)


def _sample(config: RunConfig, model: Model, strategy: Strategy, device: Device) -> bytes:
    """`sample_tokens` bytes that the model continues `sample` with, at temperature 0.8."""
    random = generator("sample", config.seed)

    def choose(logits: Any) -> int:
        weights = np.exp((logits - logits.max()).astype(np.float64) / 0.8)
        return int(random.choice(len(weights), p=weights / weights.sum()))

    prompt = list((config.sample or "").encode())
    tokens = engine.generate(model, prompt, config.sample_tokens, config.seq, strategy, device, choose)
    return bytes(token for token in tokens if token < 256)


def _assemble(layout: Model, pieces: list[dict[str, tuple[int, Any]]]) -> dict[str, Any]:
    """Full weights by name from what each rank owned."""
    weights: dict[str, Any] = {}
    for flat in layout.flats:
        parts = sorted((rank_pieces[flat.name] for rank_pieces in pieces), key=lambda part: part[0])
        if parts[0][1].size == flat.numel:  # DDP: every rank has all of it
            values = parts[0][1]
        else:
            values = np.concatenate([values for _, values in parts])
        for spec in flat.specs:
            weights[spec.name] = values[spec.offset : spec.offset + spec.numel].reshape(spec.shape)
    return weights
