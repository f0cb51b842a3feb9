"""PyTorch's side: the same GPT in eager PyTorch, and a worker that trains it with FSDP2 over gloo.

The only file that needs torch, which is imported only when a function here is called. The model is as a
PyTorch user would write it: nn.Linear, scaled_dot_product_attention ('flash') or scores, mask, softmax and product
('eager'), torch.optim.Adam with its defaults. Its weights are zerosim's, by name, so that the first losses can be
compared: both train the same model.

Half precision is as usual in PyTorch: all parameters and gradients in the half type, and fp32 masters with their
gradients and Adam's two moments. Gradients are copied to fp32, Adam steps the masters, and the masters are
copied back, each copy for all parameters at once (`_foreach_copy_`). fp16 scales its loss with a GradScaler, which
waits once a step for the overflow flag. bf16 never waits. The loss is computed on half-precision logits, which is
faster than on fp32 copies of them. No norm of the gradients is computed; zerosim computes one at each step.

Run as `python -m zerosim.bench.pytorch RANK WORLD FOLDER` it is one FSDP2 process of `processes.py`.

Source: Micikevicius et al., 1710.03740 (fp32 masters); Megatron-LM, Float16OptimizerWithFloat16Params (its order).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zerosim.bench.contest import Contestant, Timer, Timing, timed
from zerosim.config import RunConfig
from zerosim.placement.families import GPT

TRANSPOSED = tuple(f"{one.weight}.weight" for _, one in GPT.block.targets() if one.map.layout == "in_out")
"""GPT-2 stores these (in, out); nn.Linear wants (out, in)."""


def version() -> str | None:
    """Return PyTorch's version, None if it is not installed."""
    return None if find_spec("torch") is None else metadata.version("torch")


def unusable(device: str) -> str:
    """Return '' if PyTorch can use `device`, else the reason why not."""
    if version() is None:
        return "PyTorch is not installed"
    if device == "cuda" and not import_module("torch").cuda.is_available():
        return f"PyTorch {version()} sees no GPU"
    return ""


def build(config: RunConfig, weights: Mapping[str, Any], attention: str = "flash") -> Any:
    """Build the GPT of `config` with those weights (by name, GPT-2's layouts) as an nn.Module. Tied head, no
    dropout."""
    torch = import_module("torch")
    nn, functional = torch.nn, torch.nn.functional
    Module: Any = nn.Module
    width, heads, seq = config.model.hidden, config.model.heads, config.model.seq

    class Attention(Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            if attention == "eager":
                future = torch.ones(seq, seq, dtype=torch.bool).triu(1)
                self.register_buffer("future", future, persistent=False)

        def forward(self, x: Any) -> Any:
            batch, tokens, _ = x.shape
            split = self.c_attn(x).split(width, dim=2)
            q, k, v = (part.view(batch, tokens, heads, width // heads).transpose(1, 2) for part in split)
            if attention == "eager":
                scores = (q @ k.transpose(-2, -1)) * (width // heads) ** -0.5
                y = torch.softmax(scores.masked_fill(self.future, float("-inf")), dim=-1) @ v
            else:
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
            self.wte, self.wpe = nn.Embedding(config.model.vocab, width), nn.Embedding(seq, width)
            self.h = nn.ModuleList(Block() for _ in range(config.model.layers))
            self.ln_f = nn.LayerNorm(width)
            self.register_buffer("positions", torch.arange(seq), persistent=False)

        def forward(self, tokens: Any) -> Any:
            """Return the mean loss of tokens (B, T + 1)."""
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            x = self.wte(inputs) + self.wpe(self.positions)
            for block in self.h:
                x = block(x)
            logits = functional.linear(self.ln_f(x), self.wte.weight)
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def laid_out(name: str, value: Any) -> Any:
        return torch.from_numpy(value.T.copy() if name.endswith(TRANSPOSED) else value.copy())

    model = GPT()
    model.load_state_dict({name: laid_out(name, value) for name, value in weights.items()})
    return model


def adam(config: RunConfig, parameters: Any) -> Any:
    return import_module("torch").optim.Adam(
        parameters, lr=config.optim.lr, betas=config.optim.betas, eps=config.optim.eps
    )


class EventTimer:
    """The time between two events in PyTorch's stream."""

    def __init__(self) -> None:
        event = import_module("torch").cuda.Event
        self._first, self._last = event(enable_timing=True), event(enable_timing=True)

    def start(self) -> None:
        self._first.record()

    def stop(self) -> float:
        self._last.record()
        self._last.synchronize()
        return float(self._first.elapsed_time(self._last)) / 1e3


class TorchTraining(Contestant):
    """A contestant: one step of eager PyTorch, on one thread if `device` is the CPU. Lives until `close`.

    weights: full weights by name, fp32; tokens: (rows, seq + 1), int64.
    """

    def __init__(
        self, config: RunConfig, weights: Mapping[str, Any], tokens: Any, attention: str = "flash", device: str = "cpu"
    ) -> None:
        torch = import_module("torch")
        if device == "cpu":
            torch.set_num_threads(1)
        self._torch, self._device = torch, device
        stored = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision.param_dtype]
        self._model = build(config, weights, attention).to(device=device, dtype=stored)
        self._tokens = torch.from_numpy(tokens).to(device)
        self._params = self._masters = list(self._model.parameters())
        self._is_half = config.precision.param_dtype != "fp32"
        if self._is_half:
            self._masters = [half.detach().float().requires_grad_() for half in self._params]
            for master in self._masters:
                master.grad = torch.empty_like(master)
        self._optimizer = adam(config, self._masters)
        scale = 2.0**config.precision.initial_scale_power
        self._scaler = (
            torch.amp.GradScaler(device, init_scale=scale) if config.precision.param_dtype == "fp16" else None
        )
        self._timer: Timer | None = EventTimer() if device == "cuda" else None
        self._losses: list[Any] = []

    @property
    def losses(self) -> list[float]:
        """The losses of all steps, rounded to their compute dtype. Waits for the device."""
        return [float(loss) for loss in self._losses]

    def step(self) -> Timing:
        return timed(self._train, self._timer)

    def release(self) -> None:
        release(self._device)

    def close(self) -> None:
        """Free all memory of the run."""
        self._params, self._masters, self._losses = [], [], []
        self._model = self._optimizer = self._tokens = None
        self.release()

    def _train(self) -> None:
        """Take one step without waiting, except where GradScaler waits."""
        torch, scaler = self._torch, self._scaler
        self._model.zero_grad(set_to_none=True)
        loss = self._model(self._tokens)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if self._is_half:
            torch._foreach_copy_([master.grad for master in self._masters], [half.grad for half in self._params])
            self._model.zero_grad(set_to_none=True)
        if scaler is None:
            self._optimizer.step()
        else:
            scaler.step(self._optimizer)
            scaler.update()
        if self._is_half:
            with torch.no_grad():
                torch._foreach_copy_(self._params, self._masters)
        self._losses.append(loss.detach())


def release(device: str) -> None:
    """Free PyTorch's unused memory on `device`."""
    if device == "cuda":
        import_module("torch").cuda.empty_cache()


def fsdp_worker(rank: int, world_size: int, folder: Path) -> list[float]:
    """Train the model in `folder` on this rank's rows, with every block and the root wrapped by fully_shard. Return the
    losses."""
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
        fully_shard(model)  # both ends use the tied table, so it belongs to the root
        optimizer = adam(config, model.parameters())
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
    """End this process when its parent ends, for any reason."""
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
