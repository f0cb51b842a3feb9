"""Encoded gradients: every exchange against its formula in float64, what is counted, and what stays for later steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from zerosim.analysis.checks import checks
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.parallel.compression.codecs import SIGNS, Blocks, Codec, Signs, TopK, mean_of
from zerosim.parallel.compression.dgc import ratio_at
from zerosim.parallel.compression.powersgd import orthogonalize
from zerosim.placement.formats import blocks
from zerosim.train.plan import plan
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(layers=2, hidden=16, heads=2, seq=8, vocab=256, micro_batch=1, steps=4, seed=5)
SMALL |= dict(precision="fp32")
HOW: dict[str, dict[str, Any]] = {
    "int8": {},
    "int4": dict(compress_block=64),
    "top-k": dict(compress_ratio=0.1),
    "random-k": dict(compress_ratio=0.1),
    "dgc": dict(compress_ratio=0.1, optimizer="sgd", momentum=0.9, lr=0.1, compress_warmup=3),
    "powersgd": dict(compress_rank=2, compress_warmup=1),
    "onebit-adam": dict(compress_warmup=2),
}
MESHES: list[dict[str, Any]] = [
    dict(ranks=3),
    dict(ranks=4, dp_replicate=2),
    dict(ranks=4, pp=2, accumulate=2, grad_sync=False),
    dict(ranks=4, bucket_bytes=3000, overlap="all"),
    dict(ranks=2, freeze="*,!h.1"),
]
CASES = [(name, mesh) for name in HOW for mesh in MESHES]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "mesh"), CASES, ids=str)
def test_what_is_sent_and_kept_is_what_was_encoded_at_every_stage(name: str, mesh: dict[str, Any]) -> None:
    """Counts `==` forms in each step, plans `==` runs, and stages 1 to 3 have the same bits."""
    results = {}
    for stage in range(4):
        if (stage and name in ("powersgd", "onebit-adam")) or (not stage and "dp_replicate" in mesh):
            continue
        more = {key: value for key, value in mesh.items() if key != "grad_sync" or stage > 1}
        config = RunConfig(**SMALL, **HOW[name], **more, compress=name, stage=stage)
        results[stage] = result = run(config)
        planned = plan(config, every_rank=True)
        assert planned.traffic == result.traffic
        assert [one.to_dict() for one in planned.memory] == [one.to_dict() for one in result.memory]
        for at in range(config.mesh.pp):
            found = [*checks(result)[at].states, *(c for step in range(4) for c in checks(result, step)[at].sent)]
            assert all(check.agrees for check in found)
    for stage in results.keys() - {0, 1}:
        other = results[1].weights
        assert all(np.array_equal(values, other[key]) for key, values in results[stage].weights.items())


def sent(codec: Codec, values: Any) -> list[Any]:
    """What a codec makes of rows (P, n), in which it leaves the rest."""
    types = {"uint8": np.uint8, "int32": np.int32, "fp32": np.float32, "fp64": np.float64}
    from zerosim.dtypes import dtype

    stored = dtype({4: "fp32", 8: "fp64"}[values.itemsize])
    buffers = [np.empty((len(values), n), types[kind.name]) for n, kind in codec.buffers(values.shape[1], stored)]
    codec.encode(np, values, *buffers)
    return buffers


@pytest.mark.parametrize("codec", [TopK(0.1), TopK(1.0), SIGNS], ids=str)
@pytest.mark.parametrize("numel", [1, 7, 64, 1000])
def test_decoded_plus_residual_is_the_sum_of_gradients(codec: Codec, numel: int) -> None:
    """Error feedback over 20 steps, in float64."""
    random, residual, received, total = np.random.default_rng(0), np.zeros((1, numel)), np.zeros(numel), np.zeros(numel)
    for _ in range(20):
        grad = random.standard_normal(numel)
        total += grad
        residual += grad
        out = np.empty(numel)
        mean_of(codec)(np, out, *sent(codec, residual))
        received += out
        np.testing.assert_allclose(received + residual[0], total, atol=1e-5 if isinstance(codec, Signs) else 1e-12)


@pytest.mark.parametrize(("bits", "block", "numel"), [(8, 32, 100), (4, 16, 101), (4, 64, 1), (8, 256, 1024)])
def test_blocks_are_whole_steps_of_their_largest_magnitude(bits: int, block: int, numel: int) -> None:
    values = np.random.default_rng(1).standard_normal((3, numel)).astype(np.float32)
    codec, most = Blocks(blocks(bits, block)), 2 ** (bits - 1) - 1
    out, arrived = np.empty(numel, np.float32), sent(codec, values.copy())
    mean_of(codec)(np, out, *arrived)
    assert arrived[0].nbytes == 3 * -(-numel * bits // 8)
    each = np.zeros((3, numel))
    for row, start in ((row, start) for row in range(3) for start in range(0, numel, block)):
        part = values[row, start : start + block].astype(np.float64)
        step = np.float64(np.float32(np.abs(part).max() / most))
        each[row, start : start + block] = np.rint(part / step) * step
    np.testing.assert_allclose(out, each.mean(0), rtol=1e-5, atol=1e-6)
    mean_of(codec)(np, out, *sent(codec, np.zeros((2, numel), np.float32)))
    assert not out.any()


def test_of_equal_magnitudes_the_first_are_sent() -> None:
    values = np.array([[1.0, -2.0, 2.0, 2.0, 0.0]])
    kept, places = sent(TopK(0.4), values)
    assert (kept.tolist(), places.tolist(), values.tolist()) == ([[-2, 2]], [[1, 2]], [[1, 0, 0, 2, 0]])


def test_dgc_sends_less_from_step_to_step() -> None:
    assert [round(ratio_at(step, 0.001, 4), 4) for step in range(6)] == [0.25, 0.0629, 0.0158, 0.004, 0.001, 0.001]


def test_columns_are_made_orthonormal() -> None:
    columns = np.random.default_rng(2).standard_normal((20, 3))
    orthogonalize(np, columns)
    np.testing.assert_allclose(columns.T @ columns, np.eye(3), atol=1e-12)


@pytest.mark.parametrize("stage", [0, 2])
def test_dgc_is_its_formula(stage: int) -> None:
    """One rank, in float64: u = m u + g, v += u, the largest of v are the step, both are 0 there."""
    same = SMALL | HOW["dgc"] | dict(precision="fp64", steps=1, ranks=1, compress_warmup=0)
    config = RunConfig(**same, compress="dgc", stage=stage)
    start = run(config.replace(lr=1e-30)).weights
    plain = run(config.replace(compress="none", compress_ratio=None, momentum=None)).weights
    moved = run(config).weights
    sizes = [(sum(w.numel for w in flat.weights), flat) for flat in plan(config).layout.flats.values()]
    for numel, flat in sizes:
        names = [weight.name for weight in flat.weights]
        grad = np.concatenate([(start[name] - plain[name]).reshape(-1) for name in names]).astype(np.float64)
        step = np.concatenate([(start[name] - moved[name]).reshape(-1) for name in names]).astype(np.float64)
        count = int(np.ceil(0.1 * numel))
        chosen = np.argsort(-np.abs(grad), kind="stable")[:count]
        wanted = np.zeros(numel)
        wanted[chosen] = grad[chosen]
        assert np.count_nonzero(step) <= count
        np.testing.assert_allclose(step, wanted, atol=1e-9)


def test_onebit_adam_is_its_formula_on_one_rank() -> None:
    """Adam without bias correction; from the third step on v stays, and m is the signs of m and the errors before."""
    how = SMALL | dict(precision="fp64", lr=1e-3, ranks=1, stage=0)
    config = RunConfig(**how, compress="onebit-adam", compress_warmup=2)

    def weights(**changes: Any) -> Any:
        found = run(config.replace(**changes)).weights
        return np.concatenate([found["ln_f.weight"], found["ln_f.bias"]])  # one buffer

    at = [weights(steps=1, lr=1e-30), *(weights(steps=steps) for steps in (1, 2, 3, 4))]
    moves = [np.abs(after - before) for before, after in pairwise(at)]
    np.testing.assert_allclose(moves[0], 1e-3 * 0.1 / np.sqrt(0.001), rtol=1e-3)  # m / sqrt(v) of the first gradient
    scaled = moves[2] / moves[3]
    assert np.ptp(scaled) < 1e-3 * scaled.max()  # one scale for all elements, over a v that stays
    assert np.ptp(moves[1] / moves[2]) > scaled.max()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(compress="top-k", stage=2, partition="owner"), "the owner reduces gradients in place"),
        (dict(compress="top-k", compress_ratio=1.5), "at most 1"),
        (dict(compress="top-k", compress_ratio=0.0), "more than 0"),
        (dict(compress="int4", compress_block=33), "choose an even number"),
        (dict(compress="int8", compress_block=1), "at least 2"),
        (dict(compress="int8", compress_rank=2), "works only with compress powersgd"),
        (dict(compress="powersgd", compress_rank=0), "at least 1"),
        (dict(compress="powersgd", stage=2), "needs whole matrices; choose stage 0"),
        (dict(compress="onebit-adam", compress_warmup=5, stage=1), "the whole momentum on every rank"),
        (dict(compress="onebit-adam"), "choose a compress_warmup"),
        (dict(compress="dgc"), "choose optimizer sgd with a momentum"),
        (dict(compress="int8", tp=2), "the copies of a weight would be compressed differently on each rank"),
        (dict(compress="int8", precision="bf16"), "compresses fp32 gradients"),
        (dict(compress="top-k", skip_nonfinite=True), "must be finite"),
        (
            dict(compress="dgc", optimizer="sgd", momentum=0.9, stage=2, accumulate=2),
            "once per step, not per microbatch",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        RunConfig(**SMALL | dict(ranks=4) | fields)
