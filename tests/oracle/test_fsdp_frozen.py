"""What FSDP keeps of frozen blocks with adapters in backward: PyTorch's own, on a fake process group, beside ours."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from zerosim import RunConfig, plan
from zerosim.device.events import Alloc, Free

WIDTH, TOKENS, LAYERS = 16, 8, 5
Wrap = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    """A frozen map with an adapter, each of whose tensors is a unit."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.lora_a, self.lora_b = wrap(nn.Linear(WIDTH, 2, bias=False)), wrap(nn.Linear(2, WIDTH, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.base(x) + self.lora_b(self.lora_a(x))
        return out


class Stack(nn.Module):
    def __init__(self, wrap: Wrap, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(wrap(Block(wrap)) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.sum()


class Live(TorchDispatchMode):
    """Counts live storages of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor) and tuple(one.shape) == (TOKENS, WIDTH):
                storage = one.untyped_storage()
                at = storage._cdata
                if at not in self.live:
                    self.live[at] = weakref.ref(storage, lambda _, at=at: self.live.pop(at, None))
        return out


def theirs(version: int, ranks: int, *, reentrant: bool) -> list[int]:
    """Return the live tensors as large as a block's input when each block's recomputation begins, the last block's
    first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)  # type: ignore[no-untyped-call]
    try:
        wrap: Wrap = fully_shard
        if version == 1:
            wrap = partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu"))
        stack, mode, found = Stack(wrap, reentrant=reentrant), Live(), list[int]()
        for block in stack.blocks:
            inner = getattr(block, "module", block)
            inner.base.register_forward_pre_hook(lambda *_: found.append(len(mode.live)))
        model = wrap(stack)
        with mode:
            model(torch.randn(TOKENS, WIDTH, requires_grad=True)).backward()
        return found[LAYERS:]
    finally:
        dist.destroy_process_group()


def ours(recipe: str, ranks: int, *, reentrant: bool) -> list[int]:
    """Return the same of a plan, when each block's backward begins."""
    size: dict[str, Any] = {
        "layers": LAYERS,
        "hidden": WIDTH,
        "heads": 2,
        "seq": TOKENS,
        "vocab": 256,
        "micro_batch": 1,
    }
    config = RunConfig(**size, ranks=ranks, stage=3, recipe=recipe, recompute="full", lora_rank=2, adapter_dtype="fp32")
    if recipe == "fsdp1":
        config = config.replace(use_reentrant=reentrant)
    live, found = set[int](), dict[str, int]()
    for event in plan(config, keep_events=True).events[0]:
        if isinstance(event, Alloc):
            if event.scope.phase == "backward" and event.kind != "prefetched_param":
                found.setdefault(event.scope.unit, len(live))
            if event.kind.startswith("activation") and event.nbytes == 2 * TOKENS * WIDTH:
                live.add(event.id)
        elif isinstance(event, Free):
            live.discard(event.id)
    return [found[f"h.{block}"] for block in reversed(range(LAYERS))]


def steps(counts: list[int]) -> list[int]:
    """Return by how many tensors each block's beginning differs from that of the block above it, without the ends."""
    return [below - above for above, below in pairwise(counts[1:-1])]


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("ranks", [1, 2, 16])
@pytest.mark.parametrize(
    ("version", "reentrant", "each"), [(1, True, 1), (1, False, -1), (2, True, -1), (2, False, -1)]
)
def test_what_grows_from_block_to_block_in_backward(version: int, reentrant: bool, each: int, ranks: int) -> None:
    """FSDP1 with reentrant checkpoints: an input is not freed, and its gradient is kept. Otherwise inputs are freed."""
    expected = [each] * (LAYERS - 3)
    assert steps(theirs(version, ranks, reentrant=reentrant)) == expected
    assert steps(ours(f"fsdp{version}", ranks, reentrant=reentrant)) == expected
