"""Experts beside their sizes (`model.py`): how tokens are routed, and what models with experts cannot do here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerosim.config.option import Part, option
from zerosim.config.parts.gathering import Gathering
from zerosim.config.parts.memory import MemoryConfig
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.tuning import TuningConfig
from zerosim.errors import InputError, wrong

KERNELS = ("grouped", "eager", "batched")
"""The implementations of transformers' experts: grouped_mm, eager and batched_mm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig(Part):
    """How a model's tokens get to its experts."""

    group = "experts"

    routing: str | None = option(
        None, "the experts of each token: even, round robin whatever the router says, as a plan assumes",
        choices=("even",), shown="a run's router chooses; a plan assumes even",
    )  # fmt: skip
    router_dtype: str | None = option(
        None, "the router's logits and weights: fp32 beside half types, or the model's dtype",
        choices=("fp32", "model"), shown="the family's",
        words="moe_router_dtype",
    )  # fmt: skip

    experts_kernel: str = option(
        "grouped", "how an expert's maps are computed and kept: one grouped product; eager, an expert at a time, whose "
        "gradient is a stack of zeros but for it; batched, with a copy of the weights for each token's expert",
        choices=KERNELS,
    )  # fmt: skip
    capacity_factor: float | None = option(
        None, "the most tokens of an expert, in those of an even choice; further ones are dropped", above=0,
        metavar="FACTOR", shown="none: no token is dropped", words="moe_expert_capacity_factor",
    )  # fmt: skip
    token_drop: str | None = option(
        None, "with --capacity-factor: later tokens are dropped (position), or those with the least weight (weight)",
        choices=("position", "weight"), shown="weight",
    )  # fmt: skip
    pad_to_capacity: bool = option(
        False, "with --capacity-factor: every expert computes as many rows, padded with zeros",
        switches={"moe_pad_expert_input_to_capacity": True},
    )  # fmt: skip
    aux_loss: float = option(
        0.0, "factor of the router's loss for balance, 1 if all experts are chosen alike", low=0, metavar="FACTOR",
        words="moe_aux_loss_coeff router_aux_loss_coef",
    )  # fmt: skip
    aux_loss_over: str | None = option(
        None, "with --aux-loss: the balance of a microbatch's tokens, or of each sequence",
        choices=("batch", "sequence"), shown="batch",
    )  # fmt: skip
    z_loss: float = option(
        0.0, "factor of the router's squared log-sum-exp", low=0, metavar="FACTOR", words="moe_z_loss_coeff"
    )
    bias_rate: float = option(
        0.0, "step of the router's biases after each step: up for experts with fewer tokens than the mean, down for "
        "others; they choose experts, and weigh none", low=0, metavar="RATE",
        words="moe_router_bias_update_rate load_balance_coeff",
    )  # fmt: skip

    @property
    def has_losses(self) -> bool:
        """Whether routers have losses of their own."""
        return bool(self.aux_loss or self.z_loss)

    @property
    def is_even(self) -> bool:
        """Whether runs route as plans assume."""
        return self.routing == "even"


DROPLESS = ExpertsConfig()
WORDS = (
    ("moe_router_load_balancing_type", "--aux-loss FACTOR, with --aux-loss-over sequence for seq_aux_loss"),
    ("moe_token_drop_policy", "--token-drop weight for probs, or position"),
    ("moe_router_enable_expert_bias", "--bias-rate RATE"),
    ("experts_implementation", "--experts-kernel grouped, batched or eager"),
)


def rules(
    experts: ExpertsConfig,
    model: ModelConfig,
    mesh: MeshConfig,
    gathering: Gathering,
    memory: MemoryConfig,
    tuning: TuningConfig,
) -> Iterator[InputError]:
    """Yield options without experts, and what experts do not go with."""
    if not model.has_experts:
        for name, one in ExpertsConfig.options().items():
            if (value := getattr(experts, name)) != one.default:
                yield wrong(name, f" {value!r}: {model.family} has no experts; pass --experts too, or leave it out")
        return
    if experts.capacity_factor is None:
        for name in ("token_drop", "pad_to_capacity"):
            if value := getattr(experts, name):
                yield wrong(name, f" {value!r}: no token is dropped without --capacity-factor; pass it too")
    if experts.aux_loss_over is not None and not experts.aux_loss:
        yield wrong("aux_loss_over", f" {experts.aux_loss_over!r}: there is no such loss; pass --aux-loss too")
    if experts.aux_loss_over == "sequence" and mesh.cp > 1:
        yield wrong("aux_loss_over", f" 'sequence': the {mesh.cp} ranks of cp share each sequence; choose batch")
    if mesh.tp > 1 and tuning.lora_rank and any(word == "experts" or "experts." in word for word in tuning.targets):
        yield wrong("lora_target", f" {tuning.lora_target!r}: adapters of experts are whole; choose tp 1")
    if tuning.lora_dropout and any(word == "experts" or "experts." in word for word in tuning.targets):
        yield wrong("lora_dropout", f" {tuning.lora_dropout}: adapters of experts are added to weights; choose 0")
    if gathering.tiles > 1:
        yield wrong("tiles", f" {gathering.tiles}: experts are gathered as one module; leave it out")
    if memory.mlp_tile:
        yield wrong("mlp_tile", f" {memory.mlp_tile}: experts need all tokens at once; leave it out")
    for name, width in (("expert_ffn", model.expert_ffn), ("shared experts' width", model.width("shared"))):
        if width % mesh.tp:
            yield wrong("tp", f" {mesh.tp} does not divide {name} {width}: choose a divisor")
