"""Mixtures of experts: what a token uses of a model, and how plans assume that tokens choose."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.analysis.capabilities import tensor
from zerosim.analysis.capability import Capability, when
from zerosim.config import RunConfig


def _size(config: RunConfig) -> Iterator[str]:
    """Yield which parameters memory holds, and which compute uses."""
    model = config.model
    if model.has_experts:
        shared = f" and {model.shared_experts} shared" if model.shared_experts else ""
        yield (
            f"A token uses {model.top_k} of {model.experts:,} experts{shared} in a layer. Memory holds all of them. "
            "Flops, MFU and time count the active parameters."
        )


def _assumed(config: RunConfig) -> list[str]:
    return when(config.model.has_experts, f"routing {config.experts.routing or 'even'}")


def _first_step(config: RunConfig) -> list[str]:
    return when(
        config.model.has_experts,
        "An untrained router sends some experts more rows than others, so real first steps take longer.",
    )


def _warned(config: RunConfig) -> Iterator[str]:
    """Yield what frameworks refuse."""
    if not config.model.has_experts:
        return
    recipe = config.parallel.recipe
    if recipe.endswith("deepspeed") and config.states_stage == 3:
        yield "DeepSpeed's own MoE layers refuse ZeRO stage 3: --stage 2, or its AutoEP"
    if recipe == "megatron" and tensor.repeats_rows(config):
        yield "Megatron-LM trains experts with tensor parallelism only under --sequence-parallel"


CAPABILITY = Capability(
    notes={"size": _size, "assumed": _assumed, "first_step": _first_step, "warned": _warned},
)
