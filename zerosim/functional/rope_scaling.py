"""Scaled rotary positions: each pair's angle per position, for contexts longer than a model was first trained on.

The formulas are those of transformers 5.24, modeling_rope_utils.py, and so are their roundings to fp32: an exponent's
last bit moves a slow pair by a millionth.

    linear     all angles divided by `factor` (positions interpolated)
    dynamic    a base that grows with the length, once that passes the model's positions (NTK-aware)
    yarn       slow pairs divided by `factor`, fast pairs unchanged, a ramp between; cosines and sines multiplied
               (2309.00071)
    llama3     the same by wavelength, with a smooth step (Llama 3.1)
    longrope   each pair divided by its own number, one list for short texts and one for long ones (2402.13753)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from zerosim.errors import InputError, did_you_mean

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
Frequencies = tuple[list[float], float]


def inverse_frequencies(
    kind: str, parameters: Mapping[str, Any], base: float, columns: int, positions: int, seq: int
) -> Frequencies:
    """Return the angle per position of each pair of `columns` columns, and the factor of cosines and sines.

    `parameters` are a config.json's rope_scaling or rope_parameters, `positions` its max_position_embeddings, `seq` the
    tokens of a row. Raises: InputError for an unknown kind, and for a missing or unusable parameter.
    """
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS, f"expected one of {', '.join(KINDS)}")
        raise InputError(f"rope scaling {kind!r}: {hint}")
    given = _Given(kind, parameters)
    if kind == "linear":
        return [_single(one / given.number("factor")) for one in _plain(base, columns)], 1.0
    if kind == "dynamic":
        if columns == 2:
            raise InputError("rope scaling dynamic: a head has one pair of rotated columns, expected more")
        factor, longest = given.number("factor"), max(seq, positions)
        grown = base * (factor * longest / positions - (factor - 1)) ** (columns / (columns - 2))
        return _plain(grown, columns), 1.0
    if kind == "yarn":
        return _yarn(given, base, columns, positions)
    if kind == "llama3":
        return _llama3(given, base, columns), 1.0
    if kind == "longrope":
        return _longrope(given, base, columns, positions, seq)
    return _plain(base, columns), 1.0


class _Given:
    """The parameters of a kind, checked as they are read."""

    def __init__(self, kind: str, values: Mapping[str, Any]) -> None:
        self.kind, self.values = kind, values

    def number(self, name: str, otherwise: float | None = None) -> float:
        value = self.values.get(name)
        value = otherwise if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise InputError(f"rope scaling {self.kind}: {name} {value!r}: expected a number more than 0")
        return float(value)

    def optional(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def each(self, name: str, count: int) -> list[float]:
        """Return one number for each pair."""
        value = self.values.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != count:
            size = len(value) if isinstance(value, Sequence) else value
            raise InputError(
                f"rope scaling {self.kind}: {name} has {size} numbers: expected {count}, one for each pair"
            )
        return [_Given(self.kind, {name: one}).number(name) for one in value]


def _single(value: float) -> float:
    """Round to fp32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _powers(base: float, columns: int) -> list[float]:
    """Return base^(2i/columns) of each pair i."""
    return [_single(_single(base) ** _single(i / columns)) for i in range(0, columns, 2)]


def _plain(base: float, columns: int) -> list[float]:
    return [_single(1.0 / power) for power in _powers(base, columns)]


def _yarn(given: _Given, base: float, columns: int, positions: int) -> Frequencies:
    original = given.number("original_max_position_embeddings")
    factor = given.number("factor", positions / original)
    low, high = (
        columns * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (given.number("beta_fast", 32.0), given.number("beta_slow", 1.0))
    )
    if given.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, columns - 1)
    high = high + 0.001 if low == high else high
    found = []
    for i, power in enumerate(_powers(base, columns)):
        kept = _single(1.0 - min(max(_single(_single(i - _single(low)) / _single(high - low)), 0.0), 1.0))
        divided = _single(_single(1.0 / _single(factor * power)) * _single(1.0 - kept))
        found.append(_single(divided + _single(_single(1.0 / power) * kept)))
    return found, _yarn_factor(given, factor)


def _yarn_factor(given: _Given, factor: float) -> float:
    def scale(times: float) -> float:
        return 0.1 * times * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if (own := given.optional("attention_factor")) is not None:
        return own
    above, below = given.values.get("mscale"), given.values.get("mscale_all_dim")
    return scale(given.number("mscale")) / scale(given.number("mscale_all_dim")) if above and below else scale(1.0)


def _llama3(given: _Given, base: float, columns: int) -> list[float]:
    factor, original = given.number("factor"), given.number("original_max_position_embeddings")
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    if low >= high:
        raise InputError(f"rope scaling llama3: high_freq_factor {high:g}: expected more than low_freq_factor {low:g}")

    def scaled(rate: float) -> float:
        length = _single(_single(1.0 / rate) * _single(2.0 * math.pi))
        if length < original / high:
            return rate
        if length > original / low:
            return _single(rate / factor)
        smooth = _single(_single(_single(_single(1.0 / length) * original) - low) / (high - low))
        return _single(_single(_single(_single(1.0 - smooth) * rate) / factor) + _single(smooth * rate))

    return [scaled(rate) for rate in _plain(base, columns)]


def _longrope(given: _Given, base: float, columns: int, positions: int, seq: int) -> Frequencies:
    original = given.number("original_max_position_embeddings")
    each = given.each("long_factor" if seq > original else "short_factor", columns // 2)
    found = [
        _single(1.0 / _single(_single(one) * power)) for one, power in zip(each, _powers(base, columns), strict=True)
    ]
    factor = given.number("factor", positions / original)
    own = given.optional("attention_factor")
    if own is None:
        own = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return found, own
