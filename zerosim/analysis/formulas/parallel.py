"""Traffic of tensor, sequence and pipeline parallelism: what a rank sends in a step beside the model states' traffic.

Megatron-LM (arXiv 1909.08053, section 3), sequence parallelism (2205.05198, section 4.2.2), pipelines (2104.04473,
sections 2.2 and 3.2). Not time.

A rank holds l blocks, of which r run again whole (the letters: `letters.py`). `first` is 1 for a rank with the token
table, `last` for one with the head and the loss, `start` and `end` for the first and the last pipeline stage; each is 0
for the others. Per microbatch:

                          in a block                          table    head         loss, of bs numbers
    tensor parallel       4 all-reduces of bsh; recompute 6   1        1            3 all-reduces
    sequence parallel     6 all-gathers; 8                    1        2            3 all-reduces
                          4 reduce-scatters; 6                1        1
      inputs kept whole   4 all-gathers; 6                    1        1            3 all-reduces
    recompute, Pa         1 all-gather more (1910.02054, 8)
    parts that run again  g once for attn_proj and op, unless branches are side by side; f once for the mlp
    feed-forward in tiles f and g once more, of all tiles together
    pipeline              bsh for each microbatch, border and direction; bsh/t under sequence parallelism
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from zerosim.analysis.formulas.activations import differ, parts_again
from zerosim.analysis.formulas.form import Form, group, ring, symbols
from zerosim.analysis.formulas.states import N

_l, _r, _first, _last, _start, _end = symbols("l r first last start end")
_m, _p, _v, _i, _t = symbols("m p v i t")
_x, _y, _z, _j = symbols("x y z j")
_y_q, _k_f, _k_g, _k_u = symbols("y_q k_f k_g k_u")
_l_d, _r_d, _bsh_d, _bs_d, _l_e, _r_e = symbols("l_d r_d bsh_d bs_d l_e r_e")
_w, _g, _c, _bsh, _bs, _V, _S, _C, _E = symbols("w g c bsh bs V S C E")

Number = int | Fraction
LOSS_CALLS = 3
"""Numbers per token that are all-reduced: maximum, target's logit, sum of exponentials (1909.08053, section 3)."""
_TENSOR, _SEQUENCE, _PIPELINE = "arXiv 1909.08053, section 3", "arXiv 2205.05198, section 4.2.2", "arXiv 2104.04473"
_ZERO_BUBBLE, _ZERO_R = "arXiv 2401.10241", "arXiv 1910.02054"


class Inputs(NamedTuple):
    """What attention's f has, in inputs of the model's width, and what of it weights' gradients read. Latents, and the
    columns beside them, are narrower."""

    f: Number = 1
    read: Number = 1


WIDE = Inputs()


class RecomputedBoundaries(NamedTuple):
    """How often the blocks of a rank run f and g, forward, once more for recompute."""

    f: Form
    g: Form


def recomputed_boundaries(
    recompute: str,
    *,
    frozen: bool = False,
    side_by_side: bool = False,
    tiled: bool = False,
    inputs: Inputs = WIDE,
    experts: bool = False,
) -> RecomputedBoundaries:
    """Return how often f and g run again: both of each fully recomputed block, else those within the parts of
    `selective`; and those of a feed-forward that is `tiled`. If blocks differ, letters count the blocks that recompute
    such a part. Experts' f is in no part. Nothing reads the sum after attention again where both branches stand
    `side_by_side`."""
    tiles = tiled * _l
    if differ(recompute):  # the letters count the blocks of each kind
        f, g = (1 + inputs.f) * _r + _k_f + inputs.read * _k_u, 2 * _r + (0 if side_by_side else 1) * _k_g
        return RecomputedBoundaries(f + tiles, g + tiles)
    if recompute.partition(":")[0] == "full":
        return RecomputedBoundaries((1 + inputs.f) * _r + tiles, 2 * _r + tiles)
    parts, f, g = parts_again(recompute), _k_f if frozen else _l - _l_e * experts, _k_g if frozen else _l
    g = Form() if side_by_side else g
    up = parts.count("mla_up_proj") * inputs.read * (_y_q if frozen else _l)
    again = parts.count("mlp") * f + up, (parts.count("attn_proj") + parts.count("op")) * g
    return RecomputedBoundaries(again[0] + tiles, again[1] + tiles)


def tensor_parallel(
    recompute: str = "none",
    *,
    all_reduce: int = 2,
    frozen: bool = False,
    side_by_side: bool = False,
    tiled: bool = False,
    inputs: Inputs = WIDE,
    experts: bool = False,
) -> dict[str, Form]:
    """Return bytes per operation: f reduces in backward and g in forward, of attention and of the feed-forward.

    `all_reduce`: the bytes that an all_reduce moves per byte of payload (`traffic.all_reduce_volume`). If weights are
    `frozen`, f reduces only for maps whose input's gradient is wanted. `inputs`: those of attention's f.
    """
    again = recomputed_boundaries(recompute, frozen=frozen, side_by_side=side_by_side, tiled=tiled, experts=experts)
    calls = (3 + inputs.f) * _l + again.g + _first + _last
    if frozen:
        calls = 2 * _l + again.g + _first + _x
    return {"all_reduce": (all_reduce * ring(_t) * _w * calls * _m * _bsh + _loss(all_reduce)).by(_TENSOR)}


def second_parallel(recompute: str = "none", *, all_reduce: int = 2) -> dict[str, Form]:
    """Return bytes per operation of an encoder with a decoder: f and g of each of the decoder's three branches, and the
    f of the encoder's output before each cross-attention. `bsh_d`, `bs_d`: of the decoder's rows. Source: derived."""
    parts = parts_again(recompute)
    g, is_whole = parts.count("attn_proj") + parts.count("op"), int(recompute.partition(":")[0] == "full")
    encoder = (4 + g) * (_l - _l_d) + 2 * is_whole * (_r - _r_d) + _l_d + _first
    decoder = (6 + 2 * g) * _l_d + 3 * is_whole * _r_d + _first + _last
    loss = all_reduce * LOSS_CALLS * ring(_t) * _c * _last * _m * _bs_d
    return {"all_reduce": all_reduce * ring(_t) * _w * _m * (encoder * _bsh + decoder * _bsh_d) + loss}


def sequence_parallel(
    recompute: str = "none",
    *,
    all_reduce: int = 2,
    keep_gathered: bool = False,
    head_again: bool = True,
    frozen: bool = False,
    side_by_side: bool = False,
    tiled: bool = False,
    experts: str = "",
    inputs: Inputs = WIDE,
) -> dict[str, Form]:
    """Return bytes per operation: f gathers in forward and scatters in backward, g the other way round.

    Inputs of column-parallel maps, unless they are stored, are gathered again for their weights' gradients: 2 in a
    block and 1 in the head, unless the loss computes the head's in forward (`head_again`). `experts` are 'inside' f
    and g, and keep the whole input; or 'apart', on each rank's own rows, without f and g. `inputs`: those of
    attention's f.
    """
    twice = 0 if keep_gathered else 1
    how: dict[str, bool] = {"side_by_side": side_by_side, "tiled": tiled, "experts": experts in ("inside", "apart")}
    again = recomputed_boundaries(recompute, frozen=frozen, inputs=inputs, **how)
    each = ring(_t) * _w * _m * _bsh
    mixed = {"inside": (twice, 0, 0), "apart": (2 + twice, 2, 1)}.get(experts, (0, 0, 0))
    if recompute.partition(":")[0] == "full" or differ(recompute):
        again = RecomputedBoundaries(again.f - mixed[2] * _r_e, again.g - mixed[2] * _r_e)
    gathers = (3 + inputs.f + (1 + inputs.read) * twice) * _l - mixed[0] * _l_e
    gathers = gathers + again.f + _first + (1 + twice * head_again) * _last
    scatters = (3 + inputs.f) * _l - mixed[1] * _l_e + again.g + _first + _last
    if frozen:
        once = mixed[2] * _l_e
        gathers = (1 + inputs.f) * _l - once + again.f + _last + _y + twice * _z
        scatters = 2 * _l - once + again.g + _first + _x
    return {
        "all_gather": (each * gathers).by(_SEQUENCE),
        "reduce_scatter": (each * scatters).by(_SEQUENCE),
        "all_reduce": _loss(all_reduce).by(_TENSOR),
    }


def _loss(all_reduce: int) -> Form:
    return all_reduce * LOSS_CALLS * ring(_t) * _c * _last * _m * _bs


def head_norm_sums(*, all_reduce: int = 2, frozen: bool = False) -> Form:
    """Return the bytes of norms over all heads of queries and of keys (OLMo 2's), which t ranks divide: a sum each for
    every row, in forward, when a block is recomputed and in backward. Source: derived."""
    return all_reduce * ring(_t) * _c * 2 * (_l + _r + (_y_q if frozen else _l)) * _m * _bs


def flat_parallel(*, all_reduce: int = 2) -> dict[str, Form]:
    """Return the bytes of the flat model: each of its units adds up one number for each of V columns. Source:
    derived."""
    return {"all_reduce": all_reduce * ring(_t) * _c * _l * _m * _V}


def input_gathers() -> Form:
    """Return the bytes of all-gathers where t ranks store parts of each block's input (Pa): one gather of each input
    before the block is recomputed."""
    return (ring(_t) * _w * _r * _m * _bsh).by(f"{_ZERO_R}, sections 6.1 and 8")


def partition_share() -> Form:
    """Return what Pa adds to the traffic of a recomputed block, over what tensor parallelism sends there: 1/12, however
    many ranks there are (1910.02054, section 8: under 10 %)."""
    one = {"l": 1, "r": 1, "first": 0, "last": 0}
    return (input_gathers().where(one) / tensor_parallel("full")["all_reduce"].where(one)).by(f"{_ZERO_R}, section 8")


def inputs_moved(*, divided: bool = False) -> Form:
    """Return the bytes that a rank copies to the host in a step, and as many back, if checkpoints wait there: each
    whole input or, with Pa, one of its t parts (Pa+cpu)."""
    return (_w * _r * _m * (_bsh / _t if divided else _bsh)).by(f"{_ZERO_R}, section 6.1")


def boundary_sends(schedule: str = "1f1b", *, divided: bool = False, frozen: bool = False) -> Form:
    """Return the bytes that a pipeline rank sends: one message on and one back of each of its v chunks and m
    microbatches.

    The first chunk of all sends nothing back, the last nothing on. zb-v has both on the first stage, and turns on the
    last one without a message (2401.10241, section 6). `divided`: sequence parallelism sends 1/t of each. Where weights
    are `frozen`, j chunks send a gradient back: those above the lowest trained unit.
    """
    fewer = 2 if schedule == "zb-v" else 1
    each = _w * _m * (_bsh / _t if divided else _bsh)
    if frozen:
        onward = _v - _end - (_start if schedule == "zb-v" else 0)
        return (each * (onward + _j)).by(f"{_PIPELINE}, section 3.2")
    return (each * (2 * _v - fewer * _start - fewer * _end)).by(f"{_PIPELINE}, section 3.2")


def live_micro_batches(schedule: str, together: int = 0) -> Form:
    """Return the most microbatches whose activations stage i of p holds at once; of v chunks a stage chunks of them.

    GPipe (arXiv 1811.06965) m; 1F1B min(m, p-i); interleaved 2(p-i-1) + (v-1)p + 1, of vm in all (2104.04473, 2.2);
    and where not p but `together` pass a chunk before the next (v-1) of these (Megatron-Core get_pp_rank_microbatches);
    zb-h1 min(m, p-i), beside what the weight gradients of i others read; zb-v 2p, all included (2401.10241, 2.2 and 6).
    """
    if schedule == "gpipe":
        return _m
    if schedule in ("1f1b", "zb-h1"):
        return group("least", _m, _p - _i)
    if schedule == "zb-v":
        return 2 * _p
    return group("least", 2 * group("sum", _p - _i - 1) + group("sum", _v - 1) * (together or _p) + 1, _v * _m)


def live_weights(schedule: str) -> Form:
    """Return how many more microbatches stage i stores for their weight gradients only (2401.10241, section 2.2)."""
    return _i if schedule == "zb-h1" else Form()


def bubble(schedule: str = "1f1b") -> Form:
    """Return idle time until the last stage is done, divided by a stage's busy time: the bubble by makespan.

    (p-1)/(vm), where every slot takes as long (2104.04473, 2.2); a third of it where weight gradients, which take one
    slot of three, fill the rest (2401.10241, sections 2.2 and 6).
    """
    each = {"interleaved": _v * _m, "zb-h1": 3 * _m, "zb-v": 6 * _m}.get(schedule, _m)
    source = f"{_ZERO_BUBBLE}, section 2.2" if schedule.startswith("zb") else f"{_PIPELINE}, section 2.2"
    return (group("sum", _p - 1) / each).by(source)


def own_span_bubble(schedule: str = "1f1b") -> Form:
    """Return the bubble as the zero-bubble papers count it: the largest of a stage, from its own first action to its
    own last one. Zero for zb-v (2401.10241, sections 1 and 6)."""
    return Form() if schedule == "zb-v" else bubble(schedule)


def shared_grads(*, copies: int = 1, divided: bool = True, pairs: bool = False) -> Form:
    """Return the bytes, on average over ranks, that add up gradients of which tensor-parallel ranks hold shares.

    S elements that all t share: under sequence parallelism norms and biases (2205.05198, section 4.2.2). C elements of
    key-value heads that `copies` neighbours hold. `divided`: each updates one of N parts.
    """
    parts = N if divided else 1
    all_t = ring(_t) * (_t if pairs else 2) * _g * _S / parts
    return all_t + (ring(Form() + copies) * (copies if pairs else 2) * _g * _C / parts if copies > 1 else 0)


def tied_grads(*, passes: int = 1, divided: bool = True) -> Form:
    """Return the bytes that the first and the last stage each send to add up a tied table's gradient of E elements: an
    all_reduce of two ranks, in which both algorithms send the same (2104.04473; Megatron-LM's embedding group)."""
    return ring(Form() + 2) * 2 * passes * _g * _E / (N if divided else 1)
