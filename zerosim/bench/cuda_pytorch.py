"""PyTorch's side on a GPU: the GPT of `pytorch.py` trained in half precision, as it usually is there.

What is compared, exactly: all parameters and gradients in the half type; fp32 masters, gradients of the masters and
Adam's two moments; gradients are copied to fp32, torch.optim.Adam as it comes takes its step on the masters, and these
are copied back, each copy for all parameters at once (`_foreach_copy_`). fp16 scales its loss with a GradScaler, which
waits once a step for the overflow flag; bf16 waits for nothing. The loss is computed on half-precision logits, which is
faster than on fp32 copies of them. Attention is explicit ('eager': scores, mask, softmax, product) or PyTorch's own
scaled_dot_product_attention ('flash'). No norm of the gradients is computed; zerosim computes one at each step.

Source: Micikevicius et al., 1710.03740 (fp32 masters); Megatron-LM, Float16OptimizerWithFloat16Params (its order).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from zerosim.bench import pytorch
from zerosim.bench.cuda_turns import Timing
from zerosim.config import RunConfig


def why_not() -> str:
    """'' where PyTorch can use a GPU, else why it cannot."""
    if not pytorch.installed():
        return "PyTorch is not installed"
    torch = import_module("torch")
    if not torch.cuda.is_available():
        return f"PyTorch {pytorch.version()} sees no GPU"
    return ""


def release(device: str) -> None:
    """Give back what PyTorch holds on `device` and does not use."""
    if device == "cuda":
        import_module("torch").cuda.empty_cache()


class TorchTraining:
    """A contestant: one step of eager PyTorch on `device`. Device seconds are the host's where it is the CPU.

    weights: full weights by name, fp32; tokens: (rows, seq + 1), int64.
    """

    def __init__(
        self, config: RunConfig, weights: Mapping[str, Any], tokens: Any, attention: str, device: str = "cuda"
    ) -> None:
        torch = import_module("torch")
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}[config.precision.param_dtype]
        self._torch, self._device = torch, device
        self._model = pytorch.build(config, weights).to(device=device, dtype=half)
        if attention == "eager":
            for block in self._model.h:
                block.attn = _explicit(block.attn, config, device)
        self._tokens = torch.from_numpy(tokens).to(device)
        self._positions = torch.arange(config.model.seq, device=device)
        self._halves = list(self._model.parameters())
        self._masters = [half.detach().float().requires_grad_() for half in self._halves]
        for master in self._masters:
            master.grad = torch.empty_like(master)
        self._optimizer = torch.optim.Adam(
            self._masters, lr=config.optim.lr, betas=config.optim.betas, eps=config.optim.eps
        )
        scale = 2.0**config.precision.initial_scale_power
        self._scaler = (
            torch.amp.GradScaler(device, init_scale=scale) if config.precision.param_dtype == "fp16" else None
        )
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else []
        self._losses: list[Any] = []
        self.flops: Mapping[str, int] = {}

    @property
    def losses(self) -> list[float]:
        """Every step's, rounded to the half type in which it was computed. Waits for the device."""
        return [float(loss) for loss in self._losses]

    def step(self) -> Timing:
        started = time.perf_counter()
        if not self._events:
            self._train()
            return Timing(*[time.perf_counter() - started] * 2)
        first, last = self._events
        first.record()
        self._train()
        last.record()
        last.synchronize()
        device_s = float(first.elapsed_time(last)) / 1e3
        return Timing(device_s, time.perf_counter() - started)

    def release(self) -> None:
        release(self._device)

    def close(self) -> None:
        """Drop everything that takes memory, and give it back."""
        for held in (self._halves, self._masters, self._losses):
            held.clear()
        self._model = self._optimizer = self._tokens = self._positions = None
        self.release()

    def _train(self) -> None:
        """One step, nothing of it awaited but what GradScaler awaits."""
        torch, scaler = self._torch, self._scaler
        loss = self._loss()
        (loss if scaler is None else scaler.scale(loss)).backward()
        torch._foreach_copy_([master.grad for master in self._masters], [half.grad for half in self._halves])
        for half in self._halves:
            half.grad = None
        if scaler is None:
            self._optimizer.step()
        else:
            scaler.step(self._optimizer)
            scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(self._halves, self._masters)
        self._losses.append(loss.detach())

    def _loss(self) -> Any:
        """The mean loss: `pytorch.build`'s forward with its positions on the device."""
        functional = self._torch.nn.functional
        model, inputs, targets = self._model, self._tokens[:, :-1], self._tokens[:, 1:]
        x = model.wte(inputs) + model.wpe(self._positions)
        for block in model.h:
            x = block(x)
        logits = functional.linear(model.ln_f(x), model.wte.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _explicit(given: Any, config: RunConfig, device: str) -> Any:
    """Attention with the maps of `given` and its operations one by one."""
    torch = import_module("torch")
    Module: Any = torch.nn.Module
    width, heads = config.model.hidden, config.model.heads
    scale = (width // heads) ** -0.5
    future = torch.ones(config.model.seq, config.model.seq, dtype=torch.bool, device=device).triu(1)

    class Explicit(Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.c_attn, self.c_proj = given.c_attn, given.c_proj

        def forward(self, x: Any) -> Any:
            batch, tokens, _ = x.shape
            split = self.c_attn(x).split(width, dim=2)
            q, k, v = (part.view(batch, tokens, heads, width // heads).transpose(1, 2) for part in split)
            scores = (q @ k.transpose(-2, -1)) * scale
            y = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ v
            return self.c_proj(y.transpose(1, 2).reshape(batch, tokens, width))

    return Explicit()
