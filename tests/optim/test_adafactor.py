"""Adafactor: its formulas written out on whole tensors, its sums under slices, what it keeps, holds and sends."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.cli.main import main
from zerosim.comm.runtime import Context, World, launch
from zerosim.config import RunConfig
from zerosim.device.device import Kind
from zerosim.device.events import Alloc, Kernel
from zerosim.device.recorder import Recorder
from zerosim.dtypes import DType, fp32, fp64
from zerosim.errors import InputError
from zerosim.optim.adafactor import Adafactor, AdafactorHF
from zerosim.optim.control import StepControl
from zerosim.optim.factored import Factored
from zerosim.optim.lr_schedule import LRSchedule
from zerosim.optim.pieces import LocalPiece, rectangles
from zerosim.optim.updater import Updater
from zerosim.parallel.ddp import DDP
from zerosim.parallel.zero2 import Zero2
from zerosim.placement.partition import slice_of
from zerosim.placement.rows import Held
from zerosim.placement.spec import FlatSpec, WeightSpec
from zerosim.tensor.flat import Flat, whole
from zerosim.tensor.tensor import cpu
from zerosim.train.build_strategy import join_by_itself
from zerosim.train.plan import plan
from zerosim.train.run import run

SHAPES = {
    "tall": (11, 4), "bias": (7,), "wide": (3, 20), "one": (1,), "experts": (3, 5, 4), "row": (1, 9), "column": (9, 1),
}  # fmt: skip
BOTH = [
    Adafactor(0.1), AdafactorHF(0.1, beta1=0.9), AdafactorHF(scale_parameter=False, relative_step=False),
    AdafactorHF(),
]  # fmt: skip


def rms(x: np.ndarray) -> float:
    return math.sqrt(float((x**2).mean()))


def written_out(o: Any, w: np.ndarray, grads: list[np.ndarray], lr: float) -> np.ndarray:
    """1804.04235, algorithms 4 and 5, with what each library does otherwise."""
    hf, eps = isinstance(o, AdafactorHF), np.finfo(w.dtype).eps
    rows = columns = v = m = 0.0
    for t, g in enumerate(grads, 1):
        beta, squares = 1 - t**-0.8, g**2 + (1e-30 if hf else 0.0)
        rows = beta * rows + (1 - beta) * squares.mean(-1, keepdims=True)
        columns = beta * columns + (1 - beta) * squares.mean(max(0, w.ndim - 2), keepdims=True)
        v = beta * v + (1 - beta) * squares
        mean = rows.mean(max(0, w.ndim - 2), keepdims=True)  # of each matrix
        estimate = rows * columns / np.maximum(mean, 0 if hf else eps) if w.ndim > 1 else v
        u = g / np.sqrt(np.maximum(estimate, 0 if hf else eps**2))
        u = u / max(1.0, rms(u))
        if not hf:
            step = max(1e-3, rms(w)) * min(lr, t**-0.5)
            w = w * (1 - lr * o.weight_decay) - step * u
            continue
        step = min(lr, t**-0.5) if o.relative_step else lr
        step *= max(1e-3, rms(w)) if o.scale_parameter else 1.0
        m = step * u if o.beta1 is None else o.beta1 * m + (1 - o.beta1) * step * u
        w = w * (1 - o.weight_decay * step) - m
    return w


def stepped(o: Factored, dtype: DType, stage: int, ranks: int, lr: float = 0.3, steps: int = 20) -> dict[str, Any]:
    """Final weights by name after steps on gradients that every rank is given."""
    random = np.random.default_rng(4)
    weights = {name: random.standard_normal(shape) for name, shape in SHAPES.items()}
    grads = [
        {n: random.standard_normal(s) * 10.0 ** random.uniform(-6, 1, s) for n, s in SHAPES.items()}
        for _ in range(steps)
    ]

    def program(ctx: Context) -> Any:
        flat = Flat("all", ctx.device, dtype, dtype)
        for name, shape in SHAPES.items():
            flat.declare(name, shape)
        strategy = (Zero2 if stage else DDP)(ctx.comm, ctx.device, Updater(o, StepControl(LRSchedule(lr))))
        join_by_itself(strategy, [flat])
        strategy.place(
            [flat],
            lambda target: [
                target.write(i, weights[spec.name], exact_master=False) for i, spec in enumerate(flat.spec.weights)
            ],
        )
        for given in grads:
            values = np.concatenate([given[name].reshape(-1) for name in SHAPES])
            flat.grad_shard = ctx.device.alloc((flat.own.size,), dtype, Kind.GRAD)
            padded = np.pad(values, (0, flat.own.stop * ctx.world_size))
            ctx.device.backend.from_host(padded[flat.own.start : flat.own.stop], flat.grad_shard.array)
            strategy.step()
        return ctx.device.backend.to_host(flat.weights().array)

    pieces = launch(program, World(ranks))
    values, found, at = np.concatenate(pieces) if stage else pieces[0], {}, 0
    for name, shape in SHAPES.items():
        found[name] = values[at : at + math.prod(shape)].reshape(shape)
        at += math.prod(shape)
    expected = {name: written_out(o, weights[name], [g[name] for g in grads], lr) for name in SHAPES}
    if dtype is fp64:
        assert all(np.allclose(found[name], expected[name], rtol=0, atol=1e-12) for name in SHAPES)
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize("o", BOTH, ids=repr)
def test_formulas_and_slices(o: Factored) -> None:
    """Slices from the middle of rows: float64 within 1e-12, float32 within 4 units of the largest weight's last place
    of what one process makes; one rank's slice to the bit."""
    for dtype, cuts, bound in ((fp64, (3,), 1e-12), (fp32, (1, 4), 4 * 2.0**-23)):
        alone = stepped(o, dtype, 0, 1)
        largest = max(abs(value).max() for value in alone.values())
        for ranks in cuts:
            sliced = stepped(o, dtype, 2, ranks)
            error = max(abs(sliced[name] - alone[name]).max() for name in SHAPES) / largest
            assert error == 0.0 if ranks == 1 else error < bound, (dtype, ranks, error)


def test_rectangles_are_the_part() -> None:
    weight = WeightSpec("w", (5, 4))
    for start in range(20):
        for stop in range(start + 1, 21):
            part = np.arange(start, stop)
            seen = np.zeros((5, 4), int)
            [found] = rectangles(LocalPiece(0, weight, start, stop, 0, 0, {}))
            assert all(each.rows == 1 for each in found[1:])
            for row in found:
                window = np.s_[row.row : row.row + row.rows, row.column : row.column + row.columns]
                assert (row.of(part) == np.arange(20).reshape(5, 4)[window]).all()
                seen[window] += 1
            assert (seen.reshape(-1) == np.isin(np.arange(20), part)).all()


@pytest.mark.parametrize("start", range(24))
def test_each_matrix_of_a_stack_has_rectangles_of_its_own(start: int) -> None:
    """Rows and columns are counted through: of two matrices (3, 4) there are 6 rows and 8 columns."""
    for stop in range(start + 1, 25):
        seen = list[int]()
        for number, found in enumerate(rectangles(LocalPiece(0, STACK, start, stop, 0, 0, {})), start // 12):
            for row in found:
                assert {(row.row + at) // 3 for at in range(row.rows)} == {number} == {row.column // 4}
                window = np.arange(24).reshape(6, 4)[row.row : row.row + row.rows]
                own = window[:, row.column - 4 * number :][:, : row.columns]
                assert (row.of(np.arange(start, stop)) == own).all()
                seen += own.reshape(-1).tolist()
        assert sorted(seen) == list(range(start, stop))


STACK = WeightSpec("experts", (2, 3, 4))


def test_a_stack_has_rows_and_columns_of_each_matrix() -> None:
    arrays = Adafactor(0.0).arrays(FlatSpec("h", (STACK,)), slice_of(24, 1, 3), fp32)
    assert [(array.name, array.numel) for array in arrays] == [("row_var", 2 * 3), ("col_var", 2 * 4)]


EXPERTS: dict[str, Any] = dict(
    model="llama", layers=1, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=256, seq=8, experts=4, top_k=2,
    expert_ffn=12, micro_batch=1, steps=2,
)  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["adafactor", "adafactor-hf"])
@pytest.mark.parametrize("on", [dict(stage=3, ranks=3), dict(stage=2, ranks=2, partition="owner")], ids=str)
def test_models_with_experts_train_as_on_one_rank(name: str, on: dict[str, Any]) -> None:
    """And a plan has the run's bytes, which the closed forms have too."""
    of = EXPERTS | dict(optimizer=name, precision="fp64")
    many, one = run(RunConfig(**of | on)), run(RunConfig(**of, ranks=1, stage=0, accumulate=on["ranks"]))
    for each, values in one.weights.items():
        np.testing.assert_allclose(many.weights[each], values, rtol=0, atol=1e-12, err_msg=each)
    planned = plan(RunConfig(**of | on))
    assert [memory.to_dict() for memory in planned.memory] == [memory.to_dict() for memory in many.memory]
    assert formulas_agree(checks(planned))


def test_stacks_that_ep_cuts_are_refused() -> None:
    with pytest.raises(InputError, match="ep 2: adafactor needs the sums of whole stacks of experts, which ep cuts"):
        RunConfig(**EXPERTS, optimizer="adafactor", ranks=2, ep=2)


TRAINED: dict[str, Any] = dict(layers=1, hidden=16, heads=2, seq=8, vocab=256, micro_batch=1, steps=2, parallel=1)
MESHES = {
    "pp": dict(pp=2, layers=2, accumulate=2, ranks=4),
    "replicas": dict(dp_replicate=2, ranks=4),
    "all_reduce": dict(recipe="deepspeed", grad_reduction="all_reduce", ranks=3, stage=1, precision="bf16"),
    "owner": dict(partition="owner", ranks=3),
    "ring": dict(collective="ring", ranks=3),
    "ranks without a row": dict(adapter_shards="rows", lora_rank=2, ranks=5),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", MESHES.values(), ids=list(MESHES))
def test_sums_on_meshes_are_counted_as_the_closed_form_says(options: dict[str, Any]) -> None:
    """Replicas and tied tables of two stages stay alike, or the weights could not be assembled."""
    result = run(RunConfig(**{**TRAINED, "stage": 2, "optimizer": "adafactor", **options}))
    for stage in range(result.layout.mesh.pp):
        assert all(check.agrees for check in checks(result, 1)[stage].sent)
    assert result.weights
    sums = [row for row in result.traffic[0] if (row.step, row.phase, row.axis) == (1, "optimizer", "dp_shard")]
    assert ("all_reduce" in {row.op for row in sums if row.purpose == "states"}) == ("partition" not in options)


def test_a_matrix_exchanges_r_plus_c_plus_2() -> None:
    """GPT of one block, 16 wide, 3 ranks: 7 matrices and the vectors of norms and biases, in 4 buffers."""
    result = run(RunConfig(**TRAINED, stage=3, optimizer="adafactor-hf", ranks=3))
    shapes = [weight.shape for flat in result.layout.flats.values() for weight in flat.weights]
    numbers = sum(2 + (sum(shape) if len(shape) == 2 else 0) for shape in shapes)
    rows = [r for rank in result.traffic for r in rank if r.step == 1 and (r.op, r.purpose) == ("all_reduce", "states")]
    assert {row.calls for row in rows} == {2 * len(result.layout.flats)}
    assert sum(Fraction(row.sent_bytes or 0, 4) for row in rows) == 2 * 2 * numbers


@pytest.mark.parametrize(("name", "arrays"), [("adafactor", 1), ("adafactor-hf", 2)])
def test_temporaries_are_one_tensors(name: str, arrays: int) -> None:
    """The largest matrix is a block's, 16 x 64, or the table, 256 x 16."""
    result = run(RunConfig(**TRAINED, stage=0, optimizer=name, ranks=1, precision="bf16"), keep_events=True)
    made = [e for e in result.events[0] if isinstance(e, Alloc) and (e.kind, e.scope.phase) == ("temp", "optimizer")]
    assert max(event.nbytes for event in made) == 256 * 16 * 4
    assert sum(event.nbytes == 256 * 16 * 4 for event in made) == 3 * arrays * TRAINED["steps"]  # sums, U, U again


def test_k_is_four_and_the_factors() -> None:
    """4 for the master of each weight, r + c numbers of a matrix; with beta1 4 more of each weight. States have the
    libraries' names."""
    mlp = dict(model="mlp", layers=2, hidden=64, vocab=256, steps=1)
    for name, more, states in (
        ("adafactor", {}, {"row_var", "col_var", "variance"}),
        ("adafactor-hf", {}, {"exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"}),
        ("adafactor-hf", {"momentum": 0.9}, {"exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq", "exp_avg"}),
    ):
        result = plan(RunConfig(**mlp, **more, optimizer=name, stage=0, precision="bf16"))
        assert set(result.to_dict()["ranks"][0]["memory"]["states"]) == {"master", *states}
        shapes = [weight.shape for flat in result.layout.flats.values() for weight in flat.weights]
        kept = sum(math.prod(s) * 4 + (sum(s) if len(s) == 2 else s[0]) * 4 for s in shapes)
        kept += sum(math.prod(s) * 4 for s in shapes) if more else 0
        assert result.memory[0].marks["after_init"].by_kind["optim"] == kept


PURE: dict[str, Any] = dict(TRAINED, precision="bf16-pure", ranks=3)


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
@pytest.mark.parametrize(("name", "momentum"), [("adafactor", 0.0), ("adafactor-hf", 0.0), ("adafactor-hf", 0.9)])
def test_without_masters_stages_have_the_same_bits_and_bytes(name: str, momentum: float, rounding: str) -> None:
    """Stages 1 to 3 among themselves, and all stages where owners hold whole tensors."""
    options = dict(PURE, optimizer=name, momentum=momentum, rounding=rounding)
    for partition, stages in (("slices", (1, 2, 3)), ("owner", (0, 1, 3))):
        made = [RunConfig(**options, stage=stage, partition=partition if stage else "slices") for stage in stages]
        results = [run(config) for config in made]
        for config, result in zip(made, results, strict=True):
            assert "master" not in result.memory[0].states
            assert all(check.agrees for check in checks(result)[0].states + checks(result)[0].sent)
            assert plan(config).memory == result.memory
            assert all(np.array_equal(result.weights[each], w) for each, w in results[0].weights.items())
            assert 0 < result.lost_updates[-1] == results[0].lost_updates[-1] < 1
            assert not result.stuck_moments


@pytest.mark.parametrize(("name", "arrays", "each"), [("adafactor", 1, 2), ("adafactor-hf", 4, 4)])
def test_without_masters_states_and_temporaries_have_the_libraries_formats(name: str, arrays: int, each: int) -> None:
    result = run(RunConfig(**dict(PURE, ranks=1), stage=0, optimizer=name), keep_events=True)
    made = [e for e in result.events[0] if isinstance(e, Alloc) and (e.kind, e.scope.phase) == ("temp", "optimizer")]
    assert sum(event.nbytes == 256 * 16 * each for event in made) == 3 * arrays * TRAINED["steps"]
    shapes = [weight.shape for flat in result.layout.flats.values() for weight in flat.weights]
    kept = sum((sum(shape) if len(shape) == 2 else shape[0]) * each for shape in shapes)
    assert result.memory[0].marks["after_init"].by_kind["optim"] == kept


def test_factors_are_means_of_rows_and_of_columns() -> None:
    """After the first step, of which nothing is left of what was before it."""
    recorder = Recorder()
    flat, updater = Flat("flat", cpu(recorder), fp64, fp64), Updater(Adafactor(), StepControl(LRSchedule(0.1)))
    flat.declare("w", (3, 4))
    flat.held = Held(whole(12), 12)
    flat.param_shard, flat.grad_shard = (flat.device.alloc((12,), fp64, Kind.GRAD) for _ in range(2))
    updater.allocate(flat)
    for buffer in (flat.param_shard, flat.grad_shard):
        flat.device.backend.from_host(np.arange(1.0, 13.0), buffer.array)
    assert updater.decide(1.0) == 1.0
    updater.update(flat, 1.0)
    squares = np.arange(1.0, 13.0).reshape(3, 4) ** 2
    assert np.allclose(flat.states["row_var"].array, squares.mean(1))
    assert np.allclose(flat.states["col_var"].array, squares.mean(0))
    sums = [event for event in recorder.events if isinstance(event, Kernel) and event.name == "adafactor_sums"]
    work = [(kernel.flops, kernel.bytes_read, kernel.bytes_written) for kernel in sums]
    assert work == [(2 * 12, 2 * 12 * 8, (3 + 4) * 8)]  # every square is read for its row and for its column


def test_many_ranks_are_few_classes() -> None:
    """Those that have as much of the same tensors are alike; what one of them holds all would."""
    few = RunConfig(**{**TRAINED, "ranks": 512, "stage": 2, "optimizer": "adafactor", "steps": 1})
    assert len(plan(few).ran) < 40
    some = few.replace(ranks=11)
    by_class, by_rank = plan(some), plan(some, every_rank=True)
    assert by_class.memory == by_rank.memory
    assert by_class.traffic == by_rank.traffic


def test_stages_that_add_in_another_order_are_no_contradiction(capsys: pytest.CaptureFixture[str]) -> None:
    words = "compare --optimizer adafactor --stages 0,1,3 --ranks 3 --steps 2 --layers 1 --hidden 16 --heads 2 --seq 8"
    assert main(words.split()) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Final weights of stages 1 and 3: bit-identical" in said
    assert "Adafactor adds up squares over rows, columns and tensors" in said
