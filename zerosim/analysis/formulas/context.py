"""Traffic of context parallelism: what a rank sends in a step for its attentions.

c ranks share a row. `around` of them form a ring, or gather; `within` exchange tokens for heads. bsh is the rank's
activation between two layers, b (s/c) h. For each of the h columns q has `queries` columns, and k and v together
`keys`. A rank holds l blocks. Attention runs l times forward, `back` times backward, and `again` times when it is
recomputed, of which `exchanged` with the exchanges around it.

    ring          keys around - 1 times each way, in the model's numbers; their gradients around times, in c bytes
    gathered      the same gathers, and one reduce-scatter of gradients
    exchanges     (within - 1) / within of q, k, v and of the result
"""

from __future__ import annotations

from zerosim.analysis.formulas.form import Form, form, ring, symbols

_l, _m, _w, _c, _bsh = symbols("l m w c bsh")
_RING, _GATHERED, _ULYSSES = "arXiv 2310.01889", "arXiv 2407.21783, section 3.3.2", "arXiv 2309.14509, section 3.1"


def context_parallel(
    around: int,
    within: int,
    queries: Form,
    keys: Form,
    back: Form,
    again: Form,
    exchanged: Form,
    *,
    gathers: bool,
) -> dict[str, Form]:
    """Return bytes per operation. `gathers`: keys and values are gathered, and do not go round."""
    each, found = _m * _bsh, dict[str, Form]()
    if within > 1:
        both = 2 * queries + keys
        found["all_to_all"] = (ring(form(within)) * _w * both * (_l + back + exchanged) * each).by(_ULYSSES)
    if around > 1:
        there, home = (around - 1) * _w * keys * (_l + back + again) * each, _c * keys * back * each
        if gathers:
            found["all_gather"] = there.by(_GATHERED)
            found["reduce_scatter"] = ((around - 1) * home).by(_GATHERED)
        else:
            found["send"] = (there + around * home).by(_RING)
    return found
