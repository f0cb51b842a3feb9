"""Traffic of blocks that predict further tokens (DeepSeek-V3, arXiv 2412.19437, section 2.2; derived from the layers).

A rank has l_f of them among its l blocks, r_f of which are recomputed. Beside a block each uses the table and the head
once more, and maps 2h columns to h. Per microbatch, in calls of bsh:

                          table   2h to h                                    head     loss, of bs numbers
    tensor parallel       1       2 all-reduces, 1 all-gather of columns     1        3 all-reduces
    sequence parallel     1       4 all-gathers of inputs, 2 of columns      2        3 all-reduces
                          1       2 reduce-scatters                          1
    recomputed                    inputs (sequence parallel) and columns are gathered once more
"""

from __future__ import annotations

from zerosim.analysis.formulas.form import Form, ring, symbols
from zerosim.analysis.formulas.parallel import LOSS_CALLS
from zerosim.analysis.formulas.states import N

_m, _t, _w, _c, _bsh, _bs = symbols("m t w c bsh bs")
_l_f, _r_f, _VF = symbols("l_f r_f VF")
_SOURCE = "arXiv 2412.19437, section 2.2"


def further_tensor_parallel(*, all_reduce: int = 2) -> dict[str, Form]:
    """Return bytes per operation of tensor parallelism, without what their blocks send."""
    each = (ring(_t) * _w * _m * _bsh).by(_SOURCE)
    return {
        "all_reduce": all_reduce * each * 4 * _l_f + _losses(all_reduce),
        "all_gather": each * (_l_f + _r_f),
    }


def further_sequence_parallel(
    *, all_reduce: int = 2, keep_gathered: bool = False, head_again: bool = True
) -> dict[str, Form]:
    """Return bytes per operation of sequence parallelism. Inputs that are not kept whole are gathered again, the head's
    unless its loss computes gradients in forward."""
    each, twice = (ring(_t) * _w * _m * _bsh).by(_SOURCE), 0 if keep_gathered else 1
    return {
        "all_gather": each * ((6 + twice * (2 + head_again)) * _l_f + 3 * _r_f),
        "reduce_scatter": each * 4 * _l_f,
        "all_reduce": _losses(all_reduce),
    }


def _losses(all_reduce: int) -> Form:
    return all_reduce * LOSS_CALLS * ring(_t) * _c * _l_f * _m * _bs


def further_gathers(micro_batches: int) -> Form:
    """Return the bytes of stage 3's gathers of the table and the head for these blocks, VF elements in each forward and
    in each backward."""
    return (ring(N) * _w).by(_SOURCE) * 2 * micro_batches * _VF
