"""Activations that forward keeps for backward: the two published estimates.

The accounting of "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198, section 4) and the ZeRO paper's estimate (arXiv 1910.02054, sections 3.2 and 6.1). Neither
is what zerosim's own model keeps: that is counted.

s tokens per row, b rows of a micro-batch, h width, a heads, L blocks, t tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

NOT_KEPT: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "core_attn": (0, 0),  # and the scores
        "attn_proj": (2, 0),  # the second norm's input
        "layernorm": (4, 0),  # the inputs of the maps behind both norms
        "mlp": (0, 16),  # the input and the output of its activation
        "mlp_act": (0, 8),  # the output alone
        "dropout": (2, 0),  # both masks
        "op": (8, 8),  # all of these but the activation's input, and the scores
    }
)
"""What a block does not keep of each part that runs again, in sbh bytes: of the 10 that tensor parallelism leaves
whole, and of the 24 that it divides, where ffn = 4h."""

WHY_ESTIMATES_DIFFER = (
    "The ZeRO paper gives 12 elements per token, width and block in one sentence, without naming them, and nothing "
    "that grows with the square of the sequence. 2205.05198 counts tensor by tensor: 34 bytes (2-byte tensors and "
    "1-byte dropout masks) and 5 bytes for every attention score, a*s*s*b of them, which a fused attention kernel "
    "never stores. Without the scores it is 34 bytes against 24; with them it depends on the number of heads."
)


def block_parts(seq: int, micro_batch: int, hidden: int, heads: int, ffn: int | None = None) -> dict[str, int]:
    """Bytes that one block keeps, by part: attention 11sbh + 5as²b, mlp 19sbh, layernorms 4sbh (2205.05198, 4.1).

    The MLP keeps its input (2sbh), the input and the output of its activation (2 bytes * ffn each per
    token) and a dropout mask (1sbh): 3sbh + 4sb*ffn, 19sbh where ffn = 4h (the default).
    """
    tokens = seq * micro_batch
    return {
        "attention": 11 * tokens * hidden + 5 * heads * seq * tokens,
        "mlp": 3 * tokens * hidden + 4 * tokens * (4 * hidden if ffn is None else ffn),
        "layernorms": 4 * tokens * hidden,
    }


def block_activations(
    seq: int,
    micro_batch: int,
    hidden: int,
    heads: int,
    *,
    ffn: int | None = None,
    recompute: str = "none",
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    keep_gathered: bool = False,
    partitioned: bool = False,
    on_host: bool = False,
) -> Fraction:
    """Bytes that one block keeps on one rank (2205.05198, Table 2).

    Tensor parallelism leaves 10sbh whole on every rank: the inputs of attention and MLP (4sbh), their
    dropout masks (2sbh) and the norms' inputs (4sbh). Sequence parallelism divides those too; where inputs are
    kept as they were gathered, 4sbh of them stay whole.

    With full recompute t ranks may keep the input `partitioned`, or nothing of it where it waits `on_host` (the ZeRO
    paper's Pa and Pa+cpu, 1910.02054, section 6.1).
    `selective` computes the attention scores again (5as²b), `selective:PART,...` what is named (`NOT_KEPT`), `full` the
    whole block from its input (2sbh; that sequence parallelism divides it follows from the rest).
    """
    t = tensor_parallel
    tokens = seq * micro_batch
    if recompute == "full":
        return Fraction(0 if on_host else 2 * tokens * hidden, t if sequence_parallel or partitioned else 1)
    less_whole, less_divided = _not_kept(recompute)
    scores = 5 * heads * seq * tokens
    divided = sum(block_parts(seq, micro_batch, hidden, heads, ffn).values()) - 10 * tokens * hidden - scores
    divided -= less_divided * tokens * (4 * hidden if ffn is None else ffn) // 4
    whole = (10 - less_whole) * tokens * hidden
    kept_scores = Fraction(scores, t) if keeps_scores(recompute) else 0
    gathered = 4 * tokens * hidden if sequence_parallel and keep_gathered else 0
    shared = gathered + Fraction(whole - gathered, t if sequence_parallel else 1)
    return shared + Fraction(divided, t) + kept_scores


def parts_again(recompute: str) -> list[str]:
    """The parts that `selective` or `selective:PART,...` names."""
    form, _, given = recompute.partition(":")
    return (given or "core_attn").split(",") if form == "selective" else []


def keeps_scores(recompute: str) -> bool:
    """Whether a block keeps its attention scores, where eager attention has made some."""
    return recompute != "full" and not {"core_attn", "op"} & set(parts_again(recompute))


def _not_kept(recompute: str) -> tuple[int, int]:
    """In sbh bytes, as in `NOT_KEPT`."""
    pairs = [NOT_KEPT[part] for part in parts_again(recompute)]
    return sum(whole for whole, _ in pairs), sum(divided for _, divided in pairs)


def block_text(
    recompute: str = "none",
    *,
    tensor_parallel: bool = False,
    sequence_parallel: bool = False,
    keep_gathered: bool = False,
    partitioned: bool = False,
    on_host: bool = False,
) -> str:
    """One block's formula with ffn = 4h, on one rank or on each of t."""
    if recompute == "full":
        return "0" if on_host else "2sbh/t" if sequence_parallel or partitioned else "2sbh"
    scores = "" if not keeps_scores(recompute) else " + 5as²b/t" if tensor_parallel else " + 5as²b"
    less_whole, less_divided = _not_kept(recompute)
    whole, divided = 10 - less_whole, 24 - less_divided
    if not tensor_parallel:
        return f"{whole + divided}sbh{scores}"
    if not sequence_parallel:
        return f"{whole}sbh + {divided}sbh/t{scores}"
    if keep_gathered:
        return f"4sbh + {whole - 4 + divided}sbh/t{scores}"
    return f"{whole + divided}sbh/t{scores}"


def zero_paper_elements(seq: int, micro_batch: int, hidden: int, layers: int) -> int:
    """12 * h * b * s * L ELEMENTS, twice as many bytes in fp16 (ZeRO paper, section 3.2).

    GPT-2 of 1.5B parameters at b = 32, s = 1024: 30.2e9 elements, 60.4 GB, the paper's "about 60 GB".
    """
    return 12 * hidden * micro_batch * seq * layers


def checkpoint_elements(seq: int, micro_batch: int, hidden: int, layers: int) -> int:
    """One input per block, h * b * s * L elements: all that is kept when every block is recomputed.

    The ZeRO paper's 100B example (section 6.1: 33 GB, 2 GB with Pa over 16 ranks) counts 1 byte for each of
    them; section 3.2 of the same paper says about 60 GB, which is 2.
    """
    return hidden * micro_batch * seq * layers
