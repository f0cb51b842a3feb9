"""The layers around a model's blocks, and dropout: each declares its parameters in its context, and is then a function
of tensors: from x (..., D), D the model's width, to y of the same shape unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from zerosim import functional as F
from zerosim.nn.context import LayerContext
from zerosim.nn.lora import before_kernel, in_autocast
from zerosim.tensor.tensor import Tensor


class Linear:
    """y = x @ weight + bias. Shapes: x (..., D), weight (D, O), bias (O), y (..., O); O is `wide`.

    `std` belongs to the weight's initial normals; the bias starts at 0.
    """

    def __init__(self, here: LayerContext, wide: int, *, std: float) -> None:
        self.weight = here.declare("weight", (here.sizes.hidden, wide), std=std)
        self.bias = here.declare("bias", (wide,))

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Dropout:
    """Drops elements with the model's chance in training, and nothing otherwise; `op` names its random numbers within
    the unit.

    Without `keep_mask` backward recomputes the mask. `of_columns`: a group divides the columns of what it drops.
    """

    def __init__(self, here: LayerContext, op: str, *, keep_mask: bool = True, of_columns: bool = False) -> None:
        self.op = op
        self.chance = here.sizes.dropout
        self.keys = here.keys
        self.rows, self.maps = here.group.rows, here.group.maps if of_columns else None
        self.keep_mask = keep_mask

    def __call__(self, x: Tensor) -> Tensor:
        if self.chance == 0.0 or not x.device.is_training:
            return x
        if self.maps is not None and self.maps.size > 1:
            own = x.shape[-1]
            windows = replace(self.rows, parts=1, index=0).windows(x, self.maps.index * own, self.maps.size * own)
            return F.dropout(x, self.chance, self.keys(self.op), op=self.op, windows=windows)
        return self.rows.dropout(x, self.chance, self.keys(self.op), self.op, keep_mask=self.keep_mask)


class TokenTable:
    """A table (V, D), cut by rows over a group: as an embedding it maps token ids to rows (..., D), times `scale`; as a
    head it computes `logits`, with a bias (V) if the family's head has one. `tile`: the tokens of a chunk of its
    loss."""

    def __init__(self, here: LayerContext, *, embedding: bool = True) -> None:
        self.maps, sizes = here.group.maps, here.sizes
        shape = sizes.vocab, sizes.hidden
        self.splits = self.maps.split_vocabulary(shape)
        self.weight = here.declare("weight", shape, std=here.std, splits=self.splits, embedding=embedding)
        self.bias = None
        if here.decoder.head_bias and (not embedding or sizes.tie_embeddings):  # of a tied head beside its table
            at = here.named("lm_head")
            self.bias = at.declare("bias", shape[:1], splits=self.maps.split_vocabulary(shape[:1]))
        self.scale, self.tile = sizes.embed_scale, here.policy.loss_tile
        self.casts, self.here = before_kernel(here), here

    def __call__(self, ids: Tensor) -> Tensor:
        rows, held = self.maps.embedding(ids.buffer, self.weight, self.splits), self.here.casts
        if self.scale == 1.0:
            return rows
        if held is not None and held.holds_rows and not rows.requires_grad:
            held.keep_input(rows, "embedding")  # a leaf, by enable_input_require_grads: the graph holds it
        return F.scaled(rows, self.scale)

    def logits(self, x: Tensor) -> Tensor:
        """Return x @ weightᵀ + bias. Shapes: x (..., D), result (..., this rank's columns of V)."""
        for cast in self.casts:
            x = cast(x)
        [x], ([weight], bias) = in_autocast(self.here, x, [self.weight], [] if self.bias is None else [self.bias])
        return self.maps.column_linear(x, weight, bias[0] if bias else None, transposed=True)


class Positions:
    """x (B, T, D) + a learned row for each position, then dropout. The table has `positions` rows, and before them
    those that the family leaves out. An encoder adds its first token type to all, and drops after a norm."""

    def __init__(self, here: LayerContext) -> None:
        self.rows, self.first = here.group.rows, here.decoder.first_position
        shape = self.first + here.sizes.positions, here.sizes.hidden
        self.weight = here.declare("weight", shape, std=here.std, summed=self.rows.axes, embedding=True)
        self.types = self.dropout = None
        if (masked := here.decoder.masked) is None:
            self.dropout = Dropout(here, "embd")
        else:
            types = here.sizes.numbers.token_types, here.sizes.hidden
            self.types = here.beside(masked.types).declare("weight", types, std=here.std, summed=self.rows.axes)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.rows.add_positions(x, self.weight, self.first)
        if self.types is not None:
            x = F.add_row(x, self.types)
        return x if self.dropout is None else self.dropout(x)
