"""Mixtures of experts: closed forms with two numbers of ranks, and the tokens that travel to experts.

Experts' states are cut over N_e ranks (edp), those of all other weights over N. So a form f(Psi, N) of all weights
becomes f(Psi, N) + f(Psi_e, N_e): a term with a number of parameters is there once for either, every other term once.

A rank has bs tokens, or bs/t of them under sequence parallelism, and k rows of h for each. e ranks share a layer's
experts, u ranks one expert's maps. Of a layer, with rows that spread alike on all ranks, the mean over ranks:

    all-to-all   (e-1)/e of the rows there and of the results back; in backward both the other way
    etp          u - 1 times the rows in all-gathers, and the results in reduce-scatters
    all-gather   eu - 1 times the tokens, their weights and experts; the sums in reduce-scatters
    weights      travel with the rows where an expert applies them
"""

from __future__ import annotations

from typing import NamedTuple

from zerosim.analysis.formulas.form import Form, Group, Powers, form, ring, symbol, symbols

PARAMETERS = ("Ψ", "Ψ_t", "Ψ_q", "Q", "Q_s", "U", "P", "M", "B", "F")
"""Letters that count parameters of all weights; for experts each has a letter of its own."""
OF_EXPERTS = {letter: f"{letter}e" if "_" in letter else f"{letter}_e" for letter in (*PARAMETERS, "N")}
ID_BYTES = 8
_w, _m, _k, _bs, _bsh, _l_e, _r_e, _x_e, _y_e = symbols("w m k bs bsh l_e r_e x_e y_e")
_GSHARD, _MEGATRON = "arXiv 2006.16668, section 3.2", "Megatron-LM d98e8a6, token_dispatcher.py"


def over_both(whole: Form) -> Form:
    """Return a form of all weights as the sum of those of dense ones, in its letters, and of experts, in theirs."""
    of_params = Form(tuple((powers, number) for powers, number in whole.terms if _has_parameters(powers)))
    return whole + of_params.where({letter: symbol(own) for letter, own in OF_EXPERTS.items()})


def _has_parameters(powers: Powers) -> bool:
    return any(
        any(not part.symbols.isdisjoint(PARAMETERS) for part in atom.parts)
        if isinstance(atom, Group)
        else atom in PARAMETERS
        for atom, _ in powers
    )


def kept_routes(experts: int, chosen: int, itemsize: int, part: Form) -> Form:
    """Return the bytes of a router's logits, and of so many `chosen` experts' weights and numbers, of each token of a
    rank's `part`."""
    return ((experts + chosen) * itemsize + chosen * ID_BYTES) * _bs * part


class Dispatch(NamedTuple):
    """How tokens get to experts: the sizes of ep and etp, each rank's part of the tokens, and the bytes of a row's
    weight. `inside`: weights are applied by experts. `frozen`: some layers send no gradients back."""

    ep: int
    etp: int
    part: Form
    weight: int
    inside: bool = False
    frozen: bool = False

    @property
    def forwards(self) -> Form:
        """The layers' forwards, recomputed ones included."""
        return _l_e + _r_e

    @property
    def back(self) -> tuple[Form, Form]:
        """The layers whose inputs, and whose results, have a gradient."""
        return (_x_e, _y_e) if self.frozen else (_l_e, _l_e)


def exchanged_rows(how: Dispatch) -> dict[tuple[str, str], Form]:
    """Return bytes by operation and axis where rows go to their experts' ranks and back."""
    rows = _m * _k * _w * _bsh * how.part
    weights = _m * _k * how.weight * _bs * how.part if how.inside else Form()
    (into, out), found = how.back, dict[tuple[str, str], Form]()
    there, back = (rows + weights) * how.forwards + rows * out, rows * how.forwards + (rows + weights) * into
    if how.ep > 1:
        found["all_to_all", "ep"] = (ring(form(how.ep)) * (there + back)).by(_GSHARD)
    if how.etp > 1:
        found["all_gather", "etp"] = ((how.etp - 1) * there).by(_MEGATRON)
        found["reduce_scatter", "etp"] = ((how.etp - 1) * back).by(_MEGATRON)
    return found


def gathered_tokens(how: Dispatch) -> dict[str, Form]:
    """Return bytes by operation where every rank gathers all tokens of the group."""
    times, tokens = how.ep * how.etp - 1, _m * _w * _bsh * how.part
    weights, ids = (_m * _k * each * _bs * how.part for each in (how.weight, ID_BYTES))
    into, out = how.back
    return {
        "all_gather": (times * ((tokens + weights + ids) * how.forwards + tokens * out)).by(_MEGATRON),
        "reduce_scatter": (times * (tokens * how.forwards + (tokens + weights) * into)).by(_MEGATRON),
    }
