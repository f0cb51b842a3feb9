"""PyTorch's side: the same GPT in eager PyTorch, and a worker that trains it with FSDP2 over gloo.

The one file that needs torch, imported only when something here is called. The model is the one that a
PyTorch user would write: nn.Linear, scaled_dot_product_attention, torch.optim.Adam. Its weights are
zerosim's, by name, so that the first losses can be compared: what is raced computes the same thing.

Run as `python -m zerosim.bench.pytorch RANK WORLD FOLDER` it is one FSDP2 process of `fsdp.py`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zerosim.config import RunConfig

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
"""GPT-2 stores these (in, out); nn.Linear wants (out, in)."""


def installed() -> bool:
    return find_spec("torch") is not None


def version() -> str:
    return str(import_module("torch").__version__)


def build(config: RunConfig, weights: Mapping[str, Any]) -> Any:
    """The GPT of `config` with those weights (by name, GPT-2's layouts), as an nn.Module. Tied head, no dropout."""
    torch = import_module("torch")
    nn, functional = torch.nn, torch.nn.functional
    Module: Any = nn.Module
    width, heads = config.model.hidden, config.model.heads

    class Attention(Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, x: Any) -> Any:
            batch, tokens, _ = x.shape
            split = self.c_attn(x).split(width, dim=2)
            q, k, v = (part.view(batch, tokens, heads, width // heads).transpose(1, 2) for part in split)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(batch, tokens, width))

    class FeedForward(Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))

    class Block(Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attn, self.mlp = Attention(), FeedForward()

        def forward(self, x: Any) -> Any:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class GPT(Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(config.model.vocab, width), nn.Embedding(config.model.seq, width)
            self.h = nn.ModuleList(Block() for _ in range(config.model.layers))
            self.ln_f = nn.LayerNorm(width)

        def forward(self, tokens: Any) -> Any:
            """The mean loss of tokens (B, T + 1)."""
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            x = self.wte(inputs) + self.wpe(torch.arange(inputs.shape[1]))
            for block in self.h:
                x = block(x)
            logits = functional.linear(self.ln_f(x), self.wte.weight)
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    model = GPT()
    model.load_state_dict({name: torch.from_numpy(_laid_out(name, value)) for name, value in weights.items()})
    return model


def _laid_out(name: str, value: Any) -> Any:
    return value.T.copy() if name.endswith(TRANSPOSED) else value.copy()


def adam(config: RunConfig, model: Any) -> Any:
    optim = import_module("torch").optim
    return optim.Adam(model.parameters(), lr=config.optim.lr, betas=config.optim.betas, eps=config.optim.eps)


class TorchRun:
    """A contestant: one step of eager PyTorch on one thread."""

    def __init__(self, config: RunConfig, weights: Mapping[str, Any], tokens: Any) -> None:
        torch = import_module("torch")
        torch.set_num_threads(1)
        self._tokens = torch.from_numpy(tokens)
        self._model = build(config, weights)
        self._optimizer = adam(config, self._model)
        self.losses: list[float] = []

    def step(self) -> float:
        started = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._model(self._tokens)
        loss.backward()
        self._optimizer.step()
        self.losses.append(float(loss.detach()))
        return time.perf_counter() - started


def fsdp_worker(rank: int, world_size: int, folder: Path) -> list[float]:
    """Train what `folder` holds on this rank's rows, every block and the root wrapped by fully_shard; its losses."""
    torch = import_module("torch")
    dist = import_module("torch.distributed")
    fully_shard = import_module("torch.distributed.fsdp").fully_shard
    numpy = import_module("numpy")
    config = RunConfig.from_dict(json.loads((folder / "config.json").read_text("utf-8")))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        model = build(config, numpy.load(folder / "weights.npz"))
        for block in model.h:
            fully_shard(block)
        fully_shard(model)  # the tied table is used at both ends: it belongs to the root
        optimizer = adam(config, model)
        tokens = torch.from_numpy(numpy.load(folder / "tokens.npz")["tokens"])
        rows = tokens.shape[1] // world_size
        losses = []
        for batch in tokens[:, rank * rows : (rank + 1) * rows]:
            optimizer.zero_grad(set_to_none=True)
            loss = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses
    finally:
        dist.destroy_process_group()


def _die_with_parent() -> None:
    """No orphans: when whoever started this process is gone, however it went, so is this."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    _die_with_parent()
    this_rank, num_ranks, place = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    outcome = fsdp_worker(this_rank, num_ranks, place)
    (place / f"losses{this_rank}.json").write_text(json.dumps(outcome), "utf-8")
