"""The work of a kernel on a device: its engine, and the bytes that it reads and writes.

A GPU would run eager attention (`backends/kernels.py`) as several kernels, so it is several kernels here
too: the record is a GPU's. Each array is read once and written once, whatever a kernel holds in registers or caches.
Only the looked-up rows of a table are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

MATMUL, VECTOR = "matmul", "vector"
LINEAR, DGRAD, WGRAD = "linear", "linear_dgrad", "linear_wgrad"
"""Names in the record of a linear map, and of the products for the gradients of its input and its weight."""
GROUPED, GROUPED_DGRAD, GROUPED_WGRAD = "grouped", "grouped_dgrad", "grouped_wgrad"
"""The same of the maps of all experts, which are one product in the record. Their `shape` ends with the experts."""
IN_8_BITS = ("fp8", "fp8_rows", "fp8_blocks", "mxfp8")
"""Suffixes of a linear map's products in 8 bits, by what numbers share a scale."""
OF_LINEAR = {f"{name}_{form}": name for name in (LINEAR, DGRAD, WGRAD) for form in IN_8_BITS}
"""The products in 8 bits, and their names in the weights' own format."""
ACCUMULATE = "accumulate"
"""A gradient that is added to its sum, or starts it."""
ADD_BIAS, ADD_NORM = "add_bias", "add_norm"
"""A row-parallel map's bias, after its all-reduce; a tensor's share of the gradients' norm."""
MATMULS = frozenset({"matmul", "matmul_add", LINEAR, DGRAD, WGRAD, GROUPED, GROUPED_DGRAD, GROUPED_WGRAD, *OF_LINEAR,
                     "flash_attention", "flash_attention_backward"})  # fmt: skip

# By kernel, the positions of the argument arrays that it fills.
FILLS: dict[str, tuple[int, ...]] = {
    "fill": (0,),
    **dict.fromkeys(("copy", "exp", "log", "sqrt", "tanh", "sum_to", "max_to"), (1,)),
    **dict.fromkeys(("gelu", "gelu_erf", "relu", "silu", "swiglu", "geglu"), (1,)),
    **dict.fromkeys(("column_sum", "finite_probe", "dequantize_nf4", "dequantize_gptq"), (1,)),
    **dict.fromkeys(("add", "subtract", "multiply", "divide", "matmul", "mask_future"), (2,)),
    **dict.fromkeys(("gelu_backward", "gelu_erf_backward", "relu_backward", "sum_squares"), (2,)),
    **dict.fromkeys(("swiglu_backward", "geglu_backward"), (2,)),
    "dropout_mask": (2,),
    "rms_norm_stats": (2,),
    "layer_norm_stats": (2, 3),
    "cross_entropy": (2, 3),
    **dict.fromkeys(("linear", "dropout"), (3,)),
    **dict.fromkeys(("rms_norm", "head_norm"), (3, 4)),
    "sort_rows": (1, 2),
    **dict.fromkeys(("route", "weigh_rows_backward"), (3, 4)),
    "layer_norm": (4, 5, 6),
    **dict.fromkeys(("rms_norm_backward", "head_norm_backward"), (4, 5)),
    "rotary": (5,),
    "sinks_backward": (3,),
    "clamped_swiglu": (3,),
    "clamped_swiglu_backward": (4,),
    "sum_biases": (2,),
    "latent_heads": (5,),
    "latent_heads_backward": (3, 4, 5),
    "cross_entropy_backward": (5,),
    "layer_norm_backward": (5, 6, 7),
    "cross_entropy_shares": (4, 5),
    "flash_attention": (3, 4),
    "flash_attention_backward": (6, 7),
}
# The positions of arrays that it reads and fills.
UPDATES: dict[str, tuple[int, ...]] = {
    "adam": (0, 2, 3),
    "adam8bit": (0, 2, 3),
    "matmul_add": (2,),
    "add_sinks": (0, 1),
    "add_biases": (0,),
}


class KernelWork(NamedTuple):
    """One kernel: its floating-point operations, and bytes of memory.

    `shape` is what else decides its speed: (M, K, N) of a product (M, K) by (K, N); (B, H, K, T, d) of a
    FlashAttention over B rows of T tokens, with H query heads and K key-value heads of width d. Its flops count T²
    scores a head, of which a causal kernel skips half. The scores that it computes, where these are others (in a
    window, without a causal mask, of some of a row's tokens), are a sixth number. Other kernels have no shape.
    """

    name: str
    engine: str
    flops: int
    bytes_read: int
    bytes_written: int
    shape: tuple[int, ...] = ()


def work_of(name: str, flops: int, args: Sequence[Any]) -> KernelWork:
    """Return the work of a kernel called with these arguments. An unlisted kernel fills its last array."""
    if name in BY_ROWS:
        return BY_ROWS[name](flops, *args)
    updates = UPDATES.get(name)
    fills = updates or FILLS.get(name) or _last_array(args)
    sizes = [getattr(arg, "nbytes", 0) for arg in args]
    written = sum([sizes[place] for place in fills])
    read = sum(sizes) - (0 if updates else written)
    return KernelWork(name, MATMUL if name in MATMULS else VECTOR, flops, read, written)


def _last_array(args: Sequence[Any]) -> tuple[int, ...]:
    return tuple(place for place, arg in enumerate(args) if hasattr(arg, "nbytes"))[-1:]


def _embedding(flops: int, ids: Any, table: Any, rows: Any, first: int = 0) -> KernelWork:
    """Count the table's rows that are read."""
    return KernelWork("embedding", VECTOR, flops, ids.nbytes + rows.size * table.itemsize, rows.nbytes)


def _embedding_backward(flops: int, grad: Any, ids: Any, table: Any, first: int = 0) -> KernelWork:
    """Count the zeroing of the table, then the addition of each gradient row to its id's row."""
    rows = grad.size * table.itemsize
    return KernelWork("embedding_backward", VECTOR, flops, grad.nbytes + ids.nbytes + rows, table.nbytes + rows)


BY_ROWS = {"embedding": _embedding, "embedding_backward": _embedding_backward}


class Block(NamedTuple):
    """A part of an attention: B rows, H heads of width d that share K heads of keys, and of values of `value` columns,
    T queries that read some of U keys. `scores` a head are computed; `counted` are those that flops count, masked ones
    included."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    value: int
    scores: int
    counted: int


def flash_block(name: str, products: tuple[int, int], of: Block, itemsize: int, wide: int) -> tuple[KernelWork, ...]:
    """Return a part of an attention as GPUs run it: FlashAttention (`name`, with so many products with keys and with
    values), and then a kernel that merges its result or adds its gradients to those of other parts, in numbers of
    `wide` bytes."""
    flops = 2 * of.batch * of.heads * of.counted * (products[0] * of.width + products[1] * of.value)
    own = of.batch * of.heads * of.queries
    q, y, kv = own * of.width, own * of.value, of.batch * of.kv_heads * of.keys * (of.width + of.value)
    rows, is_forward = own * wide, name == "flash_attention"
    shape = *of[:4], of.width, of.scores
    if is_forward:
        flash = KernelWork(name, MATMUL, flops, (q + kv) * itemsize, y * itemsize + rows, shape)
        return flash, KernelWork("merge_attention", VECTOR, 3 * y, y * (itemsize + wide) + 2 * rows, y * wide + rows)
    flash = KernelWork(name, MATMUL, flops, (q + y + kv) * itemsize + 2 * rows, (q + kv) * itemsize, shape)
    return flash, KernelWork(ACCUMULATE, VECTOR, q + kv, (q + kv) * (itemsize + wide), (q + kv) * wide)


class Product(NamedTuple):
    """A product of scores with keys or with values: its flops, the bytes of q or of the result (`head`), and of k or of
    v (`shared`)."""

    flops: int = 0
    head: int = 0
    shared: int = 0


class EagerWork(NamedTuple):
    """What eager attention computes and moves: its products with keys and with values, the bytes of all `scores`, of
    dropout's `mask` (0 for none) and of a `bias` of the scores. The mask is applied when probabilities are read, unless
    the masked ones are saved (`keeps_dropped`)."""

    keys: Product = Product()
    values: Product = Product()
    scores: int = 0
    mask: int = 0
    keeps_dropped: bool = False
    bias: int = 0

    @property
    def masks(self) -> int:
        """The mask's bytes, where it is read with the probabilities."""
        return self.mask if self.mask and not self.keeps_dropped else 0


def eager_attention(of: EagerWork) -> tuple[KernelWork, ...]:
    """Return softmax(q kᵀ) v as a GPU without a fused kernel runs it: two products, and the kernels between them."""
    (k_flops, q, k), (v_flops, y, v), scores = of.keys, of.values, of.scores
    parts = [
        KernelWork("attention_scores", MATMUL, k_flops, q + k, scores),
        KernelWork("softmax", VECTOR, 0, scores + of.bias, scores),
        KernelWork("attention_values", MATMUL, v_flops, scores + of.masks + v, y),
    ]
    if of.mask and of.keeps_dropped:
        parts.insert(2, KernelWork("attention_dropout", VECTOR, 0, scores + of.mask, scores))
    return tuple(parts)


def eager_attention_backward(of: EagerWork) -> tuple[KernelWork, ...]:
    """Return its backward: a product for each operand of the two, and the softmax's gradient between them, which is
    added up for a bias."""
    (k_flops, q, k), (v_flops, y, v), scores = of.keys, of.values, of.scores
    return (
        KernelWork("attention_dvalues", MATMUL, v_flops, scores + of.masks + y, v),
        KernelWork("attention_dprobs", MATMUL, v_flops, y + v, scores),
        KernelWork("softmax_backward", VECTOR, 0, 2 * scores + of.mask, scores + of.bias),
        KernelWork("attention_dquery", MATMUL, k_flops, scores + k, q),
        KernelWork("attention_dkey", MATMUL, k_flops, scores + q, k),
    )


EAGER_PARTS = tuple(
    part.name
    for parts in (eager_attention(EagerWork(mask=1, keeps_dropped=True)), eager_attention_backward(EagerWork()))
    for part in parts
)
