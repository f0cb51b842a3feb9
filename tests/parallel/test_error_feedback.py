"""Compressed gradients over several steps: the papers' algorithms, written down once more for all ranks in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.comm.runtime import Context, launch
from zerosim.config import RunConfig
from zerosim.device.device import Kind
from zerosim.parallel.stage import Stage
from zerosim.train.build import build_rank, place_rank
from zerosim.train.build_updater import build_updater
from zerosim.train.world import world_of

STEPS, RANKS = 4, 2
SMALL: dict[str, Any] = dict(
    layers=1, hidden=8, heads=1, seq=4, vocab=32, micro_batch=1, ranks=RANKS, precision="fp64", seed=5
)
DGC: dict[str, Any] = dict(
    compress="dgc", compress_ratio=0.1, compress_warmup=0, optimizer="sgd", momentum=0.75, lr=0.1
)


def exchanged(**how: Any) -> tuple[Any, Any]:
    """Return random gradients of one buffer (step, rank, element), and the means that the exchange makes of them
    (step, element)."""
    config = RunConfig(**SMALL, **how)

    def program(ctx: Context) -> Any:
        built = build_rank(ctx, config, build_updater(config, 1))
        place_rank(ctx, built.model, built.strategy, lambda flat, group: None)
        assert isinstance(built.strategy, Stage)
        exchange, device = built.strategy.exchange, ctx.device
        flat = next(flat for flat in built.model.flats if flat.name == "h.0")
        grads, means = np.random.default_rng(ctx.rank).standard_normal((STEPS, flat.padded_numel)), []
        for step, values in enumerate(grads):
            with device.scope(step=step):
                grad = device.alloc((flat.padded_numel,), flat.grad_dtype, Kind.UNSHARDED_GRAD)
                device.backend.from_host(values, grad.array)
                [arrived] = exchange.launch_reduce([flat], [grad]).wait()
                own = exchange.own_part(flat, arrived)
                assert own is not None
                means.append(device.backend.to_host(own.array).copy())
                if "exp_avg" in flat.states:  # the optimizer step's part: the mean is the momentum
                    flat.states["exp_avg"].array[...] = own.array
        return grads, np.stack(means)

    found = launch(program, world_of(config))
    grads, means = np.stack([grads for grads, _ in found], axis=1), [means for _, means in found]
    if how["stage"]:  # each rank has its slice
        return grads, np.hstack(means)
    assert all(np.array_equal(mean, means[0]) for mean in means)
    return grads, means[0]


def largest(values: Any, ratio: float) -> Any:
    chosen = np.zeros(values.size, bool)
    chosen[np.argsort(-np.abs(values), kind="stable")[: int(np.ceil(ratio * values.size))]] = True
    return chosen


@pytest.mark.parametrize("stage", [0, 2])
def test_dgc_accumulates_velocity_and_masks_what_was_sent(stage: int) -> None:
    """Algorithm 4 of arXiv 1712.01887: u = m u + g, v = v + u; the largest of v are sent, and u = v = 0 there."""
    grads, means = exchanged(**DGC, stage=stage)
    u, v = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    parts = 1 if stage == 0 else RANKS
    for grad, mean in zip(grads, means, strict=True):
        u = DGC["momentum"] * u + grad
        v = v + u
        sent = np.stack([np.hstack([largest(part, 0.1) for part in np.split(row, parts)]) for row in v])
        np.testing.assert_allclose(mean, np.where(sent, v, 0).mean(0), rtol=1e-12)
        u, v = np.where(sent, 0, u), np.where(sent, 0, v)


def as_signs(values: Any) -> Any:
    """C[x] of arXiv 2102.02888: signs times the root mean square, in fp32."""
    scale = np.float64(np.float32(np.sqrt((values * values).mean())))
    return np.where(values >= 0, scale, -scale)


def test_onebit_adam_feeds_back_the_workers_and_the_servers_errors() -> None:
    """Algorithm 1 of arXiv 2102.02888, lines 6 to 12, from the first step on frozen."""
    grads, means = exchanged(compress="onebit-adam", compress_warmup=1, stage=0)
    m = np.zeros(grads.shape[2])
    worker, server = np.zeros_like(grads[0]), np.zeros_like(grads[0][0])
    for step, (grad, mean) in enumerate(zip(grads, means, strict=True)):
        if step == 0:  # the warm-up's mean: the test above takes it for the momentum
            m = grad.mean(0)
            np.testing.assert_allclose(mean, m, rtol=1e-12)
            continue
        worker += 0.9 * m + (1 - 0.9) * grad
        coded = np.stack([np.hstack([as_signs(part) for part in np.split(row, RANKS)]) for row in worker])
        worker -= coded
        server += coded.mean(0)
        m = np.hstack([as_signs(part) for part in np.split(server, RANKS)])
        server -= m
        np.testing.assert_allclose(mean, m, rtol=1e-6)


@pytest.mark.parametrize("stage", [0, 2])
def test_random_k_sends_other_elements_in_every_step_and_no_gradient_is_lost(stage: int) -> None:
    """Random sparsification with memory (arXiv 1809.07599): the residual holds an element until it is drawn."""
    grads, means = exchanged(compress="random-k", compress_ratio=0.3, stage=stage)
    residual, drawn = np.zeros_like(grads[0]), set()
    for grad, mean in zip(grads, means, strict=True):
        residual += grad
        sent = mean != 0
        parts = np.split(sent, 1 if stage == 0 else RANKS)
        assert [part.sum() for part in parts] == [np.ceil(0.3 * part.size) for part in parts]
        np.testing.assert_allclose(mean[sent], residual.mean(0)[sent], rtol=1e-12)
        residual[:, sent] = 0
        drawn |= {part.tobytes() for part in parts}
    assert len(drawn) == STEPS * len(parts)
