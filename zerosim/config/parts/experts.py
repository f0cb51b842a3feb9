"""Experts beside their sizes (`model.py`): how tokens are routed, and what models with experts cannot do here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerosim.config.option import OF_RECIPE, Part, option
from zerosim.config.parts.gathering import Gathering
from zerosim.config.parts.memory import MemoryConfig
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.errors import InputError, wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig(Part):
    """How a model's tokens get to its experts."""

    group = "experts"

    routing: str | None = option(
        None, "the experts of each token: even, round robin whatever the router says, as a plan assumes",
        choices=("even",), shown="a run's router chooses; a plan assumes even",
    )  # fmt: skip
    router_dtype: str | None = option(
        None, "dtype of the router's logits and weights", choices=("fp32", "model"), shown="the model's",
        words="moe_router_dtype",
    )  # fmt: skip
    weigh_between: bool = option(
        False, "experts' weights multiply what is between an expert's maps, not its results, so they travel with the "
        "rows (Megatron)", follows=OF_RECIPE,
    )  # fmt: skip

    @property
    def is_even(self) -> bool:
        """Whether runs route as plans assume."""
        return self.routing == "even"


DROPLESS = ExpertsConfig()


def rules(
    experts: ExpertsConfig, model: ModelConfig, mesh: MeshConfig, gathering: Gathering, memory: MemoryConfig
) -> Iterator[InputError]:
    """Yield options without experts, and what experts do not go with."""
    if not model.has_experts:
        for name in ("routing", "router_dtype"):
            if (value := getattr(experts, name)) is not None:
                yield wrong(
                    name, f" {value!r}: model {model.family} has no experts; pass --experts too, or leave it out"
                )
        return
    if gathering.tiles > 1:
        yield wrong("tiles", f" {gathering.tiles}: experts are gathered as one module; leave it out")
    if memory.mlp_tile:
        yield wrong("mlp_tile", f" {memory.mlp_tile}: experts need all tokens at once; leave it out")
    for name, width in (("expert_ffn", model.expert_ffn), ("shared experts' width", model.width("shared"))):
        if width % mesh.tp:
            yield wrong("tp", f" {mesh.tp} does not divide {name} {width}: choose a divisor")
