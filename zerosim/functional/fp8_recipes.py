"""How libraries multiply in 8 bits: the number format and the scales of each operand of a linear map's three products.

    product       result       operands, (rows, inner) each          inner
    forward       y            x (M, I)        weight (O, I)         I
    input grad    x's          dy (M, O)       weight's T (I, O)     O
    weight grad   weight's     dy's T (O, M)   x's T (I, M)          M, the tokens

Sources: torchao 0.18.0 (float8/config.py, float8_linear.py, prototype/mx_formats/mx_linear.py,
prototype/blockwise_fp8_training/linear.py), Transformer Engine 2 (common/recipe/__init__.py, pytorch/module/linear.py),
DeepSeek-V3 (arXiv 2412.19437, 3.3).
"""

from __future__ import annotations

from typing import NamedTuple

from zerosim.tensor.float8 import E4M3, E5M2, Casting

WHOLE, ROWS, TILES, SQUARES, MX = (0, 0), (1, 0), (1, 128), (128, 128), (1, 32)


class Operands(NamedTuple):
    """The castings of a product's two operands."""

    left: Casting
    right: Casting


class History(NamedTuple):
    """Delayed scaling: each operand's amax of so many steps, of which the largest or the newest gives the scale."""

    length: int
    algo: str


class Products(NamedTuple):
    """How a map multiplies.

    forward, dgrad, wgrad   the castings, as in the table above. Without wgrad that product is not in 8 bits
    name          the products' suffix in the record: their speed depends on what their scales are of
    saves_codes   x's codes are saved for backward, not x
    caches        a weight's codes, both ways, are made once a step and stay
    gathers_codes  sequence parallelism gathers codes, not x
    stores_codes   weights are stored and sent as codes, with one scale each
    history       of delayed scaling
    """

    forward: Operands
    dgrad: Operands
    wgrad: Operands | None
    name: str
    saves_codes: bool = False
    caches: bool = False
    gathers_codes: bool = False
    stores_codes: bool = False
    history: History | None = None


def torchao(scaling: str, rounding: str, *, exact_wgrad: bool) -> Products:
    """Return torchao's products. It saves x as it is, and casts weights in each use."""
    if scaling == "tensorwise":
        one, grad = Casting(E4M3, WHOLE), Casting(E5M2, WHOLE)
        made = Products(Operands(one, one), Operands(grad, one), Operands(grad, one), "fp8", gathers_codes=True)
    elif scaling == "rowwise":
        row, whole = (Casting(E4M3, block, power_of_two=True) for block in (ROWS, WHOLE))
        both = Operands(row, row)
        made = Products(both, Operands(row, whole) if exact_wgrad else both, both, "fp8_rows")
    elif scaling == "blockwise":
        tile, square = Casting(E4M3, TILES), Casting(E4M3, SQUARES)
        made = Products(Operands(tile, square), Operands(tile, square), Operands(tile, tile), "fp8_blocks")
    else:
        each = Casting(E4M3, MX, "e8m0", rounding)
        both = Operands(each, each)
        made = Products(both, both, both, "mxfp8")
    return made._replace(wgrad=None, gathers_codes=False) if exact_wgrad else made


def transformer_engine(
    scaling: str, form: str, history: History, margin: int, *, exact_wgrad: bool, caches: bool
) -> Products:
    """Return Transformer Engine's products. It saves x's codes."""
    of_grad = E5M2 if form == "hybrid" else E4M3
    if scaling in ("delayed", "tensorwise"):
        one, grad = (Casting(kind, WHOLE, margin=margin, rule="te") for kind in (E4M3, of_grad))
        made = Products(Operands(one, one), Operands(grad, one), Operands(grad, one), "fp8")
    elif scaling == "blockwise":
        tile, square = (Casting(E4M3, block, power_of_two=True, rule="te") for block in (TILES, SQUARES))
        grad = tile._replace(kind=of_grad)
        made = Products(Operands(tile, square), Operands(grad, square), Operands(grad, tile), "fp8_blocks")
    else:
        each = Casting(E4M3, MX, "e8m0", "rceil", rule="te")
        grad = each._replace(kind=of_grad)
        made = Products(Operands(each, each), Operands(grad, each), Operands(grad, each), "mxfp8")
    made = made._replace(saves_codes=not exact_wgrad, caches=caches, gathers_codes=not exact_wgrad)
    return made._replace(wgrad=None if exact_wgrad else made.wgrad, history=history if scaling == "delayed" else None)


def deepseek() -> Products:
    """Return DeepSeek-V3's products: x's codes are saved, and weights are cast in each use."""
    tile, square = (Casting(E4M3, block, rule="deepseek") for block in (TILES, SQUARES))
    forward = Operands(tile, square)
    return Products(forward, forward, Operands(tile, tile), "fp8_blocks", saves_codes=True, gathers_codes=True)
