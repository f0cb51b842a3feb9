"""Memory-centric tiling: a linear map as a sequence of smaller ones, each gathered, used and freed on its own.

The map y = x W + b becomes T maps of 1/T of its outputs, one after the other: y = [x W_1 + b_1, ..., x W_T + b_T]. At
stage 3 by leaf module (`leaf.py`) each tile is a leaf, so 1/T of the map's parameters and of their gradients is on the
device at a time. The products are the same. The input's gradient is a sum over tiles, rounded after each.

Source: ZeRO-Infinity (arXiv 2104.07857), section 5.1.3; DeepSpeed's TiledLinear (runtime/zero/tiling.py) with
out_splits = T.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.functional.tiles import side_by_side
from zerosim.nn.leaf import LeafModule
from zerosim.tensor.tensor import Tensor


class Tiled:
    """A linear map in tiles. Its result has the columns of the whole map's."""

    def __init__(self, leaves: Sequence[LeafModule]) -> None:
        self.leaves = leaves
        weights = [weight for flat in leaves[0].flats for weight in flat.spec.weights]
        self.widths = [w.shape[w.tile.split.dim] for w in weights if w.tile is not None and len(w.shape) == 2]

    def __call__(self, x: Tensor) -> Tensor:
        return side_by_side(x, self.leaves, self.widths)
