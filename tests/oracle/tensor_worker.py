"""One process of two that train a GPT with tensor parallelism, written here with torch.distributed on gloo.

    python -m oracle.tensor_worker FOLDER RANK

FOLDER holds tasks.pickle; this leaves rank<RANK>.pickle: by (is sequence parallel, tied), what zerosim is compared
with. Started by `test_tensor_parallel.py`. Megatron-LM's conjugate pairs as autograd functions (1909.08053, section 3;
2205.05198, section 4.2.2); gradients are those of the whole, of which a rank keeps its part.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from .runs import Task
from .worker import Traffic, be_one_of

RANKS = 2
LR = 1e-3
STEPS = 4


def all_reduced(x: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x, op)
    return x


def gathered(x: torch.Tensor) -> torch.Tensor:
    whole = x.new_empty(RANKS * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous())
    return whole


def scattered(whole: torch.Tensor) -> torch.Tensor:
    x = whole.new_empty(whole.shape[0] // RANKS, *whole.shape[1:])
    dist.reduce_scatter_tensor(x, whole.contiguous())
    return x


class Enter(torch.autograd.Function):
    """f: forward nothing, backward all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return all_reduced(grad)


class Leave(torch.autograd.Function):
    """g: forward all-reduce, backward nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_reduced(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class ColumnsOfRows(torch.autograd.Function):
    """x @ weight of gathered rows; saves its own rows alone and gathers them again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return gathered(x) @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return scattered(grad @ weight.T), gathered(x).T @ grad


class LeaveByRows(torch.autograd.Function):
    """g of sequence parallelism: forward reduce-scatter of rows, backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return scattered(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return gathered(grad)


class VocabularyLoss(torch.autograd.Function):
    """Token losses of logits of which each rank has some columns: three all-reduces, the logits stay where they are."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, first: int) -> torch.Tensor:
        top = all_reduced(logits.max(-1).values, dist.ReduceOp.MAX)
        at = targets - first
        here = (at >= 0) & (at < logits.shape[-1])
        at = at.clamp(0, logits.shape[-1] - 1)
        picked = all_reduced(torch.where(here, logits.gather(-1, at[:, None])[:, 0], torch.zeros(())))
        shares = (logits - top[:, None]).exp()
        sums = all_reduced(shares.sum(-1))
        probs = shares / sums[:, None]
        ctx.save_for_backward(probs, at, here)
        return sums.log() + top - picked

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        probs, at, here = ctx.saved_tensors
        one_hot = torch.zeros_like(probs).scatter_(-1, at[:, None], here[:, None].to(probs.dtype))
        return (probs - one_hot) * grad[:, None], None, None


def own_part(name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank keeps of a weight (GPT-2's layouts: c_attn is q|k|v side by side, each cut into its heads)."""
    if "c_attn" in name:
        return torch.cat([part.chunk(RANKS, -1)[rank] for part in whole.chunk(3, -1)], -1)
    if "c_fc" in name:
        return whole.chunk(RANKS, -1)[rank]
    if name.endswith("c_proj.weight") or name in ("wte.weight", "lm_head.weight"):
        return whole.chunk(RANKS, 0)[rank]
    return whole


class Model:
    """The task's GPT as one rank of two holds it. Rows are (B T, D), cut in two with sequence parallelism."""

    def __init__(self, task: Task, rank: int, by_rows: bool) -> None:
        self.task, self.rank, self.by_rows = task, rank, by_rows
        self.weights = {
            name: own_part(name, torch.from_numpy(whole), rank).clone().requires_grad_()
            for name, whole in task.weights.items()
        }

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        w, task, rank = self.weights, self.task, self.rank
        table = w["wte.weight"]
        first = rank * table.shape[0]
        at = ids.reshape(-1) - first
        here = (at >= 0) & (at < table.shape[0])
        x = self.leave(table[at.clamp(0, table.shape[0] - 1)] * here[:, None])
        positions = torch.arange(task.seq).repeat(len(ids))
        x = x + w["wpe.weight"][positions.chunk(RANKS)[rank] if self.by_rows else positions]
        for i in range(task.layers):
            x = x + self.attention(f"h.{i}.attn", self.norm(f"h.{i}.ln_1", x))
            inner = self.columns(self.norm(f"h.{i}.ln_2", x), w[f"h.{i}.mlp.c_fc.weight"], w[f"h.{i}.mlp.c_fc.bias"])
            x = x + self.rows(f"h.{i}.mlp.c_proj", F.gelu(inner, approximate="tanh"))
        head = table if task.tied else w["lm_head.weight"]
        logits = self.columns(self.norm("ln_f", x), head.T)
        return VocabularyLoss.apply(logits, targets.reshape(-1), first).mean()

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return LeaveByRows.apply(x) if self.by_rows else Leave.apply(x)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def columns(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = ColumnsOfRows.apply(x, weight) if self.by_rows else Enter.apply(x) @ weight
        return y if bias is None else y + bias

    def rows(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.leave(x @ self.weights[f"{name}.weight"]) + self.weights[f"{name}.bias"]

    def attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        packed = self.columns(x, self.weights[f"{name}.c_attn.weight"], self.weights[f"{name}.c_attn.bias"])
        heads = self.task.heads // RANKS
        q, k, v = (y.view(-1, self.task.seq, heads, y.shape[-1] // heads).transpose(1, 2) for y in packed.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.rows(f"{name}.c_proj", y.transpose(1, 2).reshape(len(packed), -1))

    def add_up_shares(self) -> None:
        """Each rank's rows gave a share of what is whole on both: norms, positions, biases after a reduction."""
        for name, weight in self.weights.items():
            if weight.shape == self.task.weights[name].shape:
                dist.all_reduce(weight.grad)


def train(task: Task, rank: int, by_rows: bool) -> dict[str, Any]:
    model = Model(task, rank, by_rows)
    optimizer = torch.optim.Adam(model.weights.values(), lr=LR)
    losses: list[float] = []
    traffic: list[Counter[str]] = []
    first: dict[str, Any] = {}
    for batch in torch.from_numpy(task.tokens):
        optimizer.zero_grad()
        with Traffic() as seen:
            loss = model.loss(batch[:, :-1], batch[:, 1:])
            loss.backward()
        traffic.append(seen.payload_bytes)
        if by_rows:
            model.add_up_shares()
        first = first or {name: weight.grad.numpy().copy() for name, weight in model.weights.items()}
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = {name: weight.detach().numpy() for name, weight in model.weights.items()}
    return {"losses": losses, "traffic": traffic, "first": first, "weights": weights}


def results_of(tasks: dict[bool, Task], rank: int) -> Any:
    return {(by_rows, tied): train(task, rank, by_rows) for tied, task in tasks.items() for by_rows in (False, True)}


if __name__ == "__main__":
    be_one_of(RANKS, results_of)
