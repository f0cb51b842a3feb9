"""Experts beside their sizes (`model.py`): how tokens are routed, and what models with experts cannot do here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor

from zerosim.config.inputs import read_json
from zerosim.config.option import OF_RECIPE, Part, option
from zerosim.config.parts.data import DataConfig
from zerosim.config.parts.gathering import Gathering
from zerosim.config.parts.memory import MemoryConfig
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.config.parts.reduction import Reduction
from zerosim.config.parts.tuning import TuningConfig, adapts_bare
from zerosim.errors import InputError, wrong
from zerosim.placement.block import Experts
from zerosim.placement.mesh import CUTS, SHARES
from zerosim.placement.spread import EVEN, Capacity, Spread, fullest, zipf


def read_routing(text: str) -> str:
    """Return how tokens spread over experts. Raises: InputError for another word, or a file that does not say it."""
    how, _, value = text.partition(":")
    if how == "measured" and value:
        _measured.cache_clear()  # the file may have changed
        _measured(value)
    elif text != "even" and not _is_in(value, *{"zipf": (0, 10), "fullest": (1, 1e6)}.get(how, (1, 0))):
        words = "even, zipf:S with a number S of 0 to 10, fullest:F with a number F of 1 or more, or measured:FILE"
        raise InputError(f"{text!r}: expected {words}")
    return text


def _is_in(text: str, low: float, high: float) -> bool:
    try:
        return low <= float(text) <= high
    except ValueError:
        return False


@lru_cache(maxsize=8)
def _measured(path: str) -> tuple[tuple[float, ...], ...]:
    """Return the experts' shares that a file has, for each block, or for all. Raises: InputError."""
    found = read_json(path)
    rows = found if isinstance(found, list) and found and isinstance(found[0], list) else [found]
    for row in rows:
        if not isinstance(row, list) or not row or not all(_is_share(share) for share in row) or not sum(row):
            raise InputError(f"'measured:{path}': expected a list of each expert's share, or one for each block")
    if len({len(row) for row in rows}) > 1:
        raise InputError(f"'measured:{path}': expected as many shares for each block as for the first, {len(rows[0])}")
    return tuple(tuple(map(float, row)) for row in rows)


def _is_share(share: object) -> bool:
    return isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share <= 1e100


KERNELS = ("grouped", "eager", "batched")
"""The implementations of transformers' experts: grouped_mm, eager and batched_mm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig(Part):
    """How a model's tokens get to its experts."""

    group = "experts"

    routing: str | None = option(
        None, "how tokens spread over experts: even, zipf:S (the r-th of them has 1/r^S), fullest:F (one has F times "
        "the mean), or measured:FILE, a JSON list of each expert's share, or one for each block. A run's router is "
        "overruled", metavar="HOW",
        shown="a run's router chooses; a plan assumes even", parse=read_routing,
    )  # fmt: skip
    dispatcher: str = option(
        "alltoall", "with --ep: tokens go to their experts' ranks and back (alltoall), or every rank gathers all "
        "tokens of the group (allgather). With deepep (and for the clock alone) a token is sent once to each node",
        choices=("alltoall", "deepep", "allgather"), words="moe_token_dispatcher_type",
    )  # fmt: skip
    shared_expert_overlap: bool = option(
        False, "with --ep: shared experts run while rows are on their way, their first map on the way there and their "
        "last on the way back (Megatron)", switches={"moe_shared_expert_overlap": True},
    )  # fmt: skip
    router_dtype: str | None = option(
        None, "the router's logits and weights: fp32 beside half types, or the model's dtype",
        choices=("fp32", "model"), shown="the family's",
        words="moe_router_dtype",
    )  # fmt: skip
    weigh_between: bool = option(
        False, "experts' weights multiply what is between an expert's maps, not its results, so they travel with the "
        "rows (Megatron)", follows=OF_RECIPE,
    )  # fmt: skip
    weigh_dtype: str | None = option(
        None, "experts' results are cast to fp32 to be weighed, and backward reads the copy (torchtitan, prime-rl)",
        choices=("fp32",), shown="their own",
    )  # fmt: skip
    experts_kernel: str = option(
        "grouped", "how an expert's maps are computed and kept: one grouped product; eager, an expert at a time, whose "
        "gradient is a stack of zeros but for it; batched, with a copy of the weights for each token's expert",
        choices=KERNELS,
    )  # fmt: skip
    keep_router: bool = option(
        False, "with --recompute full: routers' logits and choices are kept, so no token changes its expert in backward"
        " (NeMo Automodel)", switches={"ignore_router_for_ac": True},
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
    def capacity(self) -> Capacity | None:
        """The most rows of an expert; None: no token is dropped."""
        factor = self.capacity_factor
        return None if factor is None else Capacity(factor, self.token_drop != "position", self.pad_to_capacity)

    def rows_of(self, model: ModelConfig, number: int, tokens: int) -> tuple[int, ...]:
        """Return how many of so many tokens choose each expert of block `number`, as they are assumed to spread."""
        return (self.spread_of(model.experts, number) or EVEN).counts(tokens, model.top_k, model.experts)

    def widens(self, row: Experts) -> bool:
        """Return whether a router's logits and weights are fp32 beside half types: its family's may be."""
        return self.router_dtype == "fp32" or (row.is_wide and self.router_dtype is None)

    def applied(self, row: Experts) -> str:
        """Return where weights multiply: the row's place or, moved, between an expert's maps. A bias would be weighed
        too."""
        return "between" if self.weigh_between and row.applied == "results" and not row.bias else row.applied

    def sent_of(self, model: ModelConfig, number: int, tokens: int) -> int:
        """Return the rows of these tokens that experts work on: without those beyond their capacity, or padded."""
        rows, capacity = self.rows_of(model, number, tokens), self.capacity
        return sum(rows) if capacity is None else sum(capacity.kept(rows))

    def choice_of(self, model: ModelConfig) -> tuple[int, int, Fraction]:
        """Return a token's choice: among how many experts, of how many, and the share of their groups that it has."""
        return model.experts, model.top_k, Fraction(model.numbers.chosen_groups, model.numbers.expert_groups)

    def spread_of(self, experts: int, number: int) -> Spread | None:
        """Return how the tokens of block `number` are assumed to spread over so many experts; None: as its router
        chooses."""
        how, _, value = (self.routing or "").partition(":")
        if how in ("zipf", "fullest"):
            return {"zipf": zipf, "fullest": fullest}[how](experts, float(value))
        if how == "measured":
            found = _measured(value)
            return Spread(found[number % len(found)])
        return EVEN if how else None


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
    data: DataConfig,
) -> Iterator[InputError]:
    """Yield options without experts, and what experts do not go with."""
    adapted = model.has_experts and adapts_bare(tuning, model.decoder.block)
    if tuning.lora_by_rows and not adapted:
        yield wrong("lora_by_rows", ": no expert has an adapter; choose --lora-target experts, or leave it out")
    if not model.has_experts:
        for name, one in ExpertsConfig.options().items():
            if (value := getattr(experts, name)) != one.default and not one.follows:
                yield wrong(name, f" {value!r}: {model.family} has no experts; pass --experts too, or leave it out")
        return
    if experts.dispatcher != "alltoall" and not mesh.axes.is_folded:
        yield wrong("dispatcher", f" {experts.dispatcher!r}: all experts are on every rank; pass --ep 2, for one")
    if experts.shared_expert_overlap:
        can = "; pass --shared-experts 1, or" if model.decoder.block.mlp.dense else ";"
        why = "" if model.has_shared_experts else f"{model.family} has no shared experts{can}"
        why = why or ("all experts are on every rank; pass --ep 2, or" if mesh.ep == 1 else "")
        sends = experts.dispatcher
        why = why or (
            f"dispatcher {sends} runs nothing beside itself; choose alltoall, or" if sends != "alltoall" else ""
        )
        if why:
            yield wrong("shared_expert_overlap", f": {why} leave it out")
    how = experts.spread_of(model.experts, 0)
    if how is not None and len(how.shares) not in (0, model.experts):
        yield wrong("routing", f" {experts.routing!r}: has {len(how.shares)} shares for {model.experts} experts")
    word, _, times = (experts.routing or "").partition(":")
    if word == "fullest" and float(times) > (most := model.all_on_one):
        why = f"an expert that all tokens choose has {most:.4g} times the mean; choose {floor(100 * most) / 100:g}"
        yield wrong("routing", f" {experts.routing!r}: {why} or less")
    if experts.keep_router and not memory.again.is_whole:
        why = f"recompute {memory.recompute!r} recomputes no whole blocks; pass --recompute full too, or leave it out"
        yield wrong("keep_router", f": {why}")
    if experts.weigh_dtype and (row := model.decoder.block.mlp.experts) and experts.applied(row) != "results":
        yield wrong("weigh_dtype", " 'fp32': weights do not multiply experts' results here; leave it out")
    if experts.capacity_factor is None:
        for name in ("token_drop", "pad_to_capacity"):
            if value := getattr(experts, name):
                yield wrong(name, f" {value!r}: no token is dropped without --capacity-factor; pass it too")
    elif experts.dispatcher == "allgather":
        why = "tokens are dropped before they are sent; choose dispatcher alltoall"
        yield wrong("capacity_factor", f" {experts.capacity_factor}: {why}")
    else:
        rows = max(1, own_tokens(mesh, model, data)) * model.top_k / model.experts
        if experts.capacity_factor * rows < 1:
            why = f"no room for one token; an even choice gives an expert {rows:g}; choose {ceil(100 / rows) / 100}"
            yield wrong("capacity_factor", f" {experts.capacity_factor}: {why} or more")
    if experts.aux_loss_over is not None and not experts.aux_loss:
        yield wrong("aux_loss_over", f" {experts.aux_loss_over!r}: there is no such loss; pass --aux-loss too")
    if experts.aux_loss_over == "sequence" and mesh.cp > 1:
        yield wrong("aux_loss_over", f" 'sequence': the {mesh.cp} ranks of cp share each sequence; choose batch")
    cut_by = next((name for name in ("tp", "etp") if mesh.axes.size(name) > 1), "")
    if adapted and cut_by:
        yield wrong(
            "lora_target",
            f" {tuning.lora_target!r}: adapters of experts are whole; choose {cut_by} 1, or lora_target q,k,v,o",
        )
    if tuning.lora_dropout and adapted:
        yield wrong(
            "lora_dropout",
            f" {tuning.lora_dropout}: adapters of experts are added to weights; choose 0, or lora_target q,k,v,o",
        )
    if gathering.tiles > 1:
        yield wrong("tiles", f" {gathering.tiles}: experts are gathered as one module; leave it out")
    if memory.mlp_tile:
        yield wrong("mlp_tile", f" {memory.mlp_tile}: experts need all tokens at once; leave it out")
    cut = [] if mesh.axes.is_folded else [("expert_ffn", model.expert_ffn)]
    for name, width in (*cut, ("shared experts' width", model.width("shared"))):
        if width % mesh.tp:
            yield wrong("tp", f" {mesh.tp} does not divide {name} {width}: choose a divisor")


def cut_rules(
    mesh: MeshConfig, model: ModelConfig, parallel: ParallelConfig, gathering: Gathering, reduction: Reduction
) -> Iterator[InputError]:
    """Yield what does not go with experts that are cut otherwise than other weights."""
    if not mesh.axes.is_folded and mesh.etp is None:
        return
    name = "ep" if mesh.ep > 1 else "etp"
    sizes = f" {getattr(mesh, name)}"
    if not model.experts:
        yield wrong(name, f"{sizes}: model {model.name} has no experts; pass --experts 8 --top-k 2, or leave it out")
        return
    for size, what, field in ((model.experts, "experts", "ep"), (model.expert_ffn, "expert_ffn", "etp")):
        if size % mesh.axes.size(field):
            right = next(at for at in range(mesh.axes.size(field), 0, -1) if size % at == 0)
            yield wrong(field, f" {mesh.axes.size(field)} does not divide {what} {size}: choose {field} {right}")
    if mesh.tp > 1 and not parallel.sequence_parallel:
        why = "with tp, tokens are dealt to experts by rank; pass --sequence-parallel too"
        yield wrong(name, f"{sizes}: {why}")
    for is_on, field in (
        (bool(mesh.secondary_shard), "secondary_shard"),
        (gathering.hierarchical_gather, "hierarchical_gather"),
        (reduction.quantized_gradients, "quantized_gradients"),
        (gathering.quantized_weights, "quantized_weights"),
        (reduction.is_encoded, "compress"),
    ):
        if is_on:
            yield wrong(name, f"{sizes}: experts' states are cut over other ranks; leave {field} out")


def own_tokens(mesh: MeshConfig, model: ModelConfig, data: DataConfig) -> int:
    """Return the tokens of a microbatch that a rank, or with whole rows tp's ranks together, sends to experts."""
    divided = mesh.axes.size(*SHARES, *(CUTS if mesh.axes.is_folded else ()))
    return data.micro_batch * model.row_tokens // divided


def rows_by_rank(
    mesh: MeshConfig, model: ModelConfig, experts: ExpertsConfig, data: DataConfig
) -> list[tuple[int, ...]]:
    """Return how many of a rank's rows each rank along ep gets, in each block with experts, as tokens are assumed to
    spread; nothing without ep."""
    if mesh.ep == 1:
        return []
    tokens = own_tokens(mesh, model, data)
    local, found = model.experts // mesh.ep, list[tuple[int, ...]]()
    for number in filter(lambda number: model.kind(number).has_experts, range(model.layers)):
        counts = experts.rows_of(model, number, tokens)
        counts = counts if experts.capacity is None else experts.capacity.kept(counts)
        found.append(tuple(sum(counts[first : first + local]) for first in range(0, model.experts, local)))
    return found
