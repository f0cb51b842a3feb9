"""One process of two or four that share the tokens of every row, written here with torch.distributed on gloo.

    python -m oracle.context_worker FOLDER RANK RANKS

FOLDER holds tasks.pickle; this leaves rank<RANK>.pickle: by (way, is zig-zag), what zerosim is compared with. Started
by `test_context_parallel.py`. The ring is Liu et al.'s (2310.01889) with FlashAttention-2's backward (2307.08691),
Ulysses is Jacobs et al.'s (2309.14509), gathered keys are Llama 3's (2407.21783). Every rank has the whole model.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .gpt import GPT
from .runs import Task
from .worker import be_one_of

STEPS = 4
LR = 1e-3
WAYS = (("ring", True), ("ring", False), ("allgather", True), ("allgather", False), ("ulysses", False))
SENT = Counter[str]()
"""Bytes that this rank sends to others, by operation."""
Read = Callable[[Tensor, Tensor, Tensor, list[Tensor]], Tensor]
"""The result (B, H, t, d) of a rank's q, k and v, of the positions that each rank has."""


def positions(rank: int, ranks: int, tokens: int, zigzag: bool) -> Tensor:
    whole = torch.arange(tokens)
    if not zigzag:
        return whole.chunk(ranks)[rank]
    pieces = whole.chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


def passed(*tensors: Tensor) -> list[Tensor]:
    """What the rank before gives, for these to the rank after."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    coming = [tensor.new_empty(tensor.shape) for tensor in tensors]
    ops = [dist.P2POp(dist.isend, tensor.contiguous(), (rank + 1) % ranks) for tensor in tensors]
    ops += [dist.P2POp(dist.irecv, tensor, (rank - 1) % ranks) for tensor in coming]
    SENT["send"] += sum(tensor.nbytes for tensor in tensors)
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return coming


def scores_of(q: Tensor, k: Tensor, of_queries: Tensor, of_keys: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(of_keys > of_queries[:, None], -math.inf)


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, places: list[Tensor]) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        out, lse, pair = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf), [k, v]
        for step in range(ranks):
            scores = scores_of(q, pair[0], places[rank], places[(rank - step) % ranks])
            new = scores.logsumexp(-1)
            both = torch.logaddexp(lse, new)
            out = out * (lse - both).exp().nan_to_num()[..., None]
            out = out + (scores - both[..., None]).exp().nan_to_num() @ pair[1]
            lse = both
            if step < ranks - 1:
                pair = passed(*pair)
        ctx.places = places
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        q, k, v, out, lse = ctx.saved_tensors
        delta, dq = (grad * out).sum(-1, keepdim=True), torch.zeros_like(q)
        pair, grads = [k, v], [torch.zeros_like(k), torch.zeros_like(v)]
        for step in range(ranks):
            p = (scores_of(q, pair[0], ctx.places[rank], ctx.places[(rank - step) % ranks]) - lse[..., None]).exp()
            ds = p * (grad @ pair[1].transpose(-1, -2) - delta) / math.sqrt(q.shape[-1])
            dq += ds @ pair[0]
            grads = passed(grads[0] + ds.transpose(-1, -2) @ q, grads[1] + p.transpose(-1, -2) @ grad)
            if step < ranks - 1:
                pair = passed(*pair)
        return dq, *grads, None


def all_to_all(x: Tensor, split: int, join: int) -> Tensor:
    ranks = dist.get_world_size()
    parts = torch.stack([part.contiguous() for part in x.chunk(ranks, split)])
    got = torch.empty_like(parts)
    dist.all_to_all_single(got, parts)
    SENT["all_to_all"] += parts.nbytes * (ranks - 1) // ranks
    return torch.cat(list(got), join)


class Exchange(torch.autograd.Function):
    """Heads (dim 1) for tokens (dim 2) and, in backward, the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int) -> Tensor:
        ctx.dims = join, split
        return all_to_all(x, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_to_all(grad, *ctx.dims), None, None


class Gather(torch.autograd.Function):
    """All tokens' keys or values; backward adds up the gradients of every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        whole = x.new_empty(ranks, *x.shape)
        dist.all_gather_into_tensor(whole, x.contiguous()[None])
        SENT["all_gather"] += x.nbytes * (ranks - 1)
        return torch.cat(list(whole), 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        parts = torch.stack([part.contiguous() for part in grad.chunk(ranks, 2)])
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(own, parts.view(-1, *own.shape[1:]))
        SENT["reduce_scatter"] += own.nbytes * (ranks - 1)
        return own


def ring(q: Tensor, k: Tensor, v: Tensor, places: list[Tensor]) -> Tensor:
    return Ring.apply(q, k, v, places)


def ulysses(q: Tensor, k: Tensor, v: Tensor, places: list[Tensor]) -> Tensor:
    q, k, v = (Exchange.apply(each, 1, 2) for each in (q, k, v))
    return Exchange.apply(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1)


def allgather(q: Tensor, k: Tensor, v: Tensor, places: list[Tensor]) -> Tensor:
    """Backward gathers again, as Megatron-Core does: a layer's keys and values are not kept."""

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = scores_of(q, Gather.apply(k), places[dist.get_rank()], torch.cat(places))
        return scores.softmax(-1) @ Gather.apply(v)

    return checkpoint(core, q, k, v, use_reentrant=False)


READ: dict[str, Read] = {"ring": ring, "ulysses": ulysses, "allgather": allgather}


def logits(model: GPT, ids: Tensor, read: Read, places: list[Tensor]) -> Tensor:
    x = model.wte(ids) + model.wpe(places[dist.get_rank()])
    for block in model.h:
        packed = block.attn.c_attn(block.ln_1(x)).chunk(3, -1)
        q, k, v = (part.view(*part.shape[:2], block.attn.heads, -1).transpose(1, 2) for part in packed)
        x = x + block.attn.c_proj(read(q, k, v, places).transpose(1, 2).reshape(x.shape))
        x = x + block.mlp(block.ln_2(x))
    return F.linear(model.ln_f(x), model.wte.weight)


def train(task: Task, way: str, zigzag: bool) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    places = [positions(one, ranks, task.seq, zigzag) for one in range(ranks)]
    model, losses = task.gpt(), list[float]()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    first: dict[str, Any] = {}
    SENT.clear()
    for batch in torch.from_numpy(task.tokens[:STEPS]):
        optimizer.zero_grad()
        out = logits(model, batch[:, :-1][:, places[rank]], READ[way], places)
        loss = F.cross_entropy(out.flatten(0, 1), batch[:, 1:][:, places[rank]].flatten())
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        first = first or {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return {"losses": losses, "first": first, "weights": weights, "sent": dict(SENT)}


def results_of(tasks: dict[bool, Task], rank: int) -> Any:
    return {(way, zigzag): train(tasks[True], way, zigzag) for way, zigzag in WAYS}


if __name__ == "__main__":
    be_one_of(int(sys.argv[3]), results_of)
