"""One process of two or four that train a Llama with experts, of which each has some, on gloo.

    python -m oracle.expert_worker FOLDER RANK RANKS

FOLDER holds tasks.pickle; this leaves rank<RANK>.pickle: by Way, what zerosim is compared with. Started by
`test_expert_parallel.py`. Rows travel by torch's all_to_all_single of uneven parts. Stage 0 all-reduces gradients over
the ranks that hold a weight, stage 3 is FSDP2 over two meshes, as torchtitan wraps experts.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn import functional as F

from .test_llama import MLP, SIZES, Llama
from .worker import Traffic, be_one_of, whole

EXPERTS, TOP_K, WIDE = 8, 2, 24
STEPS, LR = 3, 0.1
SENT = Counter[tuple[str, str]]()
"""Bytes that this rank sends to others for rows of experts, by phase and purpose."""


class Way(NamedTuple):
    ep: int
    stage: int
    shared: bool
    dtype: str

    @property
    def torch(self) -> torch.dtype:
        return {"fp32": torch.float32, "fp64": torch.float64}[self.dtype]


class ByGroup(Traffic):
    """Whole tensors' bytes by (op, ranks of the group)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Counter[tuple[str, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.calls)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for op, nbytes in self.calls[before:]:
            [group] = [
                arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
            ]
            self.bytes[op, dist.ProcessGroup.unbox(group).size()] += nbytes
        return result


def exchanged(rows: Tensor, sent: list[int], received: list[int], group: Any, what: tuple[str, str]) -> Tensor:
    """The rows that every member of the group has for this one."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    to_others = sum(sent) - sent[dist.get_rank(group)]
    SENT[what] += to_others * rows.itemsize * (rows.shape[1] if rows.ndim > 1 else 1)
    return out


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.way = received, sent, group
        return exchanged(rows, sent, received, group, ("forward", "activations"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return exchanged(grad, *ctx.way, ("backward", "activations")), None, None, None


class Experts(nn.Module):
    """Some experts of a layer."""

    def __init__(self, local: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(local, 2 * WIDE, SIZES["hidden"]))
        self.down_proj = nn.Parameter(torch.zeros(local, SIZES["hidden"], WIDE))

    def forward(self, rows: Tensor, of: Tensor) -> Tensor:
        """Each row's result by its expert."""
        order, found = of.argsort(stable=True), list[Tensor]()
        for expert, some in enumerate(rows[order].split(of.bincount(minlength=len(self.down_proj)).tolist())):
            gate, up = F.linear(some, self.gate_up_proj[expert]).chunk(2, -1)
            found.append(F.linear(F.silu(gate) * up, self.down_proj[expert]))
        return torch.cat(found)[order.argsort()]


class Mixture(nn.Module):
    def __init__(self, shared: bool, members: int, ep: Any) -> None:
        super().__init__()
        self.ep, self.members = ep, members
        self.gate = nn.Linear(SIZES["hidden"], EXPERTS, bias=False)
        self.experts = Experts(EXPERTS // self.members)
        self.shared_experts = MLP(SIZES["hidden"], WIDE) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.gate(rows).softmax(-1).topk(TOP_K)
        weights = (weights / weights.sum(-1, keepdim=True)).flatten()
        order = ids.flatten().argsort(stable=True)
        counts, each = ids.flatten().bincount(minlength=EXPERTS), [EXPERTS // self.members] * self.members
        arriving = exchanged(counts, each, each, self.ep, ("forward", "control"))
        sent, received = (of.view(self.members, -1).sum(1).tolist() for of in (counts, arriving))
        of_rows = torch.arange(each[0]).repeat(self.members).repeat_interleave(arriving)
        done = self.experts(Exchange.apply(rows[order // TOP_K], sent, received, self.ep), of_rows)
        back = Exchange.apply(done, received, sent, self.ep) * weights[order, None]
        y = torch.zeros_like(rows).index_add(0, order // TOP_K, back).view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)


def mixture(shared: bool, members: int = 1, ep: Any = None) -> Llama:
    """A model with the experts of one of so many members."""
    model = Llama(SIZES["heads"], 10000.0, False)
    for block in model.model.layers:
        block.mlp = Mixture(shared, members, ep)
    return model


def own_part(name: str, values: Tensor, mesh: DeviceMesh) -> Tensor:
    """What a rank has of a whole weight."""
    return values.chunk(mesh["ep"].size())[mesh["ep"].get_local_rank()] if ".experts." in name else values


def sharded(model: Llama, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Cut everything over all ranks, and experts over those that have the same ones. Return what was left whole."""
    every, left = init_device_mesh("cpu", (mesh.size(),)), set[nn.Parameter]()
    for block in model.model.layers:
        experts: Any = block.mlp.experts
        if mesh["edp"].size() > 1:
            fully_shard(experts, mesh=mesh["edp"], reshard_after_forward=True)
            experts.set_gradient_divide_factor(mesh.size())
            experts.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
        else:
            left |= {*experts.parameters()}
    for unit in (model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head, model):
        fully_shard(unit, mesh=every, reshard_after_forward=True, ignored_params=left)
    register_fsdp_forward_method(model, "token_losses")
    return left


def average(named: Iterable[tuple[str, nn.Parameter]], mesh: DeviceMesh) -> None:
    """All-reduce gradients over the ranks that hold a weight, and divide them by all."""
    for name, parameter in named:
        group = mesh["edp"].get_group() if ".experts." in name else dist.group.WORLD
        if dist.get_world_size(group) > 1:
            dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= mesh.size()


def train(tasks: Any, way: Way, rank: int, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks // way.ep, way.ep), mesh_dim_names=("edp", "ep"))
    model = mixture(way.shared, way.ep, mesh["ep"].get_group())
    for name, parameter in model.named_parameters():
        parameter.data = own_part(
            name, torch.from_numpy(tasks["weights"][way.shared][name]).to(way.torch), mesh
        ).clone()
    left = sharded(model, mesh) if way.stage == 3 else {*model.parameters()}
    optimizer, losses, sent, moved = torch.optim.SGD(model.parameters(), lr=LR), list[float](), [], []
    first: dict[str, Any] = {}
    for batch in torch.from_numpy(tasks["tokens"]):
        SENT.clear()
        optimizer.zero_grad()
        with ByGroup() as seen:
            loss = model.token_losses(batch.chunk(ranks)[rank]).mean()
            loss.backward()
            average(((name, p) for name, p in model.named_parameters() if p in left), mesh)
        first = first or {name: whole(p.grad).numpy().copy() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(float(loss.detach()))
        sent.append(dict(SENT))
        moved.append(dict(seen.bytes))
    weights = {name: whole(p.detach()).numpy().copy() for name, p in model.named_parameters()}
    return {"losses": losses, "first": first, "weights": weights, "sent": sent, "moved": moved}


def results_of(tasks: Any, rank: int) -> Any:
    ranks = int(sys.argv[3])
    return {way: train(tasks, way, rank, ranks) for way in tasks["ways"] if ranks % way.ep == 0}


if __name__ == "__main__":
    be_one_of(int(sys.argv[3]), results_of)
