"""ZeRO-3 in its plainest form: gather a unit, use it, free it; reduce its gradient, keep a slice, update the slice.

    python -m zerosim.lessons.plain_zero3

It uses nothing of `parallel/`, and its weights are those of `zerosim run --stage 3`, to the bit. Left out are half
types, clipping, accumulation, prefetch, buckets, other axes of a mesh, and every error message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zerosim.comm.runtime import Context, World, launch
from zerosim.config import RunConfig
from zerosim.models.model import Model, draw_flat
from zerosim.optim.adam import Adam
from zerosim.optim.optimizer import Step, alone
from zerosim.placement.partition import slice_of
from zerosim.tensor.tensor import Tensor, cpu
from zerosim.train.build_model import build_model
from zerosim.train.build_strategy import layout_of
from zerosim.train.build_updater import build_updater
from zerosim.train.data import micro_batches, read_text, sample_batch
from zerosim.train.run import run
from zerosim.train.uploads import upload


def zero3(ctx: Context, model: Model, adam: Adam, lr: float, batches: Sequence[Any]) -> None:
    comm, device = ctx.comm, ctx.device
    for number, batch in enumerate(batches, start=1):
        x = Tensor(upload(batch[:, :-1], device))
        for unit in model.units:
            unit.flat.unshard(comm.all_gather(unit.flat.shard()))
            x = unit.forward(x)
            unit.flat.reshard()
        targets = upload(batch[:, 1:], device)
        _, grad = model.loss([x.buffer], targets, scale=1.0, count=targets.numel)
        grads = [grad()]
        for unit in reversed(model.units):
            unit.flat.unshard(comm.all_gather(unit.flat.shard()))
            unit.backward(grads)
            unit.flat.reshard()
            if unit.reduces:  # a tied table: after both of its uses
                unit.flat.grad_shard = comm.reduce_scatter(unit.flat.take_grad())
        for flat in model.flats:
            adam.step(flat, Step(1.0, lr, number), alone)
            flat.drop_grads()


def train(config: RunConfig) -> dict[str, Any]:
    """Train with `zero3` on the ranks of `config`, in fp32; return the weights by name."""

    layout = layout_of(config, build_model(config, cpu()))

    def one_rank(ctx: Context) -> list[Any]:
        model, updater = build_model(config, ctx.device), build_updater(config, 1)
        for flat in model.flats:  # allocate a slice of the parameters and of Adam's states
            own = slice_of(flat.numel, ctx.rank, ctx.world_size)
            flat.held = layout.held(flat.name, own, own.size * ctx.world_size)
            flat.place_params(flat.held.rows["param"])
            updater.allocate(flat)
            draw_flat(flat, config.data.seed, exact_master=False)
        batches = [micro_batches(whole, ctx.rank, ctx.world_size, 1)[0] for whole in wholes]
        zero3(ctx, model, Adam(), config.optim.lr, batches)
        return [flat.weights().array for flat in model.flats]

    rows, seed, seq = config.global_batch, config.data.seed, config.model.seq
    text = read_text(None, seq, config.model.vocab)
    wholes = [sample_batch(text, seed, step, rows=rows, seq=seq) for step in range(config.optim.steps or 1)]
    ranks = launch(one_rank, World(config.mesh.ranks))
    weights = {}
    for flat, *slices in zip(layout.flats.values(), *ranks, strict=True):
        whole = np.concatenate(slices)
        for weight, at in zip(flat.weights, flat.offsets, strict=True):
            weights[weight.name] = whole[at : at + weight.numel].reshape(weight.shape)
    return weights


if __name__ == "__main__":
    config = RunConfig(stage=3, ranks=4, steps=3, precision="fp32")
    mine, theirs = train(config), run(config).weights
    print(f"{len(mine)} weights, equal to those of zerosim run --stage 3 to the bit:", end=" ")
    print(all(np.array_equal(mine[name], theirs[name]) for name in theirs))
