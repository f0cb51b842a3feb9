"""Make the tables of kernels (`zerosim/config/presets/kernels/*.toml`) of what `measured/kernels.toml` has.

    python tests/kernel_tables.py write

Every number of a table is a measured one, an average of measured ones, or a measured one of another GPU; `source` says
which. None is of a training step. A test makes the tables again and compares.
"""

from __future__ import annotations

import math
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
TABLES = HERE.parent / "zerosim/config/presets/kernels"
KINDS = ("linear", "linear_dgrad", "linear_wgrad")
FORMS = ("fp8", "fp8_rows", "fp8_blocks", "mxfp8")
GROUPED = ("grouped", "grouped_dgrad", "grouped_wgrad")
Points = list[tuple[float, float]]
SMS = {"A100": 108, "H100": 132}
"""Streaming multiprocessors, which share the tiles of an attention out among them."""


class Product(NamedTuple):
    kind: str
    smallest: int
    us: float  # at the peak
    share: float


def main() -> None:
    if sys.argv[1:] != ["write"]:
        sys.exit(__doc__)
    for name, text in tables().items():
        (TABLES / name).write_text(text, encoding="utf-8")


def tables() -> dict[str, str]:
    """The text of each table, by its file's name."""
    measured = tomllib.loads((HERE / "measured/kernels.toml").read_text(encoding="utf-8"))
    a100, b200 = _products(measured["gemm_a100_pcie"]), _products(measured["gemm_b200"])
    cool, cool_b200 = _products(measured["gemm_h100"]), _products(measured["gemm_b200_xla"])
    burst = _curve(cool, "linear", 1)
    best = {row[0]: row[1] / row[2] for row in measured["gemm_best"]["rows"]}
    occupied = _occupied(measured["attention_a100_pcie"]), _occupied(measured["attention_b200"])
    flash = _flash(measured["flash"], measured["attention_a100_pcie"])
    moved = _moved(measured["memory_bound"])
    sxm, v100 = (best[card] / best["A100 PCIe"] for card in ("A100 SXM", "V100"))
    of_a100 = {kind: _lengthened(points, burst) for kind, points in _grouped(measured["grouped"], "A100 PCIe").items()}
    small = _curve(cool_b200, "linear", 1)
    of_b200 = {kind: _joined(small, points) for kind, points in _grouped(measured["grouped"], "B200").items()}
    plain = {kind: _joined(small, _curve(b200, kind, 1024)) for kind in KINDS}
    own_h100 = _h100(burst, _cube(cool), b200)
    of_h100 = _like_b200(own_h100, of_b200, plain)
    at_best = _gains(cool_b200, _products(measured["gemm_b200_xla_fp8"]))
    gains = _by_form(measured["eight_bits"])
    return {
        "a100-pcie.toml": _text(
            "A100 PCIe 80GB",
            "SimuMax: 183 products of dense layers, by size; below the smallest as XLA's on an H100 fall off",
            {kind: _lengthened(_curve(a100, kind, 512), burst) for kind in KINDS},
            [],
            "FlashAttention, on an A100 SXM; forward and backward parted as Transformer Engine's in SimuMax",
            flash["A100"], occupied[0], moved["A100"],
            "SimuMax: .91 and .808 of 1,600 of 1,935 GB/s",
            "SimuMax: 4 groups of Transformer Engine, smaller ones as XLA's products on an H100 fall off; "
            "permutation .1879 of 1,600 of 1,935 GB/s",
            of_a100,
        ),
        "a100.toml": _text(
            "A100 SXM",
            "SimuMax's 183 products of an A100 PCIe, times the two cards' best products, MAMF's 271.2 to 252.9 TFLOP/s",
            {kind: _times(_lengthened(_curve(a100, kind, 512), burst), sxm) for kind in KINDS},
            [],
            "FlashAttention; forward and backward parted, and few heads, as in SimuMax on an A100 PCIe",
            flash["A100"], occupied[0], moved["A100"],
            "SimuMax, of an A100 PCIe: .91 and .808 of 1,600 of 1,935 GB/s",
            "SimuMax's of an A100 PCIe, times the two cards' best products; its permutation",
            {kind: _times(points, sxm) for kind, points in of_a100.items()},
        ),
        "v100.toml": _text(
            "V100",
            "assumed: an A100 PCIe's, times the two cards' best products, 83 of 125 (arXiv 1803.04014) to 252.9 of 312",
            {kind: _times(_lengthened(_curve(a100, kind, 512), burst), v100) for kind in KINDS},
            [],
            "assumed, an A100's: FlashAttention does not run on a V100",
            flash["A100"], occupied[0], moved["A100"],
            "assumed, an A100 PCIe's (SimuMax)",
            "assumed, an A100 PCIe's, times the two cards' best products; its permutation",
            {kind: _times(points, v100) for kind, points in of_a100.items()},
        ),
        "h100.toml": _text(
            "H100 SXM",
            "XLA: 375 products on a cool device. Assumed, for nobody printed any: those of more than 0.1 ms, and "
            "gradients, have the share of 4096^3 that a B200's have of its own (SimuMax)",
            own_h100,
            [],
            "FlashAttention. Assumed: a causal backward of FA3 and cuDNN loses to one without a mask what its forward "
            "loses (FA2's does within 7 %); Triton's of 2022 loses to an A100's what FA1 does; few heads as on an "
            "A100, by its SMs",
            flash["H100"], tuple(_scaled(side, SMS["H100"] / SMS["A100"]) for side in occupied[0]),
            moved["H100"],
            "torchao: kernels that cast reach .79 of 3,352 GB/s in 150 microseconds and .87 in 570; a loss: an A100",
            "assumed: each expert's product loses to one alone what a B200's does; permutation as on a B200 "
            "beside other kernels that move bytes",
            of_h100,
            "bf16's products, and their speedup on a warm device: Transformer Engine on an H200, blocks torchao. "
            "Assumed: small products gain as on a B200 (XLA), scales of rows cost forward 5 % (pytorch#147971)",
            _eight_bits(own_h100, at_best, gains["H100, H200"]),
        ),
        "b200.toml": _text(
            "B200",
            "SimuMax: 514 products, by size; below the smallest XLA's on a cool device",
            plain,
            _narrow(b200, "linear"),
            "SimuMax: Transformer Engine's causal attention with 64 heads of 128, and fewer",
            _b200(measured["attention_b200"]), occupied[1], moved["B200"],
            "SimuMax: .666 and .3246 of 8,000 GB/s, which are 7,700",
            "SimuMax: 20 groups of Transformer Engine, by the size of one expert's product, smaller ones XLA's alone; "
            "permutation .5008 of 8,000 GB/s",
            of_b200,
            "bf16's products, and their speedup: Transformer Engine on a B300, small ones XLA. Assumed: scales of rows "
            "cost as on an H100, and blocks of 128 are as fast as MXFP8, with which Transformer Engine computes them",
            _eight_bits(plain, at_best, gains["B200"]),
        ),
    }  # fmt: skip


# -- products ---------------------------------------------------------------------------------------------------------
def _products(table: Mapping[str, Any]) -> list[Product]:
    """b m k n of one product each, or XLA's rows of b m n with a rate for each k."""
    peak, found = table["peak_tflops"], []
    for row in table["rows"]:
        if "ks" in table:
            b, m, n, rates = row
            of_row = [("linear", b, m, k, n, rate / peak) for k, rate in zip(table["ks"], rates, strict=True)]
        else:
            kind, b, m, k, n, *_, share = row
            of_row = [(kind, b, m, k, n, share)]
        found += [Product(kind, min(m, k, n), 2e-6 * b * m * k * n / peak, share) for kind, b, m, k, n, share in of_row]
    return found


def _curve(products: Iterable[Product], kind: str, smallest: int) -> Points:
    """The harmonic mean of products within a factor of 2, at their mean size; of fewer than three with the next."""
    groups: dict[int, list[Product]] = {}
    for one in products:
        if one.kind == kind and one.smallest >= smallest and one.us >= 0.5:
            groups.setdefault(math.floor(math.log2(one.us)), []).append(one)
    together: list[list[Product]] = []
    for _, group in sorted(groups.items()):
        if together and len(together[-1]) < 3:
            together[-1] += group
        else:
            together.append(group)
    if len(together[-1]) < 3:
        together[-2:] = [together[-2] + together[-1]]
    return [(_mean_size(group), _harmonic(one.share for one in group)) for group in together]


def _mean_size(group: list[Product]) -> float:
    return math.exp(_average(math.log(one.us) for one in group))


def _lengthened(curve: Points, shape: Points) -> Points:
    """A curve with what lies below its first point as `shape` falls off there."""
    first, share = curve[0]
    return [(us, share * below / _at(shape, first)) for us, below in shape if us < first / 1.5] + curve


def _joined(below: Points, above: Points) -> Points:
    return [point for point in below if point[0] < above[0][0] / 1.5] + above


def _h100(burst: Points, cube: float, b200: list[Product]) -> dict[str, Points]:
    """Below 0.1 ms a cool device's shares; above, those that a B200's have beside its square product of 4096, for a
    gradient beside a forward's."""
    square = _harmonic(one.share for one in b200 if one.kind == "linear" and 50 < one.us < 70 and one.smallest == 4096)
    far = [(us, cube * share / square) for us, share in _curve(b200, "linear", 2048) if us > 100]
    long_run = [point for point in burst if point[0] < 100] + far
    of = {kind: _harmonic(one.share for one in b200 if one.kind == kind and one.us > 100) for kind in KINDS}
    return {kind: _times(long_run, of[kind] / of["linear"]) for kind in KINDS}


def _cube(products: list[Product]) -> float:
    """The share of the best square product of 4,096."""
    return max(one.share for one in products if one.smallest == 4096)


def _grouped(table: Mapping[str, Any], gpu: str) -> dict[str, Points]:
    """Grouped products by the size of one expert's."""
    peak = {"A100 PCIe": 312e12, "B200": 2250e12}[gpu]
    ones = [
        Product(kind, min(rows, inner, outer), 2e6 * rows * inner * outer / peak, share)
        for of, _, rows, inner, outer, *shares in table["rows"]
        if of == gpu
        for kind, share in zip(GROUPED, shares, strict=True)
    ]
    return {kind: _rising(_curve(ones, kind, 1)) for kind in GROUPED}


def _rising(points: Points) -> Points:
    """A curve on which a larger product never ends sooner."""
    kept: Points = []
    for us, share in points:
        kept.append((us, min([share, *(us / below * one for below, one in kept)])))
    return kept


def _like_b200(
    own: Mapping[str, Points], grouped: Mapping[str, Points], plain: Mapping[str, Points]
) -> dict[str, Points]:
    """Curves of grouped products that lose to a GPU's own products what a B200's lose to its own."""
    rows = zip(own.items(), grouped.values(), plain.values(), strict=True)
    return {
        kind: _rising([(us, share * min(1.0, _at(of, us) / _at(alone, us))) for us, share in points])
        for kind, ((_, points), of, alone) in zip(GROUPED, rows, strict=True)
    }


def _gains(in_16: list[Product], in_8: list[Product]) -> Points:
    """By microseconds at the peak of 16 bits: the speedup of the same products in 8. Harmonic means within a factor
    of 2; beyond the last the speedup stays."""
    pairs = zip(in_16, in_8, strict=True)
    faster = [one._replace(share=2 * eight.share / one.share) for one, eight in pairs]  # the peak of 8 bits is twice
    return _curve(faster, "linear", 1)


def _by_form(table: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """By generation and form: the speedup of large products of each kind on a warm device."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for generation, form, kind, _, in_16, in_8, _ in table["rows"]:
        found.setdefault(generation, {}).setdefault(form, {}).setdefault(kind, []).append(in_16 / in_8)
    gains = {
        of: {form: {kind: _harmonic(values) for kind, values in kinds.items()} for form, kinds in forms.items()}
        for of, forms in found.items()
    }
    for forms in gains.values():
        # torchao's gradients are tensorwise products, and kernels that multiply them by scales (ledger/gpu_costs.py)
        forms["fp8_rows"] = {**forms["fp8"], "linear": forms["fp8"]["linear"] * table["rows_of_tensorwise"]}
    blocks = gains["H100, H200"]["fp8_blocks"]
    blocks["linear_dgrad"] = blocks["linear"]  # the same kernel
    gains["B200"]["fp8_blocks"] = gains["B200"]["mxfp8"]
    return gains


def _eight_bits(
    own: Mapping[str, Points], at_best: Points, gains: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, Points]]:
    """By form and kind: by microseconds at the peak of 8 bits, which is twice that of 16, the share of that peak."""
    return {
        form: {
            kind: _rising([(us / 2, share * min(_at(at_best, us), gains[form][kind]) / 2) for us, share in points])
            for kind, points in own.items()
        }
        for form in FORMS
        if form in gains
    }


def _narrow(products: list[Product], kind: str) -> Points:
    """By smallest dimension: what is left of the share of products of that size with dimensions from 1,024 on."""
    curve, groups = _curve(products, kind, 1024), dict[int, list[float]]()
    for one in products:
        if one.kind == kind and one.smallest < 1024:
            groups.setdefault(2 ** math.floor(math.log2(one.smallest)), []).append(one.share / _at(curve, one.us))
    return [(float(side), min(1.0, _harmonic(shares))) for side, shares in sorted(groups.items())] + [(1024.0, 1.0)]


# -- attention --------------------------------------------------------------------------------------------------------
Both = tuple[Points, Points]
"""Forward and backward."""


def _flash(table: Mapping[str, Any], on_a100: Mapping[str, Any]) -> dict[str, dict[str, dict[int, Both]]]:
    """By GPU, implementation and head width: the share of the peak of the products that a causal kernel does."""
    names = {"flash1": "fa1", "flash2": "fa2", "flash3": "fa3"}
    names |= {name: name for name in ("cudnn", "triton", "xformers")}
    rates = {
        (gpu.split()[0], phase, causal, width, names[kernel]): list(zip(table["seq"], values, strict=True))
        for gpu, phase, causal, width, kernel, values in table["rows"]
        if kernel in names
    }
    slower = _slower(on_a100)
    found: dict[str, dict[str, dict[int, Both]]] = {"A100": {}, "H100": {}}
    for (gpu, phase, causal, width, name), values in rates.items():
        forward = rates.get((gpu, "fwd", True, width, name))
        whole = rates.get((gpu, "fwd", False, width, name)), rates.get((gpu, "bwd", False, width, name))
        peak = 312 if gpu == "A100" else 989
        if not causal or width == 256 or (gpu, name) == ("H100", "triton"):
            continue
        if phase == "fwd+bwd" and forward is None:  # parted as Transformer Engine's
            both = [(seq, rate / peak) for seq, rate in values]
            sides = _times(both, (1 + 2.5 / slower) / 3.5), _times(both, (1 + 2.5 / slower) / 3.5 * slower)
        elif phase == "fwd+bwd" and forward is not None:
            pairs = list(zip(forward, values, strict=True))
            back = [(seq, 2.5 / (3.5 / both - 1 / fwd) / peak) for (seq, fwd), (_, both) in pairs]
            sides = [(seq, rate / peak) for seq, rate in forward], back
        elif whole[0] is not None and whole[1] is not None and (gpu, "fwd+bwd", True, width, name) not in rates:
            rows = zip(values, *whole, strict=True)
            back = [(seq, rate / front * behind / peak) for (seq, rate), (_, front), (_, behind) in rows]
            sides = [(seq, rate / peak) for seq, rate in values], back
        else:
            continue
        found[gpu].setdefault(name, {})[width] = sides
    of, old = found["H100"], found["A100"]
    of["triton"] = {  # H100's rows are a later kernel's
        width: tuple(map(_borrowed, old["triton"][width], old["fa1"][width], of["fa1"][width])) for width in (64, 128)
    }
    return found


def _borrowed(own: Points, there: Points, here: Points) -> Points:
    """A curve of another GPU, which loses or gains what one that was measured on both does."""
    rows = zip(own, there, here, strict=True)
    return [(seq, share * other / one) for (seq, share), (_, one), (_, other) in rows]


def _slower(table: Mapping[str, Any]) -> float:
    """A backward's share over a forward's, of 64 heads."""
    shares = {row[0]: row[-1] for row in table["rows"] if row[3] == 64 and row[5] == 128}
    return float(shares["bwd"] / shares["fwd"])


def _b200(table: Mapping[str, Any]) -> dict[str, dict[int, Both]]:
    def side(phase: str) -> Points:
        by_seq: dict[int, list[float]] = {}
        for of, batch, seq, heads, _, width, _, _, share in table["rows"]:
            if of == phase and width == 128 and batch * heads * seq // 128 >= 2048:
                by_seq.setdefault(seq, []).append(share / 2)
        return [(float(seq), _harmonic(shares)) for seq, shares in sorted(by_seq.items())]

    return {"cudnn": {128: (side("fwd"), side("bwd"))}}


def _occupied(table: Mapping[str, Any]) -> Both:
    """By tiles of 128 queries of a head: what is left of the share with 64 heads of 4,096 tokens."""

    def side(phase: str) -> Points:
        by_tiles: dict[int, list[float]] = {}
        for of, batch, seq, heads, _, width, _, _, share in table["rows"]:
            if of == phase and width == 128 and seq == 4096 and heads <= 64:
                by_tiles.setdefault(batch * heads * seq // 128, []).append(share)
        most = _average(by_tiles[max(by_tiles)])
        return [(float(tiles), min(1.0, _average(shares) / most)) for tiles, shares in sorted(by_tiles.items())]

    return side("fwd"), side("bwd")


# -- memory -----------------------------------------------------------------------------------------------------------
class Moved(NamedTuple):
    """A kernel that moves bytes: microseconds for any, the share of the bandwidth beyond, and that of a loss."""

    latency: float
    share: float
    loss: float
    permuted: float


def _moved(table: Mapping[str, Any]) -> dict[str, Moved]:
    real = {"A100 PCIe": 1935, "B200": 7700}
    share = {(gpu, of): nominal * part / real[gpu] for gpu, of, nominal, part, _ in table["rows"]}
    late = {gpu: latency for gpu, of, _, _, latency in table["rows"] if of == "element-wise"}
    permuted = {"A100 PCIe": "permute (MoE)", "B200": "permute fwd (MoE)"}
    found = {
        gpu.split()[0]: Moved(late[gpu], *(share[gpu, of] for of in ("element-wise", "cross entropy", permuted[gpu])))
        for gpu in real
    }
    (few, reached), (many, more) = table["h100_cast_kernels"]  # microseconds, and the share: two points of a line
    beyond = (many * more - few * reached) / (many - few)
    loss, permute = (found["A100"].loss / found["A100"].share, found["B200"].permuted / found["B200"].share)
    found["H100"] = Moved(few - few * reached / beyond, beyond, beyond * loss, beyond * permute)
    return found


# -- points and text --------------------------------------------------------------------------------------------------
def _at(points: Points, x: float) -> float:
    if x <= points[0][0]:
        return points[0][1]
    for (low, below), (high, above) in pairwise(points):
        if x <= high:
            return below + (above - below) * math.log(x / low) / math.log(high / low)
    return points[-1][1]


def _times(points: Points, factor: float) -> Points:
    return [(x, y * factor) for x, y in points]


def _scaled(points: Points, factor: float) -> Points:
    return [(x * factor, y) for x, y in points]


def _harmonic(values: Iterable[float]) -> float:
    return 1 / _average(1 / value for value in values)


def _average(values: Iterable[float]) -> float:
    every = list(values)
    return sum(every) / len(every)


def _text(
    gpu: str,
    products_source: str,
    products: Mapping[str, Points],
    narrow: Points,
    attention_source: str,
    attention: Mapping[str, Mapping[int, Both]],
    occupied: Iterable[Points],
    moved: Moved,
    memory_source: str,
    experts_source: str,
    grouped: Mapping[str, Points],
    eight_bits_source: str = "",
    eight_bits: Mapping[str, Mapping[str, Points]] | None = None,
) -> str:
    def lines() -> Iterator[str]:
        yield "# Made by tests/kernel_tables.py of tests/measured/kernels.toml, which has the sources in full."
        yield f'gpu = "{gpu}"'
        yield "\n[products]  # microseconds at the peak, and the share of it; of the smallest dimension what is left"
        yield f'source = "{products_source}"'
        for kind, points in products.items():
            yield f"{kind} = {_row(points)}"
        yield f"narrow = {_row(narrow or [(1024.0, 1.0)])}"
        yield "\n[attention]  # tokens, and the share of the peak of a causal kernel's products; by tiles what is left"
        yield f'source = "{attention_source}"'
        for name, points in zip(("tiles_forward", "tiles_backward"), occupied, strict=True):
            yield f"{name} = {_row(points)}"
        for name, widths in attention.items():
            yield f"\n[attention.{name}]"
            for width, (forward, backward) in sorted(widths.items()):
                yield f"{width} = {{forward = {_row(forward)}, backward = {_row(backward)}}}"
        yield "\n[memory]  # of a kernel that moves bytes: microseconds for any, and the share of the bandwidth"
        yield f'source = "{memory_source}"'
        yield f"latency_us = {moved.latency:.3g}"
        yield f"share = {moved.share:.3f}"
        yield f"cross_entropy = {moved.loss:.3f}  # of a loss"
        yield "\n[experts]  # of one expert's product: microseconds at the peak, and the share of it in a group"
        yield f'source = "{experts_source}"'
        for kind, points in grouped.items():
            yield f"{kind} = {_row(points)}"
        yield f"permute = {moved.permuted:.3f}  # the share of the bandwidth of kernels that sort rows"
        if eight_bits:
            yield "\n[eight_bits]  # microseconds at the peak of 8 bits, and the share of that; by what shares a scale"
            yield f'source = "{eight_bits_source}"'
            for form, kinds in eight_bits.items():
                yield f"\n[eight_bits.{form}]"
                for kind, points in kinds.items():
                    yield f"{kind} = {_row(points)}"

    return "\n".join(lines()) + "\n"


def _row(points: Points) -> str:
    return "[" + ", ".join(f"[{x:.4g}, {y:.3f}]" for x, y in points if y > 0) + "]"


if __name__ == "__main__":
    main()
