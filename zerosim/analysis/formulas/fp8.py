"""Products in 8 bits: codes of weights that stay, and codes of activations that sequence parallelism gathers.

Sources: derived from Transformer Engine 2 (pytorch/module/linear.py: weight workspaces, gather_along_first_dim) and
torchao 0.18.0 (float8/float8_tensor_parallel.py).
"""

from __future__ import annotations

from fractions import Fraction

from zerosim.analysis.formulas.form import Form, ring, symbols
from zerosim.analysis.formulas.states import PSI

_psi8, _stored, _sigma8, _eta, _t, _w, _m, _bsh, _l8, _r8, _N, _d = symbols("Ψ_8 Ψ_u σ_8 η t w m bsh l_8 r_8 N d")
TE = "Transformer Engine"


def weight_codes() -> Form:
    """Return the bytes of weights' codes, one for forward and one for the input's gradient, with their scales."""
    return (2 * _psi8 + _sigma8).by(TE)


def stored_codes(param_bytes: int, *, divided: bool, shards: bool, secondary: bool, copies: bool) -> Form:
    """Return what weights stored as codes take more than in the parameters' own format: less, a byte each, `divided`
    over N ranks or with whole copies for the input's gradient, and scales. Without `shards` ranks hold masters
    alone; hpZ's `secondary` ones are codes too."""
    less = (1 - param_bytes) * ((_stored / _N if divided else _stored) * shards + secondary * _stored / _d)
    return (less + copies * _psi8 + _sigma8).by(TE)


def sent_codes(param_bytes: int) -> Form:
    """Return Psi for what is sent of parameters: a code counts as its fraction of an element."""
    return PSI - Fraction(param_bytes - 1, param_bytes) * _stored


def histories() -> Form:
    """Return the bytes of delayed scaling's histories and factors."""
    return (1 * _eta).by(TE)


def gathered_codes(scales: Fraction, *, again: bool, full: bool, mlp: bool) -> Form:
    """Return what the gathers of two inputs of each block in 8 bits send more than in the weights' own format: a
    negative number. `scales`: bytes of scales for each element. The gathers are repeated for the weights' gradients
    (`again`), and where blocks or their feed-forward are recomputed."""
    return ring(_t) * _m * _bsh * (-_w + (1 + scales)) * _times(again=again, full=full, mlp=mlp)


def shared_amax(all_reduce: int, *, again: bool, full: bool, mlp: bool) -> Form:
    """Return the bytes that the amax of all rows' costs: 4 for each gathered input that is cast."""
    return 4 * all_reduce * ring(_t) * _m * _times(again=again, full=full, mlp=mlp)


def shared_histories(all_reduce: int, length: int) -> Form:
    """Return the same of delayed scaling: two histories of each block, once a step."""
    return 8 * length * all_reduce * ring(_t) * _l8


def _times(*, again: bool, full: bool, mlp: bool) -> Form:
    return (2 + 2 * again + mlp) * _l8 + 2 * full * _r8
