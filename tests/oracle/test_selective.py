"""What a block keeps under torchtitan's `op` policy, as PyTorch's own selective checkpoints keep it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zerosim.config import RunConfig
from zerosim.train.plan import plan

b, s, h, a = 2, 16, 32, 4


class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
    """GPT-2's, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(h), torch.nn.LayerNorm(h)
        self.c_attn, self.c_proj = torch.nn.Linear(h, 3 * h), torch.nn.Linear(h, h)
        self.c_fc, self.c_out = torch.nn.Linear(h, 4 * h), torch.nn.Linear(4 * h, h)

    def forward(self, x: Any) -> Any:
        q, k, v = (part.view(b, s, a, h // a).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(h, dim=2))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, s, h))
        return x + self.c_out(torch.nn.functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Made(TorchDispatchMode):  # type: ignore[misc]
    """Remembers, weakly, the memory of all that ops make."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self.storages[storage.data_ptr()] = weakref.ref(storage), storage.nbytes()
        return out

    def live_bytes(self, *left_out: Any) -> int:
        """Of what is still there, but for these tensors."""
        outside = {each.untyped_storage().data_ptr() for each in left_out}
        made = ((at, *kept) for at, kept in self.storages.items() if at not in outside)
        return sum(nbytes for _, storage, nbytes in made if storage() is not None)


def policy() -> Any:
    """Attention's results and those of every second matmul, from the first on, are saved."""
    matmuls = {False: 0, True: 0}

    def choose(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        name = str(func)
        if "addmm" in name or "aten.mm" in name:
            matmuls[ctx.is_recompute] += 1
            saved = matmuls[ctx.is_recompute] % 2 == 1
        else:
            saved = "scaled_dot_product" in name
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


@pytest.mark.slow
@pytest.mark.parametrize("selective", [False, True])
def test_op_keeps_the_bytes_that_torch_keeps(selective: bool) -> None:
    """q|k|v, attention's result and log-sum-exp, the activation's input; and x, which torch was given."""
    block, x = Block(), torch.randn(b, s, h, requires_grad=True)
    with Made() as made:
        y = checkpoint(block, x, use_reentrant=False, **({"context_fn": policy} if selective else {}))
    sizes: dict[str, Any] = dict(layers=1, hidden=h, heads=a, seq=s, micro_batch=b, precision="fp32", saves="megatron")
    counted = plan(
        RunConfig(**sizes, attention="flash", recompute="selective:op" if selective else "full", dropout=0.0)
    )
    kept = sum(row.nbytes for row in counted.saved["h.0"])
    assert kept == 4 * b * s * h + made.live_bytes(x, y, *block.parameters())
    assert kept == (4 * b * s * h * 9 + 4 * a * s * b if selective else 4 * b * s * h)
