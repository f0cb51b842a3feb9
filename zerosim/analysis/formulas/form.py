"""Closed forms as values: an ordered sum of terms, with a text and exact numbers.

    PSI, N = symbols("Ψ N")
    states = 4 * PSI + 12 * PSI / N
    str(states)                               # '4Ψ + 12Ψ/N'
    states.at({"Ψ": 7_500_000_000, "N": 64})  # Fraction(31406250000)
    str(states.where(N=4))                    # '7Ψ'

Terms are printed in the order of writing. Like terms are added at the place of the first one. There
is no other simplification. A factor that is no product (a sum, the least of two) is a `Group`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Union

BYTES = ("w", "g", "q", "c")
"""Letters for the bytes of a parameter, of a gradient and of a number that is computed."""

_RAISED = {2: "²", 3: "³"}

Number = int | Fraction
Atom = Union[str, "Group"]
Powers = tuple[tuple[Atom, int], ...]
"""The factors of a term with their exponents, in the order of writing."""


@dataclass(frozen=True, slots=True)
class Group:
    """A factor that is no product of symbols: the 'sum' of its one part, the 'least' of several, or a 'ring' of one,
    which is (n - 1) / n."""

    kind: str
    parts: tuple[Form, ...]

    def where(self, values: Mapping[str, Number | Form]) -> Form:
        """Return the group with symbols replaced; a number if nothing else is left, except for a ring, which stays
        visible."""
        parts = tuple(part.where(values) for part in self.parts)
        if self.kind == "ring" or any(part.symbols for part in parts):
            return Form(((((Group(self.kind, parts), 1),), Fraction(1)),))
        return form(min(part.at() for part in parts))

    def at(self, values: Mapping[str, Number]) -> Fraction:
        """Return its number."""
        numbers = [part.at(values) for part in self.parts]
        return (numbers[0] - 1) / numbers[0] if self.kind == "ring" else min(numbers)

    def __str__(self) -> str:
        inside = ", ".join(str(part).replace(" ", "") for part in self.parts)
        return {"sum": f"({inside})", "least": f"min({inside})", "ring": f"({inside}-1)/{inside}"}[self.kind]


@dataclass(frozen=True, slots=True, repr=False)
class Form:
    """A sum of terms, each a product of powers and a number; `source` cites it."""

    terms: tuple[tuple[Powers, Fraction], ...] = ()
    source: str = field(default="", compare=False)

    def by(self, source: str) -> Form:
        """Name the source, such as 'arXiv 1910.02054, section 7'. A sum has the source of its first form with one."""
        return Form(self.terms, source)

    def __add__(self, other: Form | Number) -> Form:
        found: dict[frozenset[tuple[Atom, int]], tuple[Powers, Fraction]] = {}
        for powers, number in (*self.terms, *form(other).terms):
            first, before = found.get(frozenset(powers), (powers, Fraction(0)))
            found[frozenset(powers)] = first, before + number
        left = tuple((powers, number) for powers, number in found.values() if number)
        return Form(left, self.source or form(other).source)

    __radd__ = __add__

    def __neg__(self) -> Form:
        return self * -1

    def __sub__(self, other: Form | Number) -> Form:
        return self + -form(other)

    def __mul__(self, other: Form | Number) -> Form:
        product = Form((), self.source)
        for mine, number in self.terms:
            for theirs, factor in form(other).terms:
                powers = dict(mine)
                for atom, power in theirs:
                    powers[atom] = powers.get(atom, 0) + power
                left = tuple((atom, power) for atom, power in powers.items() if power)
                product += Form(((left, number * factor),))
        return product

    __rmul__ = __mul__

    def __truediv__(self, other: Form | Number) -> Form:
        """Divide by one term; a sum is put into brackets first (`group`)."""
        [(powers, number)] = form(other).terms
        return self * Form(((tuple((atom, -power) for atom, power in powers), 1 / number),))

    @property
    def symbols(self) -> frozenset[str]:
        """Return the letters without a number."""
        return frozenset(_letters(self))

    @property
    def elements(self) -> Form:
        """Return a form of sent bytes as the elements of a volume: without sizes of numbers (w, g, q) and
        without a ring's (n - 1) / n, as papers print it."""
        total = Form((), self.source)
        for powers, number in self.terms:
            left = ((a, power) for a, power in powers if a not in BYTES and getattr(a, "kind", "") != "ring")
            total += Form(((tuple(left), number),))
        return total

    def where(self, values: Mapping[str, Number | Form] | None = None, /, **more: Number | Form) -> Form:
        """Return the form with symbols replaced by numbers or forms, without zero terms."""
        values = {**(values or {}), **more}
        if not values:
            return self
        total = Form((), self.source)
        for powers, number in self.terms:
            term = form(number)
            for atom, power in powers:
                one = atom.where(values) if isinstance(atom, Group) else form(values.get(atom, symbol(atom)))
                for _ in range(abs(power)):
                    term = term * one if power > 0 else term / one
            total += term
        return total

    def at(self, values: Mapping[str, Number] | None = None, /, **more: Number) -> Fraction:
        """Return the exact number, with a value for every symbol. Raises: KeyError that names the symbols without a
        value."""
        values = {**(values or {}), **more}
        if missing := self.symbols - values.keys():
            raise KeyError(f"no value for {', '.join(sorted(missing))}")
        value = Fraction(0)
        for powers, number in self.terms:
            for atom, power in powers:
                number *= Fraction(values[atom] if isinstance(atom, str) else atom.at(values)) ** power
            value += number
        return value

    def __repr__(self) -> str:
        return f"Form({self})"

    def numbers(self, values: Mapping[str, Number]) -> str:
        """Return the text with these numbers in place of symbols, such as '63/64 · 2 · 7,500,000,000'."""
        return self._joined(lambda powers, number: _numbers(powers, number, values))

    def __str__(self) -> str:
        return self._joined(_term)

    def _joined(self, shown: Callable[[Powers, Fraction], str]) -> str:
        text = ""
        for powers, number in self.terms:
            sign = " - " if number < 0 else " + "
            text += (sign if text else sign.strip(" +")) + shown(powers, abs(number))
        return text or "0"


def _letters(of: Form) -> Iterator[str]:
    for powers, _ in of.terms:
        for atom, _ in powers:
            if isinstance(atom, str):
                yield atom
            else:
                for part in atom.parts:
                    yield from _letters(part)


def _term(powers: Powers, number: Fraction) -> str:
    above = "".join(_power(atom, power) for atom, power in powers if power > 0)
    below = [_power(atom, -power) for atom, power in powers if power < 0]
    if above and number.numerator == 1 and number.denominator > 1:  # (p-1)/(3m), not 0.3333(p-1)/m
        number, below = Fraction(1), [str(number.denominator), *below]
    under = f"/{below[0]}" if len(below) == 1 else f"/({''.join(below)})" if below else ""
    return (figure(number) if number != 1 or not above else "") + above + under


def _numbers(powers: Powers, number: Fraction, values: Mapping[str, Number]) -> str:
    """Format a term: rings first, then the number, the factors (bytes of a number last) and the divisors."""

    def value(atom: Atom) -> str:
        found = Fraction(values[atom]) if isinstance(atom, str) else atom.at(values)
        return str(found) if getattr(atom, "kind", "") == "ring" else figure(found)

    rings = [value(atom) for atom, _ in powers if getattr(atom, "kind", "") == "ring"]
    rest = sorted(
        ((a, power) for a, power in powers if getattr(a, "kind", "") != "ring"), key=lambda one: one[0] in BYTES
    )
    above = [value(atom) + ("" if power == 1 else _RAISED.get(power, f"^{power}")) for atom, power in rest if power > 0]
    below = [value(atom) for atom, power in rest if power < 0]
    factors = [*rings, *([figure(number)] if number != 1 or not (rings or above) else []), *above]
    return " / ".join([" · ".join(factors), *below])


def _power(atom: Atom, power: int) -> str:
    return str(atom) + ("" if power == 1 else _RAISED.get(power, f"^{power}"))


def figure(number: Number) -> str:
    """Format a whole number with thousands separators, and another one with four digits: 12, 1,024, 6.031."""
    return f"{int(number):,}" if Fraction(number).denominator == 1 else f"{float(number):,.4g}"


def form(value: Form | Number) -> Form:
    """Return a number as a form."""
    if isinstance(value, Form):
        return value
    return Form((((), Fraction(value)),) if value else ())


def symbol(letter: str) -> Form:
    return Form(((((letter, 1),), Fraction(1)),))


def symbols(letters: str) -> list[Form]:
    """Return a form for each of these letters, with blanks between."""
    return [symbol(letter) for letter in letters.split()]


def group(kind: str, *parts: Form) -> Form:
    """Return a `Group` as a form."""
    return Form(((((Group(kind, parts), 1),), Fraction(1)),))


def ring(ranks: Form) -> Form:
    """Return (n - 1) / n: the share of a payload that a member of a group of n sends when it goes round once."""
    return group("ring", ranks)


def total(forms: Iterable[Form]) -> Form:
    """Return their sum."""
    return sum(forms, Form())
