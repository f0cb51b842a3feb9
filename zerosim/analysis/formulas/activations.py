"""Activations that forward saves for backward: the two published estimates.

The accounting of "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198, section 4) and the ZeRO paper's estimate (arXiv 1910.02054, sections 3.2 and 6.1). Neither
describes zerosim's own model, whose activations are counted.

s tokens per row, b rows of a microbatch, h width, f width of the MLP, a heads, l blocks, t tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

from zerosim.analysis.formulas.form import Form, symbols
from zerosim.analysis.formulas.states import ZERO_PAPER

RECOMPUTATION = "arXiv 2205.05198 (Reducing Activation Recomputation), section 4"
_s, _b, _h, _a, _f, _t, _l = symbols("s b h a f t l")
_sbh, _each_score = _s * _b * _h, _a * _s * _s * _b

NOT_KEPT: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "core_attn": (0, 0),  # and the scores
        "mla_up_proj": (0, 6),  # q, k and v
        "attn_proj": (2, 0),  # the second norm's input
        "layernorm": (4, 0),  # the inputs of the maps behind both norms
        "mlp": (0, 16),  # the input and the output of its activation
        "mlp_act": (0, 8),  # the output alone
        "dropout": (2, 0),  # both masks
        "op": (8, 8),  # all of these but the activation's input, and the scores
    }
)
"""Bytes that recomputing each part saves in a block, in sbh: of the 10 that tensor parallelism leaves
whole, and of the 24 that it divides, for ffn = 4h."""

WHY_ESTIMATES_DIFFER = (
    "The ZeRO paper gives 12 elements per token, width and block in one sentence, without naming them. Nothing in it "
    "grows with the square of the sequence. 2205.05198 counts tensor by tensor: 34 bytes (2-byte tensors and "
    "1-byte dropout masks) and 5 bytes for every attention score, a*s*s*b of them, which a fused attention kernel "
    "never stores. Without the scores it is 34 bytes against 24; with them it depends on the number of heads."
)


def _scores(*, fp32_softmax: bool) -> Form:
    """Bytes of the scores: a 2-byte softmax, a mask, a 2-byte softmax after dropout; the first in 4 bytes, 7as²b."""
    return (7 if fp32_softmax else 5) * _each_score


def block_parts(*, fp32_softmax: bool = False) -> dict[str, Form]:
    """Return the bytes that one block saves, by part: attention 11sbh + 5as²b, mlp 3sbh + 4sbf, layernorms 4sbh
    (2205.05198, 4.1).

    The MLP saves its input (2sbh), the input and the output of its activation (2 bytes * f each per token) and a
    dropout mask (1sbh): 19sbh where f = 4h.
    """
    return {
        "attention": (11 * _sbh + _scores(fp32_softmax=fp32_softmax)).by(RECOMPUTATION),
        "mlp": (3 * _sbh + 4 * _s * _b * _f).by(RECOMPUTATION),
        "layernorms": (4 * _sbh).by(RECOMPUTATION),
    }


def block_activations(
    recompute: str = "none",
    *,
    sequence_parallel: bool = False,
    keep_gathered: bool = False,
    partitioned: bool = False,
    on_host: bool = False,
    fp32_softmax: bool = False,
) -> Form:
    """Return the bytes that one block saves on one of t ranks (2205.05198, Table 2).

    Tensor parallelism leaves 10sbh whole on every rank: the inputs of attention and MLP (4sbh), their
    dropout masks (2sbh) and the norms' inputs (4sbh). Sequence parallelism divides those too; if a rank saves
    gathered inputs, 4sbh of them stay whole.

    With full recompute t ranks may hold the input `partitioned`, or nothing of it on the device if it is `on_host` (the
    ZeRO paper's Pa and Pa+cpu, 1910.02054, section 6.1).
    With `fp32_softmax` scores are 7as²b.
    `selective` recomputes the attention scores (5as²b), `selective:PART,...` the named parts (`NOT_KEPT`), and `full`
    the whole block from its input (2sbh; sequence parallelism divides it, which follows from the rest).
    """
    if recompute == "full":
        kept = Form() if on_host else 2 * _sbh / _t if sequence_parallel or partitioned else 2 * _sbh
        return kept.by(RECOMPUTATION)
    less_whole, less_divided = _not_kept(recompute)
    whole, gathered = (10 - less_whole) * _sbh, 4 * _sbh if sequence_parallel and keep_gathered else Form()
    divided = 8 * _sbh + 4 * _s * _b * _f - Fraction(less_divided, 4) * _s * _b * _f
    shared = gathered + (whole - gathered) / _t if sequence_parallel else whole
    scores = _scores(fp32_softmax=fp32_softmax) / _t if keeps_scores(recompute) else Form()
    return (shared + divided / _t + scores).by(RECOMPUTATION)


def parts_again(recompute: str) -> list[str]:
    """Return the parts that `selective` or `selective:PART,...` recomputes."""
    form, _, given = recompute.partition(":")
    return (given or "core_attn").split(",") if form == "selective" else []


def differ(recompute: str) -> bool:
    """Return whether `recompute` says a value for each range of blocks."""
    return "=" in recompute


def keeps_scores(recompute: str) -> bool:
    """Return whether a block saves its attention scores, if eager attention computed them."""
    return recompute != "full" and not {"core_attn", "op"} & set(parts_again(recompute))


def _not_kept(recompute: str) -> tuple[int, int]:
    """Return sbh bytes, as in `NOT_KEPT`."""
    pairs = [NOT_KEPT[part] for part in parts_again(recompute)]
    return sum(whole for whole, _ in pairs), sum(divided for _, divided in pairs)


def zero_paper_elements() -> Form:
    """Return 12hbsl ELEMENTS, twice as many bytes in fp16 (ZeRO paper, section 3.2).

    GPT-2 of 1.5B parameters at b = 32, s = 1024: 30.2e9 elements, 60.4 GB, the paper's "about 60 GB".
    """
    return (12 * _h * _b * _s * _l).by(f"{ZERO_PAPER}, section 3.2")


def checkpoint_elements() -> Form:
    """Return one input per block, hbsl elements: all that is saved if every block is recomputed.

    The ZeRO paper's 100B example (section 6.1: 33 GB, 2 GB with Pa over 16 ranks) counts 1 byte for each of
    them; section 3.2 of the same paper says about 60 GB, which is 2.
    """
    return (_h * _b * _s * _l).by(f"{ZERO_PAPER}, section 3.2")
