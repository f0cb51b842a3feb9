"""Context parallelism: how ranks that share the rows of a batch read each other's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from zerosim.config.option import Draft, Part, option
from zerosim.config.parts.memory import MemoryConfig
from zerosim.config.parts.mesh import MeshConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.errors import InputError, wrong
from zerosim.placement.context import WHOLE_ROWS, ContextCut

HOW = ("ring", "ulysses", "allgather", "ulysses+ring")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextConfig(Part):
    """How ranks that share the rows of a batch read each other's tokens."""

    group = "ranks and stage"

    context: str | None = option(
        None, "with --cp: keys and values go round (ring), ranks exchange tokens for heads (ulysses), all keys and "
        "values are gathered (allgather), or exchanged within a node and sent round across nodes (ulysses+ring)",
        choices=HOW, shown="ring", after="cp",
    )  # fmt: skip
    context_order: str | None = option(
        None, "with --cp: each rank has an early and a late part of every row, so that all read as many keys (zigzag), "
        "or one part (contiguous)", choices=("zigzag", "contiguous"), after="context",
        shown="zigzag; of ulysses contiguous",
    )  # fmt: skip

    @property
    def how(self) -> str:
        """The given way, or ring."""
        return self.context or "ring"

    @property
    def is_zigzag(self) -> bool:
        """Whether each rank has two parts of a row. Ulysses' ranks read whole rows: their order changes nothing."""
        return self.how != "ulysses" and self.context_order != "contiguous"


def cut_of(mesh: MeshConfig, context: ContextConfig) -> ContextCut:
    """Return the cut of a row's tokens over the ranks of cp."""
    if mesh.cp == 1:
        return WHOLE_ROWS
    within = {"ulysses": mesh.cp, "ulysses+ring": min(mesh.cp, max(1, mesh.ranks_per_node // mesh.tp))}
    inner = within.get(context.how, 1)
    return ContextCut(mesh.cp // inner, inner, context.is_zigzag)


def attended_columns(
    mesh: MeshConfig, context: ContextConfig, model: ModelConfig, memory: MemoryConfig
) -> tuple[Fraction, Fraction]:
    """Return the columns of queries, and those of keys and values with the copies that ranks need, for each of the
    model's width."""
    keys = model.heads if memory.repeat_kv else max(model.kv_heads, mesh.tp * cut_of(mesh, context).within)
    each = Fraction(model.head_dim, model.hidden)
    if model.is_latent:  # q and the result, and k and v, have heads of two widths
        wide, value = (Fraction(model.width(of), model.hidden) for of in ("heads", "values"))
        return (wide + value) / 2, wide + value
    return model.heads * each, 2 * keys * each


def alike(mesh: MeshConfig, context: ContextConfig, model: ModelConfig) -> bool:
    """Return whether ranks that share rows do equal work: not in one part of a row each, nor with a window, where later
    tokens read more keys than the first ones."""
    cut, layers = cut_of(mesh, context), range(model.layers if model.has_blocks else 0)
    differ = chunk_of(model) or any(model.kind(number).window for number in layers)
    return cut.around == 1 or (cut.zigzag and not differ)


def chunk_of(model: ModelConfig) -> int:
    """Return the tokens of the chunks that some blocks' attention stays within; 0 if a row is one."""
    chunk = model.numbers.chunk
    return chunk if chunk < model.seq else 0


def model_rules(mesh: MeshConfig, context: ContextConfig, model: ModelConfig) -> Iterator[InputError]:
    """Yield options without a context, and models without causal attention; before what a context chooses is judged."""
    for name in ("context", "context_order") if mesh.cp == 1 else ():
        if (value := getattr(context, name)) is not None:
            yield wrong(name, f" {value!r}: has no effect without cp; pass --cp 2 or more, or leave it out")
    if mesh.cp > 1 and (not model.has_blocks or model.is_masked or model.is_second):
        yield wrong("cp", f" {mesh.cp}: model {model.family} has no causal attention over one row; choose gpt or llama")


def rules(
    mesh: MeshConfig,
    context: ContextConfig,
    model: ModelConfig,
    parallel: ParallelConfig,
    memory: MemoryConfig,
) -> Iterator[InputError]:
    """Yield what a context cannot divide."""
    cp, how = mesh.cp, context.how
    if cp == 1:
        return
    if how == "ulysses" and context.context_order == "zigzag":
        yield wrong("context_order", " 'zigzag': ulysses gives every rank all tokens of its heads; leave it out")
    if how == "ulysses+ring":
        node = mesh.ranks_per_node // mesh.tp
        if node < 2:
            least = mesh.tp * next(size for size in range(2, cp + 1) if cp % size == 0)
            why = f"needs nodes of several ranks of cp; pass --ranks-per-node {least}, for one"
            yield wrong("context", f" 'ulysses+ring': {why}")
            return
        if node < cp and cp % node:
            yield wrong("cp", f" {cp}: the {node} ranks of a node do not divide it; choose cp {node * (cp // node)}")
            return
    cut = cut_of(mesh, context)
    multiple = cut.multiple * (mesh.tp if parallel.sequence_parallel else 1)
    if model.seq % multiple:
        what = "2 cp" if cut.zigzag and cut.within == 1 else "cp"
        what += " x tp" if parallel.sequence_parallel else ""
        near = max(1, round(model.seq / multiple)) * multiple
        yield wrong("cp", f" {cp}: {what} ({multiple}) does not divide seq {model.seq}; choose seq {near}, for one")
    heads, kv_heads = model.heads // mesh.tp, max(1, model.kv_heads // mesh.tp)
    if cut.within > 1 and (heads % cut.within or (kv_heads % cut.within and cut.within % kv_heads)):
        of, right = f"{heads} heads and {kv_heads} of keys and values", _right_cp(cut.within, heads, kv_heads)
        choice = f"cp {right}, or ring" if right > 1 else "ring"
        yield wrong("context", f" {how!r}: {cut.within} ranks do not divide a rank's {of}; choose {choice}")
    if cut.within > 1 and model.decoder.block.sinks:
        yield wrong("context", f" {how!r}: sinks of heads that move between ranks are not modelled; choose ring")
    if cut.around > 1 and memory.attention != "flash":
        why = f"context {how} merges results as flash does"
        flash = "flash without fp32_softmax" if memory.fp32_softmax else "flash"
        yield wrong("attention", f" {memory.attention!r}: {why}; choose {flash}, or context ulysses", beside="context")


def _right_cp(most: int, heads: int, kv_heads: int) -> int:
    """Return the largest divisor of `most` ranks that divides the heads."""
    sizes = (size for size in range(most, 0, -1) if most % size == 0)
    return next(size for size in sizes if heads % size == 0 and max(size, kv_heads) % min(size, kv_heads) == 0)


def settles(draft: Draft) -> Mapping[str, str]:
    """Choose flash attention where results are merged, unless another one is given."""
    values, given = draft.values, draft.given
    merges = values.get("cp", 1) > 1 and values.get("context") != "ulysses"
    if not merges or "attention" in given or given.get("fp32_softmax"):
        return {}
    values["attention"] = "flash"
    return draft.without("fp32_softmax", "and flash attention saves no softmax")


WORDS = (
    ("*sequence_parallel_size sp_size *_sp_size sp_ulysses_degree ulysses_degree", "--cp C --context ulysses"),
    ("ring_attention* ring_attn* ring_degree sp_ring_degree", "--cp C --context ring"),
    ("cp_comm_type", "--context ring for p2p, ulysses for a2a, ulysses+ring for a2a+p2p, or allgather"),
    ("*context_parallel_rotate_method", "--context allgather, or ring for alltoall"),
    ("*context_parallel_load_balancer", "--context-order zigzag for headtail, or contiguous"),
)
