"""The attention core: softmax(q kᵀ) v, heads side by side; eager or flash, with or without recompute in backward.

B batch, T tokens, H heads of queries, K heads of keys and values, d width of a head.

Bytes saved for backward, e an element's bytes, c the compute dtype's (2205.05198, section 4.1; 2307.08691):

    eager, lean          qkv, softmax e B H T², mask B H T² (with dropout)
    eager, megatron      and the softmax after dropout e B H T² (with dropout): 5 a s² b in half types
    eager, fp32 softmax  the softmax c B H T²; megatron saves the half-type one too if there is no dropout:
                         7 a s² b with dropout, 6 a s² b without
    flash                qkv, out, log-sum-exp c B H T; no mask: backward recomputes it from its key
    recomputed           qkv

Megatron has the fp32 softmax when its fused kernel is off or does not support the shape (core/fusions/fused_softmax.py,
forward_torch_softmax): softmax saves its fp32 result, and the product saves the half-type copy. Here the fp32 one is
made from the copy, so that no bit depends on it.

Beside them ops declare, as TEMP, the buffers of a kernel that materialises scores. Eager backward declares
the scores' gradient (B, H, T, T). Eager forward declares its scores, but only with megatron, whose kernel writes
its softmax into another buffer (lean's writes it over the scores). Flash backward declares one row
statistic (B, H, T), its `delta`. With the fp32 softmax forward declares the scores in c too, and backward the gradients
of the softmax and of the scores in c.

`Scores` says what else becomes of the scores: their scale, a cap, ALiBi's slopes, a window. Flops and bytes count the
whole square of T² scores, masked ones included, as GPUs' formulas do, but with a window only those that it holds: the
sum of min(i + 1, window) over queries i. Buffers of scores stay square.

A core returns its result and the log-sum-exp of each query's scores, which serve to merge results over several blocks
of keys: with L = log(e^lse1 + e^lse2), out = e^(lse1 - L) out1 + e^(lse2 - L) out2 (2310.01889). Flash saves the
log-sum-exp for backward. Eager computes it only on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from zerosim.backends.forms import SCORES, Scores
from zerosim.backends.kernels import Array, Beside, Dropout, Heads, Probs, Window
from zerosim.device.device import Buffer, Kind
from zerosim.device.work import EagerWork, Product, eager_attention, eager_attention_backward, work_of
from zerosim.dtypes import DType, compute_dtype
from zerosim.errors import InputError
from zerosim.functional.common import Grads, like
from zerosim.functional.dropout import check_chance, dropout_mask
from zerosim.functional.policy import DEFAULT, ActivationPolicy
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Operand, Saved, Tensor, apply


@dataclass(frozen=True, slots=True)
class Core:
    """The inputs of the core besides qkv: a second run with equal inputs gives the same bits."""

    heads: Heads
    dropout: float
    key: tuple[int, int]
    policy: ActivationPolicy
    kv: Tensor | None = None
    bias: Tensor | None = None
    own: RunCore | None = None
    sinks: Operand | None = None

    def run(self, qkv: Tensor) -> Attended:
        """Run the core: its `own`, or the policy's."""
        return (self.own or CORES[self.policy.attention])(qkv, self)

    def width(self, qkv: Readable) -> int:
        """Return the columns of a head of queries and keys."""
        return self.heads.cuts(qkv.shape[2], q_alone=self.kv is not None)[0] // self.heads.queries

    def value(self, qkv: Readable) -> int:
        """Return the columns of a head of values."""
        return self.heads.value or self.width(qkv)

    def pairs(self, qkv: Readable) -> int:
        """Return how many scores of all sequences and heads count as work."""
        batch, tokens, _ = qkv.shape
        of_head = self.heads.form.pairs(tokens) if self.kv is None else tokens * self.kv.shape[1]
        return batch * self.heads.queries * of_head

    def flops(self, qkv: Readable, keys: int = 1, values: int = 1) -> int:
        """Return the flops of so many products of scores with keys (or queries), and with values, over all heads: 2 B H
        T² d each."""
        return 2 * self.pairs(qkv) * (keys * self.width(qkv) + values * self.value(qkv))

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """The tensors beside qkv."""
        return tuple(x for x in (self.kv, self.bias, self.sinks) if x is not None)

    @property
    def arrays(self) -> Beside:
        return Beside(*(None if x is None else x.array for x in (self.kv, self.bias, self.sinks)))

    @property
    def sink_arrays(self) -> tuple[Array, ...]:
        return () if self.sinks is None else (self.sinks.array,)

    def sink_grads(self, lse: Buffer, delta: Buffer) -> Grads:
        """Return the gradient of sinks, if there are some, from each query's log-sum-exp and sum of grad * out."""
        if self.sinks is None or not self.sinks.requires_grad:
            return () if self.sinks is None else (None,)
        dsinks, arrays = self.sinks.new_grad(), (lse.array, delta.array, self.sinks.array)
        lse.device.kernel(3 * lse.numel, lse.device.backend.sinks_backward, *arrays, dsinks.array)
        return (dsinks,)

    def flash_shape(self, qkv: Readable) -> tuple[int, ...]:
        """Return (B, H, K, T, d), as in the record, and the scores of a head where flops do not count a causal T²."""
        batch, tokens, columns = qkv.shape
        form, sizes = self.heads.form, (batch, self.heads.queries, self.heads.keys, tokens)
        exact = () if form.causal and not form.reach(tokens) else (form.pairs(tokens),)
        return *sizes, self.heads.width(columns), *exact

    def scores(self, qkv: Readable) -> tuple[int, int, int, int]:
        """Return the shape of the scores of this rank's heads."""
        batch, tokens, _ = qkv.shape
        return batch, self.heads.queries, tokens, tokens if self.kv is None else self.kv.shape[1]

    def result_shape(self, qkv: Tensor) -> tuple[int, int, int]:
        batch, tokens, _ = qkv.shape
        return batch, tokens, self.value(qkv) * self.heads.queries

    def result(self, qkv: Tensor) -> Buffer:
        return like(qkv, *self.result_shape(qkv))


class CoreRule(Protocol):
    """A core's backward rule: what it saves, and the log-sum-exp of each query's scores, (B, H, T), on demand."""

    def saved(self) -> Saved: ...
    def log_sum_exp(self) -> Buffer: ...
    def backward(self, grad: Buffer) -> Grads: ...


class Attended(NamedTuple):
    """A core's output: its result (B, T, H d) and its rule."""

    out: Buffer
    rule: CoreRule

    @property
    def lse(self) -> Buffer:
        """Return log(sum(exp(scores))) of each query, (B, H, T) in the compute dtype, before dropout."""
        return self.rule.log_sum_exp()


@dataclass(frozen=True, slots=True)
class Eager:
    """Saves qkv, the softmax (B, H, T, T) and, with dropout, its 1-byte mask; `dropped` and `wide`, the fp32 softmax,
    if they are saved. `probs` is None if only `wide` is saved."""

    qkv: Readable
    core: Core
    probs: Buffer | None
    mask: Buffer | None
    dropped: Buffer | None
    wide: Buffer | None = None

    def saved(self) -> Saved:
        kept: Saved = {
            "q, k, v": self.qkv,
            "k, v": self.core.kv,
            "softmax": self.probs,
            "mask": self.mask,
            "dropped softmax": self.dropped,
        }
        return {**kept, "fp32 softmax": self.wide}

    def cast(self) -> Buffer:
        """Return the half-type softmax, cast from `wide`."""
        assert self.wide is not None
        return _copied(self.wide, self.qkv.dtype, Kind.TEMP)

    def work(self) -> EagerWork:
        """Return what the products and the kernels between them compute and move."""
        core, qkv = self.core, self.qkv
        heads, pairs, kv = core.heads, core.pairs(qkv), qkv if core.kv is None else core.kv
        own, read = heads.queries * qkv.shape[1], heads.keys * kv.shape[1]
        columns = [qkv.dtype.itemsize * qkv.shape[0] * width for width in (core.width(qkv), core.value(qkv))]
        mask, scores = 0 if self.mask is None else pairs, pairs * qkv.dtype.itemsize
        bias = 0 if core.bias is None else core.bias.buffer.nbytes
        of_keys, of_values = (
            Product(core.flops(qkv, *of), column * own, column * read)
            for of, column in zip(((1, 0), (0, 1)), columns, strict=True)
        )
        return EagerWork(of_keys, of_values, scores, mask, self.dropped is not None, bias)

    def log_sum_exp(self) -> Buffer:
        """Return flash's log-sum-exp of the same scores: 4 more operations a product, and a result that is
        discarded."""
        return flash(Tensor(self.qkv.buffer), self.core).lse

    def backward(self, grad: Buffer) -> Grads:
        device, core = grad.device, self.core
        dqkv, shape = self.qkv.new_grad(), core.scores(self.qkv)
        workspace = device.alloc(shape, self.qkv.dtype, Kind.TEMP)
        held = [] if self.wide is None else [device.alloc(shape, self.wide.dtype, Kind.TEMP) for _ in range(2)]
        if self.probs is None:
            held.append(self.cast())
        kept = _probs(self, held[-1] if self.probs is None else self.probs)
        arrays = grad.array, self.qkv.array, core.heads, kept, workspace.array, dqkv.array
        grads = {x: x.new_grad() for x in core.inputs if x is core.kv or x.requires_grad}
        into = Beside(*(grads[x].array if x in grads else None for x in (core.kv, core.bias, core.sinks)))
        work = eager_attention_backward(self.work())
        device.kernels(work, device.backend.attention_backward, *arrays, core.arrays, into)
        return dqkv, *(grads.get(x) for x in core.inputs)


def eager(qkv: Tensor, core: Core) -> Attended:
    """Run the core that materialises its scores (B, H, T, T)."""
    device, shape = qkv.device, core.scores(qkv)
    is_megatron = core.policy.saves == "megatron"
    out, probs = core.result(qkv), like(qkv, *shape)
    each = shape[2] * shape[3]
    own, whole = core.heads.queries * each, core.heads.whole * each
    windows = [Window(core.heads.first * each, own, whole)] if whole > own else []
    mask = dropout_mask(qkv, shape, core.dropout, core.key, windows)
    dropped = like(qkv, *shape) if is_megatron and mask is not None else None
    _scores = device.alloc(shape, qkv.dtype, Kind.TEMP) if is_megatron else None  # only declared: see above
    rule = Eager(held(qkv), core, probs, mask, dropped)
    arrays = qkv.array, core.heads, _probs(rule, probs), out.array, core.arrays
    device.kernels(eager_attention(rule.work()), device.backend.attention, *arrays)
    if core.policy.fp32_softmax and qkv.dtype.is_half:
        _wide_scores = device.alloc(shape, compute_dtype(qkv.dtype), Kind.TEMP)
        wide = _copied(probs, compute_dtype(qkv.dtype), Kind.ACTIVATION)
        rule = Eager(held(qkv), core, probs if is_megatron and mask is None else None, mask, dropped, wide)
    return Attended(out, rule)


def _probs(rule: Eager, probs: Buffer) -> Probs:
    mask, dropped = (None if kept is None else kept.array for kept in (rule.mask, rule.dropped))
    return Probs(probs.array, mask, 1.0 - rule.core.dropout, dropped)


def _copied(source: Buffer, dtype: DType, kind: Kind) -> Buffer:
    result = source.device.alloc(source.shape, dtype, kind)
    source.device.kernel(0, source.device.backend.copy, source.array, result.array)
    return result


@dataclass(frozen=True, slots=True)
class Flash:
    """Saves qkv, its result and the log-sum-exp of each query's scores (B, H, T), in the compute dtype."""

    qkv: Readable
    core: Core
    out: Buffer
    lse: Buffer

    def saved(self) -> Saved:
        return {"q, k, v": self.qkv, "output": self.out, "log-sum-exp": self.lse}

    def log_sum_exp(self) -> Buffer:
        return self.lse

    def backward(self, grad: Buffer) -> Grads:
        """Compute the gradient: ten operations a product where eager has eight, because flash recomputes the scores."""
        device, core = grad.device, self.core
        dqkv = self.qkv.new_grad()
        delta = device.alloc(self.lse.shape, self.lse.dtype, Kind.TEMP)
        chance, kept = Dropout(core.key, core.dropout), (self.out.array, self.lse.array)
        arrays = grad.array, self.qkv.array, core.heads, chance, *kept, delta.array, dqkv.array
        work = work_of("flash_attention_backward", core.flops(self.qkv, 3, 2), arrays)
        work = work._replace(shape=core.flash_shape(self.qkv))
        device.kernels((work,), device.backend.flash_attention_backward, *arrays)
        return dqkv, *core.sink_grads(self.lse, delta)


def flash(qkv: Tensor, core: Core) -> Attended:
    """Run the core that never materialises scores."""
    device, (batch, tokens, _) = qkv.device, qkv.shape
    out = core.result(qkv)
    lse = like(qkv, batch, core.heads.queries, tokens, dtype=compute_dtype(qkv.dtype))
    arrays = qkv.array, core.heads, Dropout(core.key, core.dropout), out.array, lse.array
    work = work_of("flash_attention", core.flops(qkv), arrays)._replace(shape=core.flash_shape(qkv))
    device.kernels((work,), device.backend.flash_attention, *arrays, *core.sink_arrays)
    return Attended(out, Flash(held(qkv), core, out, lse))


RunCore = Callable[[Tensor, Core], Attended]
CORES: Mapping[str, RunCore] = MappingProxyType({"eager": eager, "flash": flash})


@dataclass(frozen=True, slots=True)
class RecomputedCore:
    """Saves its inputs; backward runs the core a second time (2205.05198, section 5)."""

    qkv: Readable
    core: Core

    def saved(self) -> Saved:
        return {"q, k, v": self.qkv, "k, v": self.core.kv, "bias": self.core.bias}

    def backward(self, grad: Buffer) -> Grads:
        return self.core.run(Tensor(self.qkv.buffer)).rule.backward(grad)


def attention(
    qkv: Tensor,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    first_head: int = 0,
    whole_heads: int = 0,
    dropout: float = 0.0,
    key: tuple[int, int] = (0, 0),
    policy: ActivationPolicy = DEFAULT,
    form: Scores = SCORES,
    kv: Tensor | None = None,
    bias: Tensor | None = None,
    run: RunCore | None = None,
    value: int = 0,
    sinks: Operand | None = None,
) -> Tensor:
    """Compute causal self-attention, heads side by side, scale 1/sqrt(d). `form` changes scores and what queries read.

    Shapes: qkv (B, T, (H + 2K) d) with columns q|k|v, each cut into its heads; result (B, T, H d).
    Query head i reads head i // (H/K) of keys and values (grouped queries, 2305.13245); K is H unless
    `num_kv_heads` says otherwise. `dropout` is the chance that a probability is dropped, `key` names
    its random numbers. If these heads are some of the model's `whole_heads`, from `first_head` on, dropout is that of
    the whole. With a `value`, heads of values have so many columns, and qkv (H + K) d + K value. Eager attention may
    read keys and values `kv` (B, S, 2K d) of another sequence, for queries alone, q (B, T, H d), and add a trained
    `bias` (H, T, S) to the scores. `sinks` (H), trained, are one more score of each query of a head, whose value is 0.
    `run`: a core in place of the policy's.

    Raises: InputError for heads that do not divide the columns or each other, and for scores that cannot be.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    columns = qkv.shape[-1]
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise InputError(
            f"attention: {num_kv_heads} heads of keys and values do not divide {num_heads} of queries: "
            "choose as many, or a divisor"
        )
    each = num_heads + (0 if kv is not None else num_kv_heads if value else 2 * num_kv_heads)
    if (columns - value * num_kv_heads) % each:
        raise InputError(
            f"attention: {num_heads} heads of queries and {num_kv_heads} each of keys and values "
            f"do not divide {columns} columns"
        )
    if form.window < 0 or form.cap < 0 or (form.window and not form.causal):
        raise InputError(f"attention: {form}: expected a cap and a window of at least 0, and a window only if causal")
    check_chance(dropout)
    if policy.attention != "eager" and (kv is not None or bias is not None):
        raise InputError("attention: flash reads no other sequence and no bias; choose eager")
    heads = Heads(num_heads, num_kv_heads, first_head, whole_heads, form, value)
    core = Core(heads, dropout, key, policy, kv, bias, run, sinks)
    rule: CoreRule | RecomputedCore
    out, rule = core.run(qkv)
    if "core_attn" in policy.again.parts:
        rule = RecomputedCore(held(qkv), core)
    return apply(rule, out, qkv, *core.inputs, op="attention", saved=rule.saved())
