"""Every stage gives the reference's bits: `==` on weights, on losses, at any N, partition and precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import reference

import zerosim
from zerosim.analysis.checks import checks
from zerosim.backends.numpy import ops as numpy_ops
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.comm.collectives import Comm
from zerosim.comm.transports.fake import FakeTransport
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.device.device import Kind
from zerosim.device.events import Alloc, Free, Launch
from zerosim.dtypes import DType, fp32, fp64
from zerosim.errors import NonFiniteGradient
from zerosim.optim.elementwise import Elementwise, Now
from zerosim.parallel.norm import blame
from zerosim.tensor.flat import Flat
from zerosim.tensor.sums import GradProbe
from zerosim.tensor.tensor import cpu
from zerosim.train import data
from zerosim.train.result import RunResult
from zerosim.train.run import run

STEPS = 2
# 12 * 5 + ... : no N below divides every unit's size, so slices are padded.
TINY: dict[str, Any] = dict(layers=2, hidden=10, heads=2, seq=5, vocab=19, steps=STEPS, micro_batch=1, seed=3, lr=1e-2)
SMALL: dict[str, Any] = dict(layers=1, hidden=8, heads=2, seq=8, micro_batch=1, ranks=2)
ZERO = [(stage, partition) for stage in (1, 2, 3) for partition in ("slices", "owner")]
PRECISIONS = ["fp64", "fp32", "bf16", "fp16"]
OWNED = [(stage, partition) for stage, partition in ZERO if partition == "owner"]


def batches(config: RunConfig) -> Any:
    rng = np.random.default_rng(5)
    return rng.integers(0, config.model.vocab, size=(STEPS, config.global_batch, config.model.seq + 1), dtype=np.int64)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """train(config) on fixed tokens."""
    folder = tmp_path_factory.mktemp("tokens")

    @cache
    def tokens_file(shape: tuple[int, ...], vocab: int) -> str:
        path = folder / f"{shape}{vocab}.npz"
        rng = np.random.default_rng(5)
        np.savez(path, tokens=rng.integers(0, vocab, size=shape, dtype=np.int64))
        return str(path)

    def train(**changes: Any) -> RunResult:
        config = RunConfig(**{**TINY, **changes})
        shape = (STEPS, config.global_batch, config.model.seq + 1)
        return run(config.replace(tokens=tokens_file(shape, config.model.vocab)))

    return train


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("ranks", "precision"),
    [*(pytest.param(*case, marks=pytest.mark.bits) for case in product((1, 2, 3), PRECISIONS)), (8, "bf16")],
)
def test_all_stages_and_partitions_give_the_references_bits(train: Any, ranks: int, precision: str) -> None:
    """Tied or not in turn, so that every number of ranks and every precision is tested with both."""
    tied = (ranks + PRECISIONS.index(precision)) % 2 == 0
    options = dict(ranks=ranks, tie_embeddings=tied, precision=precision)
    scale = 1.0
    if precision == "fp16":
        options["loss_scale"] = scale = 256.0
    ddp = train(stage=0, **options)
    weights, losses = reference.train(ddp.config, batches(ddp.config), scale)
    assert ddp.losses == losses
    assert equal(ddp.weights, weights)
    for stage, partition in ZERO:
        result = train(stage=stage, partition=partition, **options)
        assert result.losses == losses, (stage, partition)
        assert equal(result.weights, weights), (stage, partition)
        assert result.live_bytes_after == [0] * ranks


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize(
    "options",
    [
        dict(dropout=0.1, clip_norm=0.05, precision="bf16", grad_dtype="fp32"),
        dict(precision="bf16", bucket_bytes=64),
        dict(precision="fp32", bucket_bytes=1000, clip_norm=0.1),
        dict(bucket_bytes=None),
        dict(betas=(0.8, 0.95), eps=1e-3),
        dict(parallel=2, dropout=0.1),
    ],
    ids=str,
)
def test_options_keep_the_references_bits(train: Any, options: dict[str, Any]) -> None:
    options = {"precision": "fp32", **options}
    ddp = train(stage=0, ranks=3, **options)
    weights, losses = reference.train(ddp.config, batches(ddp.config))
    assert ddp.losses == losses
    assert equal(ddp.weights, weights)
    for stage, partition in ZERO:
        assert equal(train(stage=stage, partition=partition, ranks=3, **options).weights, weights), (stage, partition)


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize("optimizer", OPTIONS["optimizer"].choices)
def test_every_optimizer_takes_the_same_step_in_every_stage(train: Any, optimizer: str) -> None:
    """The reference knows Adam alone: of others a slice's step must be the whole's. Where slices exchange sums, it is
    that of the other slices (tests/optim/test_adafactor.py has how near it is)."""
    options = dict(ranks=3, precision="bf16", optimizer=optimizer, weight_decay=0.1, clip_norm=0.1)
    cut = OPTIMIZERS[optimizer].cut
    expected = {"owner": train(stage=0, **options).weights}
    expected["slices"] = train(stage=1, **options).weights if cut == "sums" else expected["owner"]
    for stage, partition in ZERO if cut != "matrices" else OWNED:
        weights = train(stage=stage, partition=partition, **options).weights
        assert equal(weights, expected[partition]), (stage, partition)


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize(("ranks", "precision"), [(1, "bf16"), (2, "fp32"), (4, "bf16"), (4, "fp32")])
def test_owners_of_whole_matrices_take_the_whole_models_step(train: Any, ranks: int, precision: str) -> None:
    """A matrix's step on its owner is that of a rank with all of them, be the owner of a tensor or of a unit."""
    options = dict(ranks=ranks, precision=precision, optimizer="muon", lr=0.02)
    ddp = train(stage=0, **options)
    assert ddp.losses[0] != ddp.losses[1]
    for stage, partition in OWNED:
        result = train(stage=stage, partition=partition, **options)
        assert result.losses == ddp.losses, stage
        assert equal(result.weights, ddp.weights), stage
        assert all(check.agrees for check in [*checks(result)[0].states, *checks(result, 1)[0].sent])
        assert result.live_bytes_after == [0] * ranks
    by_unit = train(stage=2, gather="unit", **options)
    assert equal(by_unit.weights, ddp.weights)
    assert len(by_unit.units) < len(result.units)


@dataclass(frozen=True)
class SignSGD(Elementwise):
    """Bernstein et al., 1802.04434: an optimizer of one's own, which is a rule and nothing else."""

    weight_decay: float = 0.0
    flops: ClassVar[int] = 2

    def rule(self, xp: Any, w: Any, g: Any, now: Now, *states: Any) -> None:
        w -= now.lr * xp.sign(g)


@pytest.mark.bits
def test_an_optimizer_of_ones_own_is_a_rule() -> None:
    """Every weight moves by lr, and every stage, ZeRO-3 too, takes it as it is."""
    options: dict[str, Any] = {**SMALL, "ranks": 3, "precision": "fp64", "steps": 1, "stage": 0}
    before = run(RunConfig(optimizer="sgd", lr=1e-300, **options)).weights
    for stage, partition in [(0, "slices"), *ZERO]:
        config = RunConfig(lr=2.0**-12, **{**options, "stage": stage, "partition": partition})
        after = zerosim.run(config, optimizer=SignSGD())
        steps = np.concatenate([(after.weights[name] - before[name]).reshape(-1) for name in before])
        assert np.isin(abs(steps).round(12), [0.0, round(2.0**-12, 12)]).all()
        assert (steps != 0).mean() > 0.5
        assert not any(memory.peak.by_kind.get("optim") for memory in after.memory)


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("model", [dict(), dict(seq=1, dropout=0.1), dict(model="llama", heads=1, kv_heads=1)], ids=str)
def test_stages_agree_wherever_in_memory_arrays_start(
    train: Any, model: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocator promises no alignment beyond that of one element, and no stage asks it for what another does."""
    random = np.random.default_rng(1)

    def anywhere(shape: tuple[int, ...], dtype: DType) -> Any:
        offset, numel = int(random.integers(0, 64 // dtype.itemsize)), math.prod(shape)
        return numpy_ops.empty((numel + offset,), dtype)[offset:].reshape(shape)

    monkeypatch.setattr(NumpyBackend, "empty", staticmethod(anywhere))
    options = dict(ranks=2, precision=precision, clip_norm=0.05, **model)
    first = train(stage=0, **options)
    for stage, partition in [(0, "slices"), *ZERO]:
        result = train(stage=stage, partition=partition, **options)
        assert result.losses == first.losses
        assert [step.grad_norm for step in result.steps] == [step.grad_norm for step in first.steps]
        assert equal(result.weights, first.weights), (stage, partition)


@pytest.mark.bits
@pytest.mark.parametrize("options", [dict(keep_last_unit=True), dict(reshard_after_forward=False)], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_what_stays_gathered_changes_no_bit(train: Any, options: dict[str, Any], tied: bool) -> None:
    plain = train(stage=3, ranks=2, tie_embeddings=tied)
    assert equal(plain.weights, train(stage=3, ranks=2, tie_embeddings=tied, **options).weights)


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize(("precision", "ranks"), [("fp32", 1), ("bf16", 2), ("fp32", 3), ("bf16", 3)])
def test_accumulation_pairs_stages(train: Any, precision: str, ranks: int) -> None:
    """Stages 0 and 1 add over microbatches, then ranks; 2 and 3 the other way: each pair is equal to the bit."""
    options = dict(precision=precision, ranks=ranks, accumulate=3)
    results = {(s, p): train(stage=s, partition=p, **options) for s, p in [(0, "slices"), *ZERO]}
    whole, early = results[0, "slices"].weights, results[2, "slices"].weights
    for partition in ("slices", "owner"):
        assert equal(results[1, partition].weights, whole)
        assert equal(results[2, partition].weights, early)
        assert equal(results[3, partition].weights, early)
    # The pairs differ by rounding alone: on the losses, a few units in the last place.
    eps = {"fp32": 2.0**-23, "bf16": 2.0**-8}[precision]
    assert np.allclose(results[0, "slices"].losses, results[2, "slices"].losses, rtol=8 * eps, atol=0)
    if ranks == 3:
        assert not equal(whole, early)


@pytest.mark.slow
def test_in_fp16_the_pairs_may_skip_different_steps() -> None:
    """A sum over microbatches overflows where the mean over ranks, taken first, would have been small enough."""
    options = dict(SMALL, hidden=16, ranks=4, accumulate=4, steps=6, lr=1e-3, precision="fp16", loss_scale=2.0**18)
    skipped = [[step.skipped for step in run(RunConfig(stage=stage, **options)).steps] for stage in range(4)]
    assert skipped[0] == skipped[1]
    assert skipped[2] == skipped[3]
    assert sum(skipped[2]) < sum(skipped[0])


@pytest.mark.bits
def test_a_global_batch_gives_the_same_masks_however_it_is_cut(train: Any) -> None:
    """Dropout is keyed by the global microbatch: 1 rank with 4 microbatches sees what 4 ranks see."""
    one = train(stage=0, ranks=1, accumulate=4, dropout=0.3, precision="fp64")
    four = train(stage=0, ranks=4, accumulate=1, dropout=0.3, precision="fp64")
    assert one.losses[0][0] == pytest.approx(sum(four.losses[0]) / 4, rel=1e-14)
    for name, value in one.weights.items():
        assert np.allclose(value, four.weights[name], rtol=1e-9, atol=1e-12), name


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_pairs_give_the_bits_of_direct(train: Any, stage: int) -> None:
    """An odd number of ranks, and buckets that they do not divide."""
    fields = dict(stage=stage, ranks=3, precision="bf16", bucket_bytes=1000, clip_norm=0.1)
    direct, pairs = train(**fields), train(**fields, collective="pairs")
    assert pairs.losses == direct.losses
    assert all(np.array_equal(pairs.weights[name], value) for name, value in direct.weights.items())
    sent, fewest = (
        sum(row.sent_bytes or 0 for row in result.traffic[0] if row.purpose == "states") for result in (pairs, direct)
    )
    assert (sent > fewest) == (stage == 0)


def test_ring_differs_from_direct_by_rounding_only(train: Any) -> None:
    direct = train(stage=3, ranks=4, precision="fp64")
    ring = train(stage=3, ranks=4, precision="fp64", collective="ring")
    assert max(np.abs(direct.weights[n] - ring.weights[n]).max() for n in ring.weights) < 1e-9
    assert direct.losses[0] == ring.losses[0]


def test_exact_masters_keep_what_rounding_loses(train: Any) -> None:
    rounded = train(stage=3, ranks=2, precision="bf16", lr=1e-12)
    exact = train(stage=3, ranks=2, precision="bf16", lr=1e-12, master_init="exact")
    full = train(stage=3, ranks=2, precision="fp32", lr=1e-12)
    name = "h.0.mlp.c_fc.weight"
    assert np.allclose(exact.weights[name], full.weights[name], atol=1e-9)
    assert not np.allclose(rounded.weights[name], full.weights[name], atol=1e-9)


def test_overflow_on_one_rank_skips_the_step_on_all() -> None:
    options = dict(precision="fp16", initial_scale_power=24, hysteresis=1, steps=20, loss_scale_window=2, **SMALL)
    results = [run(RunConfig(stage=s, partition=p, **options)) for s, p in [(0, "slices"), *ZERO]]
    skipped = [step.skipped for step in results[0].steps]
    scales = [step.loss_scale for step in results[0].steps]
    assert skipped[0]
    assert not all(skipped)
    assert max(scales[i + 1] / scales[i] for i in range(19)) == 2.0  # it rose again, too
    for result in results[1:]:
        assert [step.skipped for step in result.steps] == skipped
        assert [step.loss_scale for step in result.steps] == scales
        assert equal(result.weights, results[0].weights)
    # A skipped step moves neither weights nor traffic of parameters.
    gathers = [row.step for row in results[1].traffic[0] if row.op == "all_gather"]
    assert gathers == [step for step in range(20) if not skipped[step]]


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_that_is_not_finite_stops_the_run_and_names_rank_unit_and_step(stage: int, tmp_path: Any) -> None:
    config = RunConfig(stage=stage, precision="fp32", steps=30, lr=1e38, optimizer="sgd", **SMALL)
    with pytest.raises(
        NonFiniteGradient, match=r"rank \d's gradient of \S+ is not finite at step \d+.*--skip-nonfinite"
    ):
        run(config)
    result = run(config.replace(skip_nonfinite=True))
    assert any(step.skipped for step in result.steps)


def test_of_several_bad_gradients_the_one_that_backward_met_first_is_named() -> None:
    """What comes after it in backward is spoiled by it."""
    device, flats = cpu(), list[Flat]()
    for name, value in (("first", np.nan), ("middle", np.nan), ("last", 0.0)):
        flat = Flat(name, device, fp32, fp32)
        flat.collector.probe = probe = GradProbe(device)
        probe.flag = device.alloc((1,), fp64, Kind.TEMP)
        probe.flag.array[...] = value
        flats.append(flat)
    comm = Comm(device, FakeTransport(), (0,))
    assert "rank 0's gradient of middle is not finite" in str(blame(comm, flats, ["first", "middle", "last"]))


@pytest.mark.parametrize("options", [dict(stage=1), dict(stage=2), dict(stage=3, persistent_numel=10**9)], ids=str)
def test_what_is_over_goes_before_new_parameters_are_gathered(options: dict[str, Any]) -> None:
    """A flat's gradient, and where it stays gathered for good its old parameters: none adds to the new ones' peak."""
    [events, _] = run(RunConfig(**{**SMALL, "steps": 1}, **options), keep_events=True).events
    held: dict[int, str] = {}
    left: list[tuple[int, int]] = []
    for event in events:
        if isinstance(event, Alloc):
            held[event.id] = event.kind
        elif isinstance(event, Free):
            del held[event.id]
        elif isinstance(event, Launch) and event.op == "all_gather" and event.scope.phase == "optimizer":
            kinds = list(held.values())
            left.append((kinds.count("grad"), kinds.count("unsharded_param")))
    whole = 4 if options["stage"] == 3 else 0  # of four flats
    assert left == [(3, whole), (2, whole), (1, whole), (0, whole)]


@pytest.mark.bits
def test_the_mlp_trains_the_same_in_every_stage() -> None:
    results = [
        run(RunConfig(model="mlp", stage=s, ranks=3, layers=2, hidden=14, seq=8, steps=3, precision="fp32"))
        for s in range(4)
    ]
    assert all(equal(results[0].weights, other.weights) for other in results[1:])
    assert results[0].mean_losses[-1] < results[0].mean_losses[0]


def test_rows_go_to_ranks_in_order() -> None:
    batch = np.arange(24).reshape(12, 2)
    cut = [data.micro_batches(batch, rank, ranks=3, accumulate=2) for rank in range(3)]
    assert np.array_equal(np.concatenate([m for rank in cut for m in rank]), batch)
    assert all(m.shape == (2, 2) for rank in cut for m in rank)
