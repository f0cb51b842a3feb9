"""Llama: its kernels and ops by themselves, what they keep, its names, and its bits in every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from test_backends import Case, Values, bits, check, every_case, place, put

from zerosim import functional as F
from zerosim.backends.kernels import Backend
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.dtypes import FLOATING, DType, bf16, fp16, fp32
from zerosim.errors import InputError
from zerosim.functional.policy import ActivationPolicy
from zerosim.models.llama import LlamaConfig
from zerosim.tensor.gradcheck import gradcheck
from zerosim.tensor.tensor import Operand, Tensor, cpu, tensor
from zerosim.train.build import build_model
from zerosim.train.run import run


# -- kernels against plain float64 formulas -----------------------------------------------------------------
def rms_norm(x: Values, w: Values) -> list[Values]:
    rstd = 1 / np.sqrt((x * x).mean(1) + 1e-5)
    return [x * rstd[:, None] * w, rstd]


def rms_norm_backward(g: Values, x: Values, w: Values, rstd: Values) -> list[Values]:
    n = x * rstd[:, None]
    return [rstd[:, None] * (g * w - n * (g * w * n).mean(1, keepdims=True)), (g * n).sum(0)]


def rotated(x: Values, head_dim: int, heads: int, base: float, inverse: bool) -> Values:
    """Pairs as complex numbers, turned by multiplication."""
    out, half = x.copy(), head_dim // 2
    places = np.arange(x.shape[1])[:, None]
    turn = np.exp((-1j if inverse else 1j) * places * base ** (-2.0 * np.arange(half) / head_dim))
    for head in range(heads):
        first = slice(head * head_dim, head * head_dim + half)
        second = slice(head * head_dim + half, (head + 1) * head_dim)
        pairs = (x[..., first] + 1j * x[..., second]) * turn
        out[..., first], out[..., second] = pairs.real, pairs.imag
    return out


def swiglu(x: Values) -> Values:
    gate, up = np.split(x, 2, axis=1)
    return np.asarray(gate / (1 + np.exp(-gate)) * up)


def swiglu_backward(g: Values, x: Values) -> Values:
    gate, up = np.split(x, 2, axis=1)
    s = 1 / (1 + np.exp(-gate))
    return np.concatenate([g * up * s * (1 + gate * (1 - s)), g * gate * s], axis=1)


def cases(rows: int, note: str, blocks: bool) -> Iterator[Case]:
    normal = np.random.default_rng(0).standard_normal
    x, w, g = 3 * normal((rows, 48)) + 1, normal(48), normal((rows, 48))
    rstd, more = rms_norm(x, w)[1], {"blocks": blocks}
    outs = [(rows, 48), (rows,)]

    def without_dx(k: Any, *a: Any) -> None:
        k.rms_norm_backward(*a[:4], None, a[4])

    yield Case(
        f"rms_norm{note}", lambda k, a, b, *o: k.rms_norm(a, b, 1e-5, *o), rms_norm, [x, w], outs, compute=(1,), **more
    )
    yield Case(
        f"rms_norm_stats{note}",
        lambda k, a, o: k.rms_norm_stats(a, 1e-5, o),
        lambda a: rms_norm(a, w)[1],
        [x],
        outs[1:],
        compute=(0,),
        **more,
    )
    for name, call, first in (("", lambda k, *a: k.rms_norm_backward(*a), 0), (" without dx", without_dx, 1)):
        yield Case(
            f"rms_norm_backward{name}{note}",
            call,
            lambda *a, first=first: rms_norm_backward(*a)[first:],
            [g, x, w, rstd],
            [(rows, 48), (48,)][first:],
            states=(3,),
            **more,
        )
    wide = 4 * normal((rows, 2 * 70))
    yield Case(f"swiglu{note}", lambda k, *a: k.swiglu(*a), swiglu, [wide], [(rows, 70)], **more)
    inputs = [normal((rows, 70)), wide]
    yield Case(
        f"swiglu_backward{note}", lambda k, *a: k.swiglu_backward(*a), swiglu_backward, inputs, [wide.shape], **more
    )


def other_cases() -> Iterator[Case]:
    for inverse in (False, True):
        for tokens in (9, 300):
            yield Case(
                f"rotary of {tokens} tokens, inverse={inverse}",
                lambda k, a, o, i=inverse: k.rotary(a, 6, 3, 100.0, i, o),
                lambda a, i=inverse: rotated(a, 6, 3, 100.0, i),
                [np.random.default_rng(0).standard_normal((2, tokens, 24))],
                [(2, tokens, 24)],
                tolerance=16.0 + 4 * tokens,  # an angle of 300 is off by 300 roundings of 1
            )
    far = np.array([[-700.0, 700.0, 0.0, 2.0, 2.0, 2.0]])  # exp of it is inf, and the gate then 0 or itself
    yield Case("swiglu far out", lambda k, *a: k.swiglu(*a), swiglu, [far], [(1, 3)])


EVERY = [*cases(2000, " many rows", True), *cases(130, "", False), *cases(1, " one row", False), *other_cases()]


@every_case(numpy=FLOATING, cuda=FLOATING, cases=EVERY)
def test_kernel_computes_its_formula(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    for dtype in dtypes:
        check(backend, case, dtype, *case.run(backend, dtype))
        if dtype.itemsize <= 4:
            check(backend, case, dtype, *case.run(backend, dtype, strided=True))
        if dtype.itemsize == 2:
            check(backend, case, dtype, *case.run(backend, dtype, fp32))


@pytest.mark.bits
@every_case(numpy=FLOATING, cuda=[fp32, bf16], cases=EVERY)
def test_alignment_never_changes_a_bit(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    for dtype in dtypes:
        first = [bits(backend, a) for a in case.run(backend, dtype)[1]]
        for offset in (1, 2, 3, 7, 17):
            found = [bits(backend, a) for a in case.run(backend, dtype, offset=offset)[1]]
            assert found == first, f"{dtype} at offset {offset}"


@every_case(numpy=[fp16], cuda=[fp16], cases=EVERY)
def test_inf_and_nan_are_results_like_others(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    """No warning (warnings are errors), and a nan in an input comes out."""
    for poison in (np.nan, np.inf, -np.inf, 6e4):
        inputs = [x.copy() for x in case.inputs]
        inputs[0].reshape(-1)[:1] = poison
        outputs = Case(**{**vars(case), "inputs": inputs}).run(backend, dtypes[0])[1]
        assert not np.isnan(poison) or any(np.isnan(backend.to_host(a)).any() for a in outputs)


@pytest.mark.bits
def test_the_statistic_made_again_has_the_same_bits(backend: Backend) -> None:
    x = put(backend, np.random.default_rng(1).standard_normal((700, 129)), fp32)
    out, weight = place(backend, (700, 129), fp32), put(backend, np.ones(129), fp32)
    first, again = (place(backend, (700,), fp32) for _ in range(2))
    backend.rms_norm(x, weight, 1e-5, out, first)
    backend.rms_norm_stats(x, 1e-5, again)
    assert bits(backend, first) == bits(backend, again)


def test_no_rows_are_rows_too(backend: Backend) -> None:
    x, weight, stats = (backend.empty(shape, fp32) for shape in ((0, 4), (4,), (0,)))
    backend.rms_norm(x, weight, 1e-5, x, stats)
    backend.rms_norm_backward(x, x, weight, stats, x, weight)
    assert not backend.to_host(weight).any()
    backend.swiglu(x, backend.empty((0, 2), fp32))


# -- ops ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        pytest.param(F.rms_norm, [(5, 4), (4,)], id="rms_norm"),
        pytest.param(F.rms_norm, [(2, 3, 7), (7,)], id="rms_norm-3d"),
        pytest.param(
            lambda x, w: F.rms_norm(x, w, policy=ActivationPolicy(saves="megatron")),
            [(5, 4), (4,)],
            id="rms_norm-again",
        ),
        pytest.param(lambda x: F.rotary(x, 2, 1, base=10.0), [(2, 4, 16)], id="rotary"),
        pytest.param(F.swiglu, [(2, 3, 8)], id="swiglu"),
        pytest.param(lambda x, *w: F.packed_linear(x, w), [(2, 3, 5), (4, 5), (2, 5), (3, 5)], id="packed_linear"),
        pytest.param(lambda x, w: F.packed_linear(x, [w]), [(3, 5), (4, 5)], id="packed_linear-one"),
        pytest.param(
            lambda x, *w: F.attention(F.rotary(F.packed_linear(x, w), 4, 2), 4, num_kv_heads=2),
            [(2, 3, 8), (8, 8), (4, 8), (4, 8)],
            id="grouped-query attention",
        ),
    ],
)
def test_gradients(function: Callable[..., Tensor], inputs: list[Any]) -> None:
    gradcheck(function, inputs)


def test_scores_depend_on_distance_alone() -> None:
    """The point of rotary positions: with one q and one k at all places, q(s) . k(t) is a function of s - t."""
    device, random = cpu(), np.random.default_rng(0)
    row = random.standard_normal(3 * 8)
    turned = F.rotary(tensor(np.tile(row, (1, 12, 1)), device, dtype="fp64"), 1, 1).numpy()[0]
    scores = turned[:, :8] @ turned[:, 8:16].T
    for distance in range(-11, 12):
        assert np.ptp(np.diagonal(scores, distance)) < 1e-12
    assert np.ptp(scores) > 0.1
    assert (turned[0] == row).all()
    assert (turned[:, 16:] == row[16:]).all()  # v as it is


def test_packed_linear_is_its_maps_side_by_side() -> None:
    device, random = cpu(), np.random.default_rng(0)
    x, *weights = (tensor(random.standard_normal(s), device) for s in ((2, 3, 5), (4, 5), (2, 5)))
    packed = F.packed_linear(x, weights).numpy()
    assert (packed == np.concatenate([F.linear(x, w, transposed=True).numpy() for w in weights], -1)).all()


def ones(x: Tensor, *shape: int) -> Tensor:
    return tensor(np.ones(shape), x.device, dtype="fp16", requires_grad=True)


X = 2 * 2 * 3 * 12  # bytes of x, (2, 3, 12) in fp16


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        pytest.param(lambda x: F.rms_norm(x, ones(x, 12)), X + 2 * 12 + 4 * 6, id="rms_norm: x, weight, rstd in fp32"),
        pytest.param(
            lambda x: F.rms_norm(x, ones(x, 12), policy=ActivationPolicy(saves="megatron")),
            X + 2 * 12,
            id="rms_norm-megatron: x, weight",
        ),
        pytest.param(lambda x: F.rotary(x, 1, 1), 0, id="rotary: nothing"),
        pytest.param(F.swiglu, X, id="swiglu: x"),
        pytest.param(
            lambda x: F.packed_linear(x, [ones(x, 4, 12), ones(x, 2, 12)]),
            X + 2 * 72,
            id="packed_linear: x once, weights",
        ),
    ],
)
def test_what_is_kept_for_backward(
    device: Device, live: Callable[[], int], function: Callable[[Tensor], Tensor], kept: int
) -> None:
    x = tensor(np.ones((2, 3, 12)), device, dtype="fp16", requires_grad=True)
    node = function(x).node
    del x
    assert live() == kept
    del node
    assert live() == 0


def test_what_an_op_takes_is_checked() -> None:
    device = cpu()

    def zeros(*shape: int) -> Operand:
        return tensor(np.zeros(shape), device)

    calls: list[tuple[str, Callable[[], object]]] = [
        ("rms_norm: x has 3 columns", lambda: F.rms_norm(zeros(2, 3), zeros(4))),
        (r"2 \+ 2 \* 1 heads do not divide 18 columns", lambda: F.rotary(zeros(1, 2, 18), 2, 1)),
        ("a head of 3 columns cannot be cut into pairs", lambda: F.rotary(zeros(1, 2, 9), 1, 1)),
        ("3 columns are not two halves", lambda: F.swiglu(zeros(2, 3))),
        ("x has 3 columns", lambda: F.packed_linear(zeros(2, 3), [zeros(4, 3), zeros(4, 2)])),
    ]
    for message, call in calls:
        with pytest.raises(InputError, match=message):
            call()


# -- the model ------------------------------------------------------------------------------------------------
STEPS = 2
TINY: dict[str, Any] = dict(
    model="llama", layers=2, hidden=12, heads=3, kv_heads=1, ffn=20, seq=5, vocab=19, steps=STEPS, micro_batch=1, seed=3
)


def test_names_and_shapes_are_hugging_faces() -> None:
    model = build_model(RunConfig(**TINY), cpu())
    shapes = model.shapes()
    block = {name.removeprefix("model.layers.1."): shape for name, shape in shapes.items() if "layers.1." in name}
    assert block == {
        "input_layernorm.weight": (12,),
        "self_attn.q_proj.weight": (12, 12),
        "self_attn.k_proj.weight": (4, 12),
        "self_attn.v_proj.weight": (4, 12),
        "self_attn.o_proj.weight": (12, 12),
        "post_attention_layernorm.weight": (12,),
        "mlp.gate_proj.weight": (20, 12),
        "mlp.up_proj.weight": (20, 12),
        "mlp.down_proj.weight": (12, 20),
    }
    rest = {name: shape for name, shape in shapes.items() if "layers." not in name}
    assert rest == {"model.embed_tokens.weight": (19, 12), "model.norm.weight": (12,), "lm_head.weight": (19, 12)}
    assert [unit.name for unit in model.units] == ["embed_tokens", "layers.0", "layers.1", "norm", "lm_head"]
    tied = build_model(RunConfig(**TINY, tie_embeddings=True), cpu())
    assert shapes.keys() - tied.shapes().keys() == {"lm_head.weight"}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(layers=0), "layers 0: expected at least 1"),
        (dict(heads=5), "heads 5 do not divide hidden 64"),
        (dict(heads=64, kv_heads=64), "1 columns each"),
        (dict(kv_heads=3), "kv_heads 3 do not divide heads 4"),
        (dict(norm_eps=0.0), "norm_eps 0.0: expected a number more than 0"),
        (dict(rope_base=float("nan")), "rope_base nan"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LlamaConfig(**sizes)


@pytest.fixture
def train(tmp_path: Path) -> Any:
    """train(changes): a run of the tiny model on fixed tokens, and its batches."""

    def train(**changes: Any) -> Any:
        config = RunConfig(**{**TINY, "lr": 1e-2, **changes})
        shape = (STEPS, config.global_batch, config.model.seq + 1)
        tokens = np.random.default_rng(5).integers(0, config.model.vocab, size=shape, dtype=np.int64)
        np.savez(tmp_path / "tokens.npz", tokens=tokens)
        return run(config.replace(tokens=str(tmp_path / "tokens.npz"))), tokens

    return train


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.quick(3)
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_all_stages_give_the_references_bits(train: Any, ranks: int, precision: str) -> None:
    """Tied with an even number of ranks in fp64 and bf16, with an odd one in fp32."""
    tied = (ranks % 2 == 0) == (precision != "fp32")
    options = dict(ranks=ranks, tie_embeddings=tied, precision=precision)
    first, tokens = train(stage=0, **options)
    weights, losses = reference.train(first.config, tokens)
    for stage in range(4):
        result = first if stage == 0 else train(stage=stage, **options)[0]
        assert result.losses == losses, stage
        assert equal(result.weights, weights), stage
        assert result.live_bytes_after == [0] * ranks


@pytest.mark.bits
@pytest.mark.parametrize(
    "change", [dict(recompute="selective"), dict(recompute="full"), dict(saves="megatron")], ids=str
)
@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_what_is_kept_changes_bytes_and_no_bit(train: Any, change: dict[str, str], attention: str) -> None:
    plain = train(ranks=2, attention=attention, precision="bf16")[0]
    other = train(ranks=2, attention=attention, precision="bf16", **change)[0]
    assert equal(plain.weights, other.weights)
    kept = [
        sum(r.memory[0].marks["end_of_forward"].by_kind.get(kind, 0) for kind in ("activation", "kept"))
        for r in (plain, other)
    ]
    assert kept[1] < kept[0]


@pytest.mark.slow
def test_the_default_sizes_learn_the_primer() -> None:
    """60 steps at the default learning rate: from ln 256 + what random weights add, to below 3 nats a byte."""
    result = run(RunConfig(model="llama", stage=3, ranks=2, steps=60))
    assert 5.5 < result.mean_losses[0] < 6.5
    assert result.mean_losses[-1] < 3.0
