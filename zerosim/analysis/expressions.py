"""Closed forms as data for a program in another language: terms, and values for their letters.

    data = expressions(config_of, ["gpt2", "llama3.1-8b"])

A reader evaluates terms and adds nothing: no formula is written twice. The forms of a way (ZeRO stage, precision,
recompute, recipe) do not depend on the number of ranks. The letters do, because buffers are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

from zerosim.analysis.blocks import other_premises
from zerosim.analysis.candidate import accepted, candidate
from zerosim.analysis.capabilities.recompute import nearest_form
from zerosim.analysis.cost import cost_of
from zerosim.analysis.forms import forms
from zerosim.analysis.formulas import Form
from zerosim.analysis.formulas.form import symbol
from zerosim.analysis.letters import letters_of
from zerosim.analysis.shares import LaidOut, laid_out, recut
from zerosim.analysis.weights import sizes
from zerosim.config import RunConfig
from zerosim.config.parts.parallel import is_sliced
from zerosim.errors import InputError
from zerosim.ledger.activations import SavedRow
from zerosim.placement.spec import is_block
from zerosim.train.plan import plan

Values = Mapping[str, int | str | bool]
ConfigOf = Callable[[Values], RunConfig]
"""Return the configuration of a plan with these options."""

RANKS = tuple(2**power for power in range(11))
SOME = 8
"""Ranks with which a way is read."""
TPS = (1, 2, 4, 8)
WAYS: Mapping[str, tuple[int | str, ...]] = {
    "stage": (0, 1, 2, 3),
    "precision": ("bf16", "fp32", "bf16-pure"),
    "recompute": ("none", "selective", "full"),
    "recipe": ("paper", "usual"),
}
SUBJECTS = ("states", "buffers", "sent", "exchanged")
OF_POINT = {"bs": symbol("b") * symbol("s"), "bsh": symbol("b") * symbol("s") * symbol("h")}
"""Letters that are products of letters of a point."""
ALONE = dict.fromkeys(("first", "last", "start", "end", "m", "v"), 1)
"""Letters of pipelines and microbatches: a page has one pipeline stage, and one microbatch a step."""
MOST_SEQ = 131_072
FEW = 4
"""Blocks that are counted; all where a model has no so few."""
COUNTED_SEQ = 1024
"""Tokens of the row with which an estimate of activations is compared."""


def terms_of(form: Form) -> list[Any]:
    """Return a form as JSON: [numerator, denominator, [[letter or group, power], ...]] for each term."""
    return [
        [number.numerator, number.denominator, [[_atom(atom), power] for atom, power in powers]]
        for powers, number in form.terms
    ]


def _atom(atom: Any) -> Any:
    return atom if isinstance(atom, str) else {"kind": atom.kind, "parts": [terms_of(part) for part in atom.parts]}


def expressions(config_of: ConfigOf, models: Iterable[str]) -> dict[str, Any]:
    """Return the forms, the ways and the letters of these models. Raises: InputError for a model without sizes."""
    found = _Found(config_of)
    rows = [found.model(name) for name in models]
    forms = [[str(form), terms_of(form)] for form in found.forms]
    grid = {"ranks": RANKS, "tp": TPS, **WAYS}
    return {"grid": grid, "counted_seq": COUNTED_SEQ, "forms": forms, "ways": found.ways, "models": rows}


class _Found:
    """The forms and ways met so far, each once."""

    def __init__(self, config_of: ConfigOf) -> None:
        self.config_of = config_of
        self.forms: dict[Form, int] = {}
        self.ways: list[Any] = []

    def model(self, name: str) -> dict[str, Any]:
        """Return a model's row: its letters and ways at each tp, or why this tp is refused."""
        config = self.config_of({"model": name})
        numbers = sizes(config)
        if "h" not in numbers:
            raise InputError(
                f"--model {name} has no sizes of blocks: choose a preset such as gpt2-xl (zerosim zoo models)"
            )
        if config.model.is_second:
            raise InputError(f"--model {name} has two sequences, an encoder's and a decoder's: choose a model with one")
        tps: dict[int, Any] = {}
        for tp in TPS:
            try:
                tps[tp] = self._at_tp(name, tp, pad=tp > 1 and numbers["V"] % tp > 0)
            except InputError as error:
                tps[tp] = {"refused": str(error)}
        most = min(int(config.value("positions") or MOST_SEQ), MOST_SEQ)
        row = {"name": name, "parameters": laid_out(config).num_parameters, "seq": min(numbers["s"], most)}
        return {**row, "most_seq": most, "tp": tps}

    def _at_tp(self, name: str, tp: int, pad: bool) -> dict[str, Any]:
        extra: dict[str, bool] = {"pad_vocab": True} if pad else {}
        given: Values = {"model": name, "tp": tp, **extra}
        laid = laid_out(self.config_of({**given, "ranks": SOME * tp, "stage": 3}))
        whole = letters_of(laid)
        others = [recut(laid, self.config_of({**given, "ranks": n * tp, "stage": 3})) for n in RANKS]
        cut = [letters_of(one, padded=True) for one in others]
        padded = {x: [of[x] for of in cut] for x in whole if any(of[x] != whole[x] for of in cut)}
        ways, used = [], set[str]()
        for values in product(*WAYS.values()):
            config = self.config_of({**given, "ranks": SOME * tp, **dict(zip(WAYS, values, strict=True))})
            laid, is_cut = laid._replace(config=config), is_sliced(config.parallel)
            base = {**whole, **{x: of[RANKS.index(SOME)] for x, of in padded.items() if is_cut}}
            found, own = _rows(laid), letters_of(laid, padded=True)
            symbols = set[str]().union(*(form.symbols for *_, form in found)) - {"b", "s", "N"}
            used |= symbols
            way = {
                "rows": self._numbered(found),
                "letters": {x: own[x] for x in sorted(symbols) if own[x] != base[x]},
                "padded": is_cut,
                "exact": not other_premises(config),
            }
            if values[0] == 0:  # one rank alone has nothing to reduce, and no buffers for it
                alone = self.config_of({**given, "ranks": tp, **dict(zip(WAYS, values, strict=True))})
                way["alone"] = self._numbered(_rows(laid._replace(config=alone)))
            if way not in self.ways:
                self.ways.append(way)
            ways.append(self.ways.index(way))
        return {
            "more": extra,
            "letters": {x: whole[x] for x in sorted(used)},
            "padded": {x: values for x, values in padded.items() if x in used},
            "ways": ways,
            "errors": self._errors(given),
        }

    def _numbered(self, rows: list[tuple[str, str, str, Form]]) -> list[Any]:
        return [[*key, self.forms.setdefault(form, len(self.forms))] for *key, form in rows]

    def _errors(self, given: Values) -> dict[str, float]:
        """Return by precision and recompute how far estimates of a block's activations are from a count."""
        errors = {}
        for precision, recompute in product(("bf16", "fp32"), WAYS["recompute"]):
            more = {
                "ranks": given["tp"],
                "stage": 0,
                "seq": COUNTED_SEQ,
                "precision": precision,
                "recompute": recompute,
            }
            try:
                config = self.config_of({**given, **more})
            except InputError:  # shorter rows
                config = self.config_of({**given, **more, "seq": 512})
            if other_premises(config):
                result = plan(next(accepted((candidate(config, layers=FEW), candidate(config)))))
                due = (symbol("l") * nearest_form(config)).at(letters_of(result))
                counted = activations_of(result.saved)
                errors[f"{precision} {recompute}"] = round(float(100 * (due - counted) / counted), 1)
        return errors


def _rows(laid: LaidOut) -> list[tuple[str, str, str, Form]]:
    """Return subject, name, axis and form of what a rank holds and sends; activations are those of all blocks."""
    config = laid.config
    found = [
        (*key, form.where({**OF_POINT, **ALONE}))
        for key, form in forms(config, cost_of(laid)).items()
        if key.subject in SUBJECTS and form.terms
    ]
    return [*found, ("kept", "activation", "", symbol("l") * nearest_form(config))]


def activations_of(saved: Mapping[str, Iterable[SavedRow]]) -> int:
    """Return the bytes that rank 0's blocks saved for backward."""
    return sum(row.nbytes for unit, rows in saved.items() if is_block(unit) for row in rows)
