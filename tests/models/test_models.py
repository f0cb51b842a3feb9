"""Models: names, layouts, sizes, initial weights, state_dict; and what a Unit promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from built import builder, gpt, place
from same import no_garbage_collector

from zerosim import functional as F
from zerosim.config import RunConfig
from zerosim.device.device import Buffer, Device, Kind, Phase
from zerosim.dtypes import DType, bf16, fp16, fp32, fp64, int64
from zerosim.errors import InputError
from zerosim.models.model import Model, draw_flat, initial_values
from zerosim.nn import Dropout, Unit
from zerosim.placement.rows import Held
from zerosim.tensor.autograd import backward
from zerosim.tensor.flat import Flat, slice_of, whole
from zerosim.tensor.rng import DropoutKeys
from zerosim.tensor.tensor import Tensor, cpu, tensor
from zerosim.train.build_model import build_model


def token_ids(device: Device, batch: int, tokens: int, vocab: int, seed: int = 0) -> Tensor:
    return tensor(np.random.default_rng(seed).integers(0, vocab, (batch, tokens)), device, dtype=int64)


def forward(model: Model, x: Tensor, slot: int = 0) -> Tensor:
    for unit in model.units:
        x = unit.forward(x, slot)
    return x


def walk_back(model: Model, grads: list[Buffer], slot: int = 0) -> None:
    for unit in reversed(model.units):
        unit.backward(grads, slot)
    assert not grads


# -- layout ----------------------------------------------------------------------------------------------
def block(i: int, d: int) -> dict[str, tuple[int, ...]]:
    """GPT-2's names; weights of linear maps are (inputs, outputs)."""
    return {
        f"h.{i}.ln_1.weight": (d,),
        f"h.{i}.ln_1.bias": (d,),
        f"h.{i}.attn.c_attn.weight": (d, 3 * d),
        f"h.{i}.attn.c_attn.bias": (3 * d,),
        f"h.{i}.attn.c_proj.weight": (d, d),
        f"h.{i}.attn.c_proj.bias": (d,),
        f"h.{i}.ln_2.weight": (d,),
        f"h.{i}.ln_2.bias": (d,),
        f"h.{i}.mlp.c_fc.weight": (d, 4 * d),
        f"h.{i}.mlp.c_fc.bias": (4 * d,),
        f"h.{i}.mlp.c_proj.weight": (4 * d, d),
        f"h.{i}.mlp.c_proj.bias": (d,),
    }


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_has_gpt2s_names_and_shapes_in_order(tied: bool) -> None:
    model = gpt(tie_embeddings=tied)
    expected = {"wte.weight": (11, 8), "wpe.weight": (6, 8), **block(0, 8), **block(1, 8)}
    expected |= {"ln_f.weight": (8,), "ln_f.bias": (8,)}
    if not tied:
        expected["lm_head.weight"] = (11, 8)
    assert list(model.shapes().items()) == list(expected.items())
    assert [unit.name for unit in model.units] == ["wte", "wpe", "h.0", "h.1", "ln_f", "lm_head"]
    assert [flat.name for flat in model.flats] == ["wte", "wpe", "h.0", "h.1", "ln_f"] + ["lm_head"] * (not tied)
    assert [unit.reduces for unit in model.units] == [True] * 5 + [not tied]
    assert (model.units[0].flat is model.units[-1].flat) == tied


def test_mlp() -> None:
    model = build_model(RunConfig(model="mlp", layers=2, hidden=4, vocab=9), cpu())
    assert model.shapes() == {
        "wte.weight": (9, 4),
        "layers.0.weight": (4, 4),
        "layers.0.bias": (4,),
        "layers.1.weight": (4, 4),
        "layers.1.bias": (4,),
        "lm_head.weight": (4, 9),
        "lm_head.bias": (9,),
    }
    assert [unit.name for unit in model.units] == ["wte", "layers.0", "layers.1", "lm_head"]
    assert model.num_parameters == 9 * 4 + 2 * (16 + 4) + 4 * 9 + 9


# -- initial weights ---------------------------------------------------------------------------------------
def test_initial_weights_depend_on_seed_and_name_only() -> None:
    model = place(gpt(), seed=3).state_dict()
    deeper = place(gpt(layers=5, heads=4, tie_embeddings=False), seed=3).state_dict()
    for name in model:
        if not name.endswith("c_proj.weight"):  # their spread depends on the depth
            assert (model[name] == deeper[name]).all(), name
    alone = gpt()
    flat = alone.flats[3]
    flat.held = Held(whole(flat.numel), flat.numel)
    flat.param = flat.param_shard = flat.device.alloc((flat.numel,), flat.dtype, Kind.PARAM)
    draw_flat(flat, 3, exact_master=False)  # no other flat was drawn before it
    assert (flat.window(flat.param, 2).array == model["h.1.attn.c_attn.weight"]).all()


def test_seeds_and_names_differ() -> None:
    one, other = place(gpt(), seed=0).state_dict(), place(gpt(), seed=1).state_dict()
    assert (one["wte.weight"] != other["wte.weight"]).all()
    assert (one["h.0.attn.c_attn.weight"] != one["h.1.attn.c_attn.weight"]).all()


def test_initial_spreads() -> None:
    """normal 0.8 / sqrt(D), GPT-2's 0.02 at D = 1600; what ends in c_proj by sqrt(2 L) less; norms 1, biases 0."""
    assert gpt(hidden=1600, heads=25).flats[0].spec.weights[0].std == 0.02
    model = gpt(layers=8, hidden=64, vocab=256, tie_embeddings=False)
    for spec in (spec for flat in model.flats for spec in flat.spec.weights):
        values = initial_values(spec, 0)
        assert values.dtype == np.float32
        if spec.name.endswith("bias"):
            assert (values == 0).all()
        elif "ln_" in spec.name:
            assert (values == 1).all()
        else:
            std = 0.1 / math.sqrt(16) if spec.name.endswith("c_proj.weight") else 0.1
            assert abs(values.std() / std - 1) < 5 / math.sqrt(2 * values.size), spec.name
            assert abs(values.mean() / std) < 5 / math.sqrt(values.size), spec.name


# -- state_dict ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [fp64, fp32, bf16, fp16])
def test_state_dict_round_trip(dtype: DType) -> None:
    weights = place(gpt(dtype=dtype), seed=5).state_dict()
    other = place(gpt(dtype=dtype), seed=6)
    other.load_state_dict(weights)
    assert list(other.state_dict()) == list(weights) == list(other.shapes())
    for name, values in other.state_dict().items():
        assert (values == weights[name]).all()


def test_masters_are_what_state_dict_holds() -> None:
    model = place(gpt(dtype=fp16), master=True)
    weights = {name: np.full(shape, 1 / 3, np.float32) for name, shape in model.shapes().items()}
    model.load_state_dict(weights)
    assert all((values == np.float32(np.float16(1 / 3))).all() for values in model.state_dict().values())
    model.load_state_dict(weights, exact_master=True)
    assert all((values == np.float32(1 / 3)).all() for values in model.state_dict().values())
    assert all((flat.whole_param().array == np.float16(1 / 3)).all() for flat in model.flats)


def test_weights_that_do_not_fit_are_named() -> None:
    model = place(gpt())
    weights = model.state_dict()
    for change, message in [
        ({"wte.weight": None}, "missing wte.weight"),
        (dict.fromkeys(list(weights)[:5]), "missing wte.weight, wpe.weight, h.0.ln_1.weight and 2 more"),
        ({"transformer.wte.weight": np.zeros(1)}, "unknown transformer.wte.weight"),
        ({"wpe.weight": None, "wpe": np.zeros(1)}, "missing wpe.weight; unknown wpe"),
        ({"wpe.weight": np.zeros((8, 6))}, r"wpe.weight has shape \(8, 6\), expected \(6, 8\)"),
    ]:
        given = {name: value for name, value in {**weights, **change}.items() if value is not None}
        with pytest.raises(InputError, match=f"the weights do not fit the model: {message}"):
            model.load_state_dict(given)


def test_a_slice_has_no_state_dict() -> None:
    model = place(gpt())
    model.flats[2].reshard()
    with pytest.raises(InputError, match=r"h\.0 is sharded on rank 0: gather it"):
        model.state_dict()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_slices_take_their_part_of_full_weights(ranks: int) -> None:
    weights = place(gpt(), seed=2).state_dict()
    pieces: list[list[Any]] = []
    for rank in range(ranks):
        model = gpt()
        for flat in model.flats:
            flat.held = Held(slice_of(flat.numel, rank, ranks), flat.numel)
            flat.param_shard = flat.device.alloc((flat.own.size,), flat.dtype, Kind.PARAM)
        model.load_state_dict(weights)
        pieces.append([flat.shard().array for flat in model.flats])
    for i, flat in enumerate(gpt().flats):
        values = np.concatenate([own[i] for own in pieces])
        for spec, offset in zip(flat.spec.weights, flat.spec.offsets, strict=True):
            assert (values[offset : offset + spec.numel] == weights[spec.name].reshape(-1)).all()


# -- what a model computes -----------------------------------------------------------------------------------
def test_a_token_sees_no_later_one() -> None:
    device = cpu()
    model = place(gpt(device))
    ids = token_ids(device, 2, 6, 11)
    before = forward(model, ids).numpy()
    ids.array[:, 3] = (ids.array[:, 3] + 1) % 11
    after = forward(model, ids).numpy()
    assert before.shape == (2, 6, 11)
    assert (before[:, :3] == after[:, :3]).all()
    assert (before[:, 3:] != after[:, 3:]).any(axis=-1).all()


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_the_finite_differences(tied: bool) -> None:
    """The whole model at once: units in order, cut graphs, a table used at both ends."""
    device = cpu()
    model = place(gpt(device, layers=1, hidden=4, seq=3, vocab=5, tie_embeddings=tied))
    ids, targets = token_ids(device, 2, 3, 5, seed=1), token_ids(device, 2, 3, 5, seed=2)
    total, make_grad = model.loss([forward(model, ids).buffer], targets.buffer, scale=1.0, count=1)
    walk_back(model, [make_grad()])
    assert total.numel == 1
    step = 1e-6
    for flat in model.flats:
        analytic, values = flat.take_grad().array, flat.whole_param().array
        for i in range(flat.numel):
            kept = values[i]
            losses = []
            for value in (kept + step, kept - step):
                values[i] = value
                logits = [forward(model, ids).buffer]
                losses.append(model.loss(logits, targets.buffer, scale=1.0, count=1)[0].array[0])
            values[i] = kept
            assert analytic[i] == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-5, abs=1e-7), flat.name


# -- units -----------------------------------------------------------------------------------------------------
def norm_unit(device: Device, dtype: DType = fp64) -> Unit:
    flat = Flat("unit", device, dtype, dtype)
    weight, bias = flat.declare("weight", (4,), fill=2.0), flat.declare("bias", (4,))
    place(Model([Unit("unit", flat, lambda x: x)]))
    return Unit("unit", flat, lambda x: F.gelu(F.layer_norm(x, weight, bias)) + x)


def test_a_cut_graph_gives_the_gradients_of_one_graph() -> None:
    device = cpu()
    units = [norm_unit(device), norm_unit(device)]
    values = np.random.default_rng(0).standard_normal((3, 4))
    seed = tensor(np.random.default_rng(1).standard_normal((3, 4)), device, dtype="fp64")

    x = tensor(values, device, dtype="fp64", requires_grad=True)
    y = units[1].function(units[0].function(x))
    assert y.node is not None
    backward(y.node, [seed.buffer])
    expected = [x.grad.numpy() if x.grad else None, *(unit.flat.take_grad().array for unit in units)]

    cut = tensor(values, device, dtype="fp64")
    for unit in units:
        cut = unit.forward(cut)
        assert not cut.requires_grad
    assert (cut.numpy() == y.numpy()).all()
    grads = [seed.buffer]
    for unit in reversed(units):
        unit.backward(grads)
    for ours, theirs in zip([grads[0].array, *(unit.flat.take_grad().array for unit in units)], expected, strict=True):
        assert (ours == theirs).all()


def test_slots_wait_in_any_order() -> None:
    device = cpu()
    unit = norm_unit(device)
    xs = [tensor(np.random.default_rng(i).standard_normal((3, 4)), device, dtype="fp64") for i in range(3)]
    seed = tensor(np.ones((3, 4)), device, dtype="fp64").buffer
    alone = {}
    for i, x in enumerate(xs):
        unit.forward(x)
        grads = [seed]
        unit.backward(grads)
        alone[i] = grads[0].array, unit.flat.take_grad().array
    for i, x in enumerate(xs):
        unit.forward(x, slot=i)
    for i in (2, 0, 1):
        grads = [seed]
        unit.backward(grads, slot=i)
        assert (grads[0].array == alone[i][0]).all()
        assert (unit.flat.take_grad().array == alone[i][1]).all()


def test_a_unit_keeps_none_of_its_outputs_bytes(device: Device, live: Callable[[], int]) -> None:
    """What waits for backward: x, its layer norm (GELU's input), mean and rstd; not GELU's result, not the sum."""
    unit = norm_unit(device)
    x = tensor(np.ones((10, 4)), device, dtype="fp64")
    before = live()
    y = unit.forward(x)
    assert live() - before == 320 + 320 + 160
    del y
    assert live() - before == 320 + 160
    unit.forget()
    assert live() == before


def test_nothing_waits_without_gradients(device: Device, live: Callable[[], int]) -> None:
    unit = norm_unit(device)
    x = tensor(np.ones((10, 4)), device, dtype="fp64")
    before = live()
    with device.no_grad():
        y = unit.forward(x)
    assert live() - before == y.buffer.nbytes


def test_resharding_frees_while_a_backward_waits(device: Device, live: Callable[[], int]) -> None:
    model = place(gpt(device))
    unit = model.units[2]
    x = tensor(np.random.default_rng(0).standard_normal((1, 6, 8)), device, dtype="fp64")
    y = unit.forward(x)
    seed = tensor(np.ones((1, 6, 8)), device, dtype="fp64").buffer
    kept, before = unit.flat.whole_param().array.copy(), live()
    unit.flat.param_shard = None
    unit.flat.reshard()
    assert live() == before - 8 * unit.flat.numel
    with pytest.raises(RuntimeError, match=r"rank 0 uses h\.0\.ln_1\.weight while h\.0 is sharded: all_gather it"):
        unit.forward(y)
    with pytest.raises(RuntimeError, match=r"uses h\.0\..* while h\.0 is sharded"):
        unit.backward([seed])
    full = device.alloc((unit.flat.numel,), fp64, Kind.UNSHARDED_PARAM)
    device.backend.from_host(kept, full.array)
    unit.flat.unshard(full)
    assert (unit.forward(x).array == y.array).all()
    grads = [seed]
    unit.backward(grads)
    assert grads[0].shape == (1, 6, 8)


def test_a_step_frees_everything_by_reference_counts(device: Device, live: Callable[[], int]) -> None:
    def step() -> None:
        model = place(gpt(device, fp16, dropout=0.2))
        states = live()
        ids = token_ids(device, 2, 6, 11)
        loss, make_grad = model.loss([forward(model, ids).buffer], ids.buffer, scale=8.0, count=12)
        walk_back(model, [make_grad()])
        del ids, loss, make_grad
        assert live() == 2 * states  # parameters and gradients
        for flat in model.flats:
            flat.take_grad()
        assert live() == states

    with no_garbage_collector():
        step()
        assert live() == 0


def test_dropout_stands_where_it_is_used() -> None:
    """Masks depend on seed, step, global microbatch, unit and op; nothing is dropped while evaluating."""
    device = cpu()
    x = tensor(np.ones((8, 8)), device)

    def mask(op: str, *, seed: int = 0, first: int = 0, step: int = 0, slot: int = 0, unit: str = "h.0") -> bytes:
        drop = Dropout(builder(device, keys=DropoutKeys(device, seed, first), dropout=0.5).at("h.0"), op)
        with device.scope(step=step, unit=unit, slot=slot, phase=Phase.FORWARD):
            return bytes(drop(x).numpy().tobytes())

    here = mask("resid_1")
    assert here == mask("resid_1")
    others = [
        mask("resid_2"),
        mask("resid_1", seed=1),
        mask("resid_1", step=1),
        mask("resid_1", slot=1),
        mask("resid_1", unit="h.1"),
    ]
    assert len({here, *others}) == 6
    assert mask("resid_1", first=4, slot=1) == mask("resid_1", first=5) == mask("resid_1", slot=5)
    drop = Dropout(builder(device, dropout=0.5).at("h.0"), "resid_1")
    with device.phase(Phase.EVALUATE):
        assert drop(x) is x
    with device.no_grad():  # as a forward that will be recomputed runs: it must drop what its second run drops
        assert drop(x) is not x


def test_no_two_dropouts_of_a_step_share_a_mask() -> None:
    device = cpu()
    seen: list[tuple[int, int]] = []

    class Listening(DropoutKeys):
        def __call__(self, op: str) -> tuple[int, int]:
            seen.append(super().__call__(op))
            return seen[-1]

    model = place(gpt(device, keys=Listening(device, 0, 0), layers=3, dropout=0.1))
    x = token_ids(device, 1, 6, 11)
    for unit in model.units:
        with device.scope(step=0, unit=unit.name):
            x = unit.forward(x)
    assert len(set(seen)) == len(seen) == 1 + 3 * 3  # embeddings; attention and two branches in each block
