"""Measured kernels of one GPU: the shares of its peaks that they reach, as tables (`kernels/*.toml`).

A table has five parts, each with its source:

    products    for a forward product and those of its backward: the share of the peak by microseconds at the peak.
                `narrow`: the factor on that share, by a product's smallest dimension
    attention   for each implementation and head width, forward and backward: the share of the peak that a causal
                kernel reaches in its products, by tokens; `tiles_forward`, `tiles_backward`: the factor on it, by
                tiles of 128 queries of a head, which are divided among the multiprocessors
    memory      a kernel that moves bytes takes a latency, and its bytes at a share of the bandwidth, a loss at another
    experts     for the products of all experts of a layer in one call: the share of the peak by microseconds of one
                expert's product at the peak. `permute`: the share of the bandwidth of kernels that sort rows. A table
                without this part takes `products` of one expert's size, and `memory`
    eight_bits  for products in 8 bits, by what numbers share a scale: the share of the peak of 8 bits, by microseconds
                at that peak. A table without this part, or without one of its forms, takes `products`

A user's own GPU may have such a table in its TOML file, as [kernels] (`hardware.py`).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

from zerosim.errors import InputError, did_you_mean

PRODUCTS = ("linear", "linear_dgrad", "linear_wgrad")
GROUPED = ("grouped", "grouped_dgrad", "grouped_wgrad")
FORMS = ("fp8", "fp8_rows", "fp8_blocks", "mxfp8")
"""Suffixes of products in 8 bits (`device/work.py`)."""
FLASH_KERNELS = ("fa1", "fa2", "fa3", "cudnn", "triton", "xformers")
EFFICIENT = "xformers"
"""PyTorch's memory-efficient kernel, for GPUs without FlashAttention."""
US = 1e-6


@dataclass(frozen=True, slots=True)
class Curve:
    """y by x, ascending in x. Between two points y is linear in the logarithm of x; beyond the ends it is constant."""

    points: tuple[tuple[float, float], ...]

    def at(self, x: float) -> float:
        first, last = self.points[0], self.points[-1]
        if x <= first[0]:
            return first[1]
        if x >= last[0]:
            return last[1]
        for (low, below), (high, above) in pairwise(self.points):
            if x <= high:
                return below + (above - below) * math.log(x / low) / math.log(high / low)
        raise AssertionError(x)


@dataclass(frozen=True, slots=True)
class Reached:
    """A kernel's share of a peak, by its seconds at the peak, ascending.

    Between two points its seconds follow a power law. A smaller kernel than the first takes as long as the first.
    """

    points: tuple[tuple[float, float], ...]

    def seconds(self, at_peak: float) -> float:
        """Return the seconds of a kernel from its seconds at the peak."""
        (first, lowest), (last, highest) = self.points[0], self.points[-1]
        if at_peak <= first:
            return first / lowest
        if at_peak >= last:
            return at_peak / highest
        for (low, below), (high, above) in pairwise(self.points):
            if at_peak <= high:
                part = math.log(at_peak / low) / math.log(high / low)
                return low / below * math.exp(math.log(high / above / (low / below)) * part)
        raise AssertionError(at_peak)

    @property
    def most(self) -> float:
        """The highest share."""
        return max(share for _, share in self.points)


@dataclass(frozen=True, slots=True)
class Flash:
    """One implementation of FlashAttention at one head width: shares of the peak by tokens."""

    forward: Curve
    backward: Curve


@dataclass(frozen=True, slots=True)
class KernelTables:
    """One GPU's tables. `products` by kernel, `grouped` and `eight_bits` too; `attention` by implementation and
    head width; `sources` by part."""

    gpu: str
    products: Mapping[str, Reached]
    narrow: Curve
    attention: Mapping[str, Mapping[int, Flash]]
    tiles: Flash
    latency_s: float
    moved: float
    cross_entropy: float
    sources: Mapping[str, str]
    grouped: Mapping[str, Reached]
    permuted: float
    eight_bits: Mapping[str, Reached] = field(default_factory=dict)

    def flash_kernel(self, asked: str) -> str:
        """Return the implementation of FlashAttention to time: the given one, or one that was measured here."""
        return next(name for name in (asked, "fa2", *self.attention) if name in self.attention)

    def flash(self, kernel: str, width: int) -> Flash:
        """Return the nearest head width's. Raises: KeyError for an implementation that was not measured."""
        widths = self.attention[kernel]
        return widths[min(widths, key=lambda known: (abs(math.log(known / width)), known))]


def ideal_tables(gpu: str) -> KernelTables:
    """Return tables of a GPU whose kernels all reach its peaks, without latency: for arithmetic on paper."""
    whole, peak = Curve(((1.0, 1.0),)), Reached(((1e-30, 1.0),))
    flash = {kernel: {128: Flash(whole, whole)} for kernel in FLASH_KERNELS}
    sources = dict.fromkeys(("products", "attention", "memory"), "the peaks")
    products, grouped = dict.fromkeys(PRODUCTS, peak), dict.fromkeys(GROUPED, peak)
    return KernelTables(gpu, products, whole, flash, Flash(whole, whole), 0.0, 1.0, 1.0, sources, grouped, 1.0)


@cache
def packaged_tables(name: str) -> KernelTables:
    """Return the table of one of zerosim's own GPUs, by the name of its file."""
    text = files("zerosim.config.presets").joinpath("kernels", f"{name}.toml").read_text(encoding="utf-8")
    return read_tables(f"kernels of {name}", tomllib.loads(text))


def read_tables(where: str, values: Mapping[str, Any]) -> KernelTables:
    """Read a table of the file that `where` names. Raises: InputError in one line, with the key."""
    _check_keys(where, "", values, ("gpu", "products", "attention", "memory"), also=("experts", "eight_bits"))
    products, attention, memory = (_part(where, values, part) for part in ("products", "attention", "memory"))
    _check_keys(where, "products.", products, ("source", *PRODUCTS, "narrow"))
    _check_keys(where, "memory.", memory, ("source", "latency_us", "share", "cross_entropy"))
    fixed = ("source", "tiles_forward", "tiles_backward")
    _check_keys(where, "attention.", attention, fixed, also=FLASH_KERNELS)
    sources = {"products": products["source"], "attention": attention["source"], "memory": memory["source"]}
    experts = _part(where, values, "experts") if "experts" in values else {}
    if experts:
        _check_keys(where, "experts.", experts, ("source", *GROUPED, "permute"))
        sources["experts"] = experts["source"]
    eight_bits = _part(where, values, "eight_bits") if "eight_bits" in values else {}
    if eight_bits:
        _check_keys(where, "eight_bits.", eight_bits, ("source",), also=FORMS)
        sources["eight_bits"] = eight_bits["source"]
    for name, text in {"gpu": values["gpu"], **{f"{part}.source": text for part, text in sources.items()}}.items():
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{where}: {name} {text!r}: expected text, which says where the figures come from")
    curves = {kind: _reached(where, f"products.{kind}", products[kind]) for kind in PRODUCTS}
    moved = _share(where, "memory.share", memory["share"])
    return KernelTables(
        values["gpu"],
        curves,
        _curve(where, "products.narrow", products["narrow"]),
        {
            kernel: _widths(where, f"attention.{kernel}", attention[kernel])
            for kernel in FLASH_KERNELS
            if kernel in attention
        },
        Flash(*(_curve(where, f"attention.{key}", attention[key]) for key in fixed[1:])),
        _latency(where, "memory.latency_us", memory["latency_us"]) * US,
        moved,
        _share(where, "memory.cross_entropy", memory["cross_entropy"]),
        sources,
        {
            kind: _reached(where, f"experts.{kind}", experts[kind]) if experts else curves[alone]
            for kind, alone in zip(GROUPED, PRODUCTS, strict=True)
        },
        _share(where, "experts.permute", experts["permute"]) if experts else moved,
        _in_8_bits(where, eight_bits),
    )


def _in_8_bits(where: str, forms: Mapping[str, Any]) -> dict[str, Reached]:
    """Return the curves of products in 8 bits, by their names in the record, such as linear_fp8."""
    found = dict[str, Reached]()
    for form in FORMS:
        if form in forms:
            kinds = _part(where, forms, form, "eight_bits.")
            _check_keys(where, f"eight_bits.{form}.", kinds, PRODUCTS)
            for kind in PRODUCTS:
                found[f"{kind}_{form}"] = _reached(where, f"eight_bits.{form}.{kind}", kinds[kind])
    return found


def _part(where: str, values: Mapping[str, Any], name: str, within: str = "") -> Mapping[str, Any]:
    if not isinstance(values[name], dict):
        raise InputError(f"{where}: {within}{name}: expected a table")
    return values[name]  # type: ignore[no-any-return]


def _check_keys(
    where: str, prefix: str, values: Mapping[str, Any], keys: Sequence[str], also: Sequence[str] = ()
) -> None:
    for key in values:
        if key not in (*keys, *also):
            hint = did_you_mean(key, (*keys, *also), f"known keys: {', '.join((*keys, *also))}")
            raise InputError(f"{where}: unknown key {prefix}{key}: {hint}")
    if missing := [key for key in keys if key not in values]:
        raise InputError(f"{where}: missing {prefix}{missing[0]}: all of {', '.join(keys)} are needed")


def _widths(where: str, key: str, values: Any) -> Mapping[int, Flash]:
    found = dict[int, Flash]()
    if not isinstance(values, dict) or not values:
        raise InputError(f"{where}: {key}: expected a table by head width, such as 128 = {{forward, backward}}")
    for width, sides in values.items():
        if not width.isdecimal() or not int(width) or not isinstance(sides, dict):
            raise InputError(f"{where}: {key}.{width}: expected a head width with forward and backward")
        _check_keys(where, f"{key}.{width}.", sides, ("forward", "backward"))
        forward, backward = (_curve(where, f"{key}.{width}.{side}", sides[side]) for side in ("forward", "backward"))
        found[int(width)] = Flash(forward, backward)
    return found


def _reached(where: str, key: str, value: Any) -> Reached:
    points = _curve(where, key, value).points
    for (low, below), (high, above) in pairwise(points):
        if high / above < low / below:
            raise InputError(
                f"{where}: {key}: [{high:g}, {above:g}] after [{low:g}, {below:g}] takes less time, but more work "
                "never ends sooner"
            )
    return Reached(tuple((us * US, share) for us, share in points))


def _curve(where: str, key: str, value: Any) -> Curve:
    if not isinstance(value, list) or not value or not all(isinstance(one, list) and len(one) == 2 for one in value):
        raise InputError(f"{where}: {key}: expected a list of [size, share], such as [[10, 0.4], [1000, 0.7]]")
    for x, share in value:
        if not _is_number(x) or x <= 0:
            raise InputError(f"{where}: {key}: size {x!r}: expected a number more than 0")
        _share(where, key, share)
    for (low, _), (high, _) in pairwise(value):
        if high <= low:
            raise InputError(f"{where}: {key}: {high:g} after {low:g}: sizes ascend")
    return Curve(tuple((float(x), float(share)) for x, share in value))


def _latency(where: str, key: str, value: Any) -> float:
    if not _is_number(value) or value < 0:
        raise InputError(f"{where}: {key} {value!r}: expected microseconds, at least 0")
    return float(value)


def _share(where: str, key: str, value: Any) -> float:
    if not _is_number(value) or not 0 < value <= 1:
        raise InputError(f"{where}: {key}: share {value!r}: expected a number more than 0, at most 1")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
