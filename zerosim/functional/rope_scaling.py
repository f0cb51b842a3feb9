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
from collections.abc import Mapping
from typing import Any

from zerosim.errors import InputError

Frequencies = tuple[list[float], float]


def inverse_frequencies(
    kind: str, given: Mapping[str, Any], base: float, columns: int, positions: int, seq: int
) -> Frequencies:
    """Return the angle per position of each pair of `columns` columns, and the factor of cosines and sines.

    `given` are the parameters of a config.json's rope_scaling or rope_parameters, which its reader has checked,
    `positions` its max_position_embeddings, `seq` the tokens of a row. Raises: InputError for `columns` that the
    parameters do not fit: a flag may have changed a head's.
    """
    if kind == "linear":
        return [_single(one / given["factor"]) for one in _plain(base, columns)], 1.0
    if kind == "dynamic":
        if columns == 2:
            raise InputError("rope scaling dynamic: a head has one pair of rotated columns, expected more")
        factor, longest = given["factor"], max(seq, positions)
        grown = base * (factor * longest / positions - (factor - 1)) ** (columns / (columns - 2))
        return _plain(grown, columns), 1.0
    if kind == "yarn":
        return _yarn(given, base, columns, positions)
    if kind == "llama3":
        return _llama3(given, base, columns), 1.0
    if kind == "longrope":
        return _longrope(given, base, columns, positions, seq)
    return _plain(base, columns), 1.0


def _single(value: float) -> float:
    """Round to fp32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _powers(base: float, columns: int) -> list[float]:
    """Return base^(2i/columns) of each pair i."""
    return [_single(_single(base) ** _single(i / columns)) for i in range(0, columns, 2)]


def _plain(base: float, columns: int) -> list[float]:
    return [_single(1.0 / power) for power in _powers(base, columns)]


def _yarn(given: Mapping[str, Any], base: float, columns: int, positions: int) -> Frequencies:
    original = given["original_max_position_embeddings"]
    factor = given.get("factor", positions / original)
    low, high = (
        columns * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (given.get("beta_fast", 32.0), given.get("beta_slow", 1.0))
    )
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, columns - 1)
    high = high + 0.001 if low == high else high
    found = []
    for i, power in enumerate(_powers(base, columns)):
        kept = _single(1.0 - min(max(_single(_single(i - _single(low)) / _single(high - low)), 0.0), 1.0))
        divided = _single(_single(1.0 / _single(factor * power)) * _single(1.0 - kept))
        found.append(_single(divided + _single(_single(1.0 / power) * kept)))
    return found, _yarn_factor(given, factor)


def _yarn_factor(given: Mapping[str, Any], factor: float) -> float:
    def scale(times: float) -> float:
        return 0.1 * times * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if (own := given.get("attention_factor")) is not None:
        return float(own)
    above, below = given.get("mscale"), given.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)


def _llama3(given: Mapping[str, Any], base: float, columns: int) -> list[float]:
    factor, original = given["factor"], given["original_max_position_embeddings"]
    low, high = given["low_freq_factor"], given["high_freq_factor"]

    def scaled(rate: float) -> float:
        length = _single(_single(1.0 / rate) * _single(2.0 * math.pi))
        if length < original / high:
            return rate
        if length > original / low or low == high:
            return _single(rate / factor)
        smooth = _single(_single(_single(_single(1.0 / length) * original) - low) / (high - low))
        return _single(_single(_single(_single(1.0 - smooth) * rate) / factor) + _single(smooth * rate))

    return [scaled(rate) for rate in _plain(base, columns)]


def _longrope(given: Mapping[str, Any], base: float, columns: int, positions: int, seq: int) -> Frequencies:
    original = given["original_max_position_embeddings"]
    name = "long_factor" if seq > original else "short_factor"
    each = given[name]
    if len(each) != columns // 2:
        raise InputError(
            f"rope scaling longrope: {name} has {len(each)} numbers: expected {columns // 2}, one for each pair"
        )
    found = [
        _single(1.0 / _single(_single(one) * power)) for one, power in zip(each, _powers(base, columns), strict=True)
    ]
    factor = given.get("factor", positions / original)
    own = given.get("attention_factor")
    if own is None:
        own = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return found, own
