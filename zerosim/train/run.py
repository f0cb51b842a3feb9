"""From a RunConfig to a RunResult: read the inputs, launch the program on every rank, and gather the results.

Bad input is found here before any rank starts. Weights are assembled from the ranks' slices
on the host, as when a sharded checkpoint is consolidated. That is no traffic of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.backends.kernels import GpuBytes
from zerosim.comm.collective_errors import on_every_process
from zerosim.comm.runtime import Context, launch
from zerosim.config import RunConfig
from zerosim.config.parts import in_backward
from zerosim.config.parts.parallel import is_sliced
from zerosim.config.presets.optimizers import OPTIMIZERS, SECOND_MOMENTS
from zerosim.device.device import Device
from zerosim.device.nvme import in_run_folder
from zerosim.device.recorder import Reader
from zerosim.errors import InputError, OutOfMemory
from zerosim.ledger.ranks import RankLedgers, check_alike, of_all_processes
from zerosim.models.model import Model, draw_flat
from zerosim.nn import Group
from zerosim.nn.balance import NOTHING_ROUTED, Routed, routed_by
from zerosim.optim.control import StepReport
from zerosim.optim.optimizer import Optimizer, estimates_every
from zerosim.parallel.base import Strategy
from zerosim.parallel.pipeline import Schedule
from zerosim.placement.assemble import Piece, assemble
from zerosim.placement.axes import first_ranks
from zerosim.placement.mesh import CUTS, DATA, SHARES
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import generator
from zerosim.tensor.stored import values_of
from zerosim.train import data
from zerosim.train.build import MakeStrategy, declare
from zerosim.train.generate import generate
from zerosim.train.machine import check_libraries, check_room_for
from zerosim.train.masked import mask_tokens
from zerosim.train.offload import check_folder, folder_of
from zerosim.train.rank import Inputs, Opened, Progress, Trained, train_rank
from zerosim.train.result import GpuUse, RunResult, collect
from zerosim.train.saving import unwritten, with_checkpoints
from zerosim.train.tokens import Tokens, check_ids, tokens_of
from zerosim.train.work import check_run
from zerosim.train.world import world_of

DEFAULT_STEPS = 60


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """The return value of one rank's program; `pieces` are the slices that it updates.

    `gpu`: its GPU, if any, and the bytes in use there at the end. `lost`: by step, the number of its
    updates that left a weight unchanged, and its second moment, if weights have no masters; for copies the first rank
    counts. `routed`: its tokens' choices of experts. `biases`: of its routers, by name.
    """

    losses: list[float]
    steps: list[StepReport]
    pieces: list[Piece]
    sample: bytes | None
    gpu: GpuBytes | None
    lost: list[tuple[int, int]]
    routed: Routed = NOTHING_ROUTED
    biases: Mapping[str, Any] = field(default_factory=dict)


def run(
    config: RunConfig,
    *,
    progress: Progress | None = None,
    keep_events: bool = False,
    optimizer: Optimizer | None = None,
) -> RunResult:
    """Train as `config` says.

    `keep_events` keeps every rank's whole record in the result (memory grows with steps). An `optimizer` of your own,
    such as a subclass of `zerosim.optim.elementwise.Elementwise`, replaces the configuration's.

    Raises: InputError (bad input, before any rank starts), OutOfMemory, RankFailed.
    """
    with on_every_process(config.world.transport) as session:
        if session is not None:
            session.check_world(config.mesh.ranks, config.world.ranks_per_process)
            check_alike(session, config)
        experiment = Experiment(config, optimizer=optimizer)
    ledgers: dict[int, RankLedgers] = {}

    def readers(rank: int) -> tuple[Reader, ...]:
        ledgers[rank] = RankLedgers(rank, world_of(config).allocator)
        return ledgers[rank].readers

    def program(ctx: Context) -> RankOutcome:
        try:
            return experiment.train_rank(ctx, progress=progress)
        except OutOfMemory as error:
            ctx.device.recorder.drain()
            ledgers[ctx.rank].explain(error)
            raise
        finally:
            ledgers[ctx.rank].events = ctx.device.recorder.history

    def launched(folder: Path | None) -> list[RankOutcome]:
        return launch(program, world_of(config, keep_events=keep_events, folder=folder), readers)

    where, writes = folder_of(config)
    with experiment.holds_folder(is_first=session is None or session.process == 0):
        outcomes = in_run_folder(where, launched, writes=writes)
    counted = list(ledgers.values())
    if session is not None:
        counted, outcomes = of_all_processes(session, counted, outcomes)
    return experiment.result(outcomes, counted, keep_events=keep_events)


class Experiment:
    """One run, its inputs read and checked: the program of each rank, and the result of what they return.

    `make_strategy`, a pipeline's `schedule` and an `optimizer` replace those of the configuration.

    Raises: InputError for inputs that cannot be read or do not fit the run, and for a run that is too large for this
    machine.
    """

    def __init__(
        self,
        config: RunConfig,
        make_strategy: MakeStrategy | None = None,
        schedule: Schedule | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        check_libraries(config)
        check_run(config)
        check_folder(config)
        if schedule is not None and config.mesh.pp == 1:
            raise InputError("a schedule orders pipeline stages, but pp is 1; choose pp 2 or more")
        cut, sliced = "elements" if optimizer is None else optimizer.cut, is_sliced(config.parallel)
        if cut == "matrices" and sliced:
            raise InputError(f"{type(optimizer).__name__} needs whole matrices; choose partition owner, or stage 0")
        if optimizer is not None and estimates_every(optimizer):
            if config.mesh.tp > 1:
                raise InputError(f"{type(optimizer).__name__} draws labels from logits, which tp cuts; choose tp 1")
            for error in in_backward.no_estimates(config.grads, type(optimizer).__name__):
                raise error
        if cut == "blocks" and sliced and OPTIMIZERS[config.optim.optimizer].cut != "blocks":
            raise InputError(
                f"{type(optimizer).__name__} needs whole quantization blocks; choose optimizer adam8bit too"
            )
        self.config = config
        self.make_strategy = make_strategy
        self.schedule = schedule
        self.optimizer = optimizer
        self.whole = declare(config)
        self.model, self.layout = self.whole
        self._tokens = tokens_of(config.data.tokenizer)
        self._prompt = _read_prompt(config, self._tokens)
        self._inputs, self._biases = _read_inputs(config, self.model, self._tokens)
        self._folder, self._inputs = with_checkpoints(config, self.whole, self._inputs, optimizer)
        check_room_for(config, self.model)

    def without_files(self) -> Experiment:
        """Let saves be recorded and written nowhere: a run that is stepped goes back, and begins again."""
        self._folder, self._inputs = None, unwritten(self._inputs)
        return self

    @property
    def steps(self) -> int:
        """The number of steps: given, or as many as the tokens hold."""
        return self._inputs.steps

    def holds_folder(self, *, is_first: bool = True) -> AbstractContextManager[None]:
        """Hold the folder that the run saves in, if there is one, on the first of its processes."""
        return (
            nullcontext() if self._folder is None or not is_first else self._folder.held(self._inputs.checkpoints.first)
        )

    def train_rank(
        self, ctx: Context, *, progress: Progress | None = None, opened: Opened | None = None
    ) -> RankOutcome:
        """Run the program of one rank, which is the same on all ranks."""
        config, device = self.config, ctx.device

        def opens(ctx: Context, model: Model, strategy: Strategy) -> None:
            if model.group.balance is not None:
                model.group.balance.load(self._biases)
            if opened is not None:
                opened(ctx, model, strategy)

        trained = train_rank(
            ctx,
            config,
            self._inputs,
            make_strategy=self.make_strategy,
            schedule=self.schedule,
            optimizer=self.optimizer,
            whole=self.whole,
            progress=progress,
            opened=opens,
        )
        with device.scope(step=self.steps):  # records from here on come after the last step
            sample = None if config.data.sample is None else self._sample(trained, device)
        to_host = device.backend.to_host
        pieces = [
            Piece(
                ctx.rank,
                flat.name,
                flat.own,
                to_host(flat.weights().array),
                None if flat.scales is None else to_host(flat.scales.array),
            )
            for flat in trained.model.flats
        ]
        gpu = None if device.stream is None else device.stream.gpu_bytes()
        lost = self._lost_on(ctx.rank, trained.strategy.updater.lost.counts())
        routed, biases = NOTHING_ROUTED, dict[str, Any]()
        if (balance := trained.model.group.balance) is not None:
            biases = {name: np.array(bias, np.float32) for name, bias in balance.biases.items()}
            mesh = self.layout.mesh
            if mesh.is_folded or mesh.index(ctx.rank, *CUTS) == 0:  # others have the same tokens
                routed = balance.routed
        return RankOutcome(trained.losses, trained.reports, pieces, sample, gpu, lost, routed, biases)

    def result(
        self, outcomes: Sequence[RankOutcome], ledgers: Sequence[RankLedgers], *, keep_events: bool = False
    ) -> RunResult:
        """Combine the ranks' return values and the counts of their ledgers."""
        mesh = self.layout.mesh
        last = self.config.chunks.last_stage  # the ranks that have losses
        data_ranks = [mesh.group(rank, "pp")[last] for rank in first_ranks(mesh, *DATA)]
        shares = [[outcomes[one].losses for one in mesh.group(rank, *SHARES)] for rank in data_ranks]  # of each's rows
        return collect(
            self.config,
            self.model,
            self.layout,
            dict(enumerate(ledgers)),
            range(self.config.mesh.ranks),
            outcomes[0].steps,
            losses=[list(step) for step in zip(*map(_mean, shares), strict=True)],
            weights=assemble(self.layout, [piece for outcome in outcomes for piece in outcome.pieces], values_of)
            | {name: bias for outcome in outcomes for name, bias in outcome.biases.items()},
            routed=routed_by(outcome.routed for outcome in outcomes),
            sample=outcomes[0].sample,
            first_step=self._inputs.checkpoints.first,
            keep_events=keep_events,
            lost_updates=self._lost(outcomes, 0),
            stuck_moments=self._lost(outcomes, 1) if self.config.optim.optimizer in SECOND_MOMENTS else (),
            gpus=_gpu_uses(outcomes, ledgers) if self.config.world.transport == "threads" else (),
        )

    def _sample(self, trained: Trained, device: Device) -> bytes:
        """Return the model's continuation of `sample` by `sample_tokens` tokens, at temperature 0.8."""
        config = self.config
        random = generator("sample", config.data.seed)

        def choose(logits: Any) -> int:
            weights = np.exp((logits - logits.max()).astype(np.float64) / 0.8)
            return int(random.choice(len(weights), p=weights / weights.sum()))

        ids = generate(
            trained.model,
            self._prompt,
            config.data.sample_tokens,
            config.model.seq,
            trained.strategy,
            device,
            choose,
            trained.pipeline,
        )
        return self._tokens.decode(self._prompt, ids)

    def _lost_on(self, rank: int, counts: Mapping[tuple[int, str], Any]) -> list[tuple[int, int]]:
        """Return, by step, the numbers of this rank's lost updates; for weights that several ranks update, the first
        one counts."""
        first = self._inputs.checkpoints.first
        mesh, lost = self.layout.mesh, [(0, 0)] * (self.steps - first if self.config.precision.rounding else 0)
        copies = DATA if self.config.parallel.zero_stage == 0 else ("dp_replicate",)
        if mesh.index(rank, *copies):
            return lost
        stage = mesh.index(rank, "pp")
        for (step, name), values in counts.items():
            flat = self.layout.flats[name]
            if self.layout.is_counted(stage, name):
                mine = [2 * at for at, weight in enumerate(flat.weights) if weight.counts(mesh, rank, flat.cut_axes)]
                weights, moments = (
                    lost[step - first][which] + sum(int(values[at + which]) for at in mine) for which in (0, 1)
                )
                lost[step - first] = weights, moments
        return lost

    def _lost(self, outcomes: Sequence[RankOutcome], which: int) -> list[Fraction]:
        """Return, by step, the share of all weights that an update left unchanged (0), or their second moments (1)."""
        by_step = zip(*(outcome.lost for outcome in outcomes), strict=True)
        return [Fraction(sum(each[which] for each in step), self.model.num_parameters) for step in by_step]


def _mean(shares: Sequence[Sequence[float]]) -> list[float]:
    """Return the means of the losses of ranks that share rows, by step."""
    return [sum(step) / len(step) for step in zip(*shares, strict=True)]


def _read_prompt(config: RunConfig, tokens: Tokens) -> list[int]:
    """Return the token ids of the text to continue; none without one."""
    text = config.data.sample
    if text is None:
        return []
    ids = tokens.encode(text.encode(), "sample")
    if not len(ids):
        raise InputError(f"sample {text!r} has no token{tokens.source}: choose other text")
    check_ids(ids, config.model.vocab, f"sample {text!r}", tokens)
    return [int(one) for one in ids]


def _read_inputs(config: RunConfig, model: Model, tokens_of_text: Tokens) -> tuple[Inputs, Mapping[str, Any]]:
    """Return the inputs of ranks, and the biases of routers that were given."""
    balance = model.group.balance
    of_routers = {} if balance is None else {name: (len(bias),) for name, bias in balance.biases.items()}
    weights = data.read_start(config, {**model.shapes(), **of_routers})
    biases = {name: weights[name] for name in of_routers if name in weights}
    rows, seq, vocab = config.global_batch, config.model.text_tokens, config.model.vocab
    needs = "seq + decoder_seq_length" if config.model.is_second else "seq + 1"
    mask = tokens_of_text.mask(vocab) if config.model.is_masked else 0
    batch: Callable[[int], Any]
    if config.data.tokens is not None:
        if config.data.file is not None:
            raise InputError("data and tokens are both given: choose one")
        tokens = data.read_tokens(config.data.tokens, rows, seq, vocab, config.optim.steps, needs)
        steps, batch = len(tokens), tokens.__getitem__
    else:
        text = data.read_text(config.data.file, seq, vocab, tokens_of_text, needs)
        steps = config.optim.steps or DEFAULT_STEPS
        batch = partial(data.sample_batch, text, config.data.seed, rows=rows, seq=seq)

    def micro_batches(ctx: Context, model: Model, step: int) -> list[Any]:
        data_rank, data_size = config.mesh.axes.index(ctx.rank, *DATA), config.mesh.axes.size(*DATA)
        whole = batch(step)
        if model.group.documents is not None:
            model.group.documents.expect(whole, config.mesh.axes.size(*DATA, *SHARES))
        if config.model.is_masked:
            whole = mask_tokens(whole[:, :-1], config.data.seed, step, vocab, mask)
        if config.model.is_second:
            whole = data.shift_right(whole, config.model.seq, config.model.numbers.decoder_start)
        return data.micro_batches(whole, data_rank, data_size, config.data.accumulate)

    return Inputs(steps, micro_batches, _writer(config, weights)), biases


def _writer(config: RunConfig, weights: Mapping[str, Any]) -> Callable[[Flat, Group], None]:
    exact = config.precision.master_init == "exact"
    return lambda flat, group: draw_flat(flat, config.data.seed, group, exact_master=exact, given=weights)


def _gpu_uses(outcomes: Sequence[RankOutcome], ledgers: Sequence[RankLedgers]) -> tuple[GpuUse, ...]:
    """Return for each GPU the bytes in use when the last of its ranks ended, and those outside all ranks' pools."""
    uses: dict[int, GpuUse] = {}
    for outcome, ledger in zip(outcomes, ledgers, strict=True):
        if outcome.gpu is None:
            continue
        index, name, used = outcome.gpu
        before = uses.get(index) or GpuUse(index, name, 0, 0)
        held = before.used_bytes - before.outside_bytes + ledger.pool.rows[-1].held_bytes
        most = max(before.used_bytes, used)
        uses[index] = GpuUse(index, name, most, most - held)
    return tuple(uses[index] for index in sorted(uses))
