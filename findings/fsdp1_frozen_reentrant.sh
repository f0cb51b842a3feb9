#!/usr/bin/env bash
# PyTorch 2.13.0: FSDP1 around frozen blocks with reentrant checkpointing holds more and more tensors through backward.
#
# One would guess that checkpointing keeps one input for each block and frees it when backward has passed the block: so
# it is without reentrant checkpoints, one tensor fewer from block to block. With them each block leaves one tensor more,
# the gradient of its input beside the input itself, until the whole backward ends: a frozen unit has no gradient to
# reduce, so FSDP hangs its hook on the block's input. LoRA's fullest moment moves from the loss to the first block.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy
"$work/venv/bin/python" -W ignore - <<'PY'
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

BLOCKS, SHAPE = 6, (8, 32)
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())


class Block(nn.Module):
    """A frozen map, and one that is trained in a unit of its own, as an adapter is."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(32, 32, bias=False).requires_grad_(False)
        self.trained = FullyShardedDataParallel(nn.Linear(32, 32, bias=False), device_id=torch.device("cpu"))

    def forward(self, x):
        return self.base(x) + self.trained(x)


class Model(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        cpu = torch.device("cpu")
        self.blocks = nn.ModuleList(FullyShardedDataParallel(Block(), device_id=cpu) for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.sum()


class Live(TorchDispatchMode):
    """The tensors of a block's input's shape that are alive when each block's backward begins."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor) and tuple(one.shape) == SHAPE:
                storage = one.untyped_storage()
                self.seen[storage._cdata] = weakref.ref(storage)
        return out

    def count(self):
        return sum(one() is not None for one in self.seen.values())


def growth(reentrant):
    """Live tensors at the start of each block's recomputation, from the last block to the first."""
    model = FullyShardedDataParallel(Model(reentrant), device_id=torch.device("cpu"))
    counts, live = [], Live()
    with live:
        loss = model(torch.randn(SHAPE, requires_grad=True))
        backward = [False]
        for block in model.module.blocks:
            block.register_forward_pre_hook(lambda *_: counts.append(live.count()) if backward[0] else None)
        backward[0] = True
        loss.backward()
    return [later - earlier for earlier, later in zip(counts, counts[1:])]


with_it, without = growth(True), growth(False)
print("torch", torch.__version__, "from block to block, reentrant:", with_it, "not reentrant:", without)
assert sum(with_it[1:]) > 0 > sum(without[1:])
PY
