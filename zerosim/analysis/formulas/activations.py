"""Activations that forward keeps for backward: the two published estimates.

The accounting of "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198, section 4) and the ZeRO paper's estimate (arXiv 1910.02054, sections 3.2 and 6.1). Neither
is what zerosim's own model keeps: that is counted.

s tokens per row, b rows of a micro-batch, h width, a heads, L blocks, t tensor-parallel ranks.
"""

from __future__ import annotations

from fractions import Fraction

RECOMPUTE = ("none", "selective", "full")

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
    `selective` computes the attention scores again (5as²b), `full` the whole block from its input (2sbh; that
    sequence parallelism divides it follows from the rest).
    """
    t = tensor_parallel
    tokens = seq * micro_batch
    if recompute == "full":
        return Fraction(0 if on_host else 2 * tokens * hidden, t if sequence_parallel or partitioned else 1)
    whole = 10 * tokens * hidden
    scores = 5 * heads * seq * tokens
    divided = sum(block_parts(seq, micro_batch, hidden, heads, ffn).values()) - whole - scores
    kept_scores = 0 if recompute == "selective" else Fraction(scores, t)
    gathered = 4 * tokens * hidden if sequence_parallel and keep_gathered else 0
    shared = gathered + Fraction(whole - gathered, t if sequence_parallel else 1)
    return shared + Fraction(divided, t) + kept_scores


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
    scores = "" if recompute == "selective" else " + 5as²b/t" if tensor_parallel else " + 5as²b"
    if not tensor_parallel:
        return f"34sbh{scores}"
    if not sequence_parallel:
        return f"10sbh + 24sbh/t{scores}"
    return f"4sbh + 30sbh/t{scores}" if keep_gathered else f"34sbh/t{scores}"


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
