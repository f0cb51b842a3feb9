"""Multi-head latent attention's q|k|v on the device, rotated and put side by side (`numpy/llama.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from zerosim.backends.cuda.arrays import dense, result_for
from zerosim.backends.cuda.attention import common
from zerosim.backends.cuda.rotary import RATE_OF_BASE, with_rates
from zerosim.backends.cuda.types import raw, run_threads
from zerosim.backends.forms import Rope
from zerosim.backends.kernels import Array

_HEADS = (
    RATE_OF_BASE
    + r"""
// A thread turns one pair of columns in every head of one token, and copies some of the others. Of a head of q|k the
// last 2 * half columns turn, behind `plain` ones; one of values has `value`.
struct Turned {
    long long one, other;
    __device__ Turned(long long pair, long long half, int interleaved)
        : one(interleaved ? 2 * pair : pair), other(interleaved ? 2 * pair + 1 : pair + half) {}
};
#define SIZES \
    long long first, long long tokens, long long rows, long long heads, long long plain, long long half, \
    long long value, double base, double factor, int interleaved
#define PLACED \
    using V = typename wide<T>::type; \
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; \
    const long long row = i / half, pair = i % half; \
    if (row >= rows) return; \
    const V rate = rate_of<V>(pair, half, base); \
    const double angle = V(first + row % tokens) * rate; \
    const V c = V(cos(angle)) * V(factor), s = V(sin(angle)) * V(factor); \
    const long long width = plain + 2 * half, both = plain + value, keys = heads * width; \
    const Turned at(pair, half, interleaved);

template <class T, class U> __global__ void latent_heads(const T* q, const T* kv, const T* turned, U* out, SIZES) {
    PLACED
    const T *from_q = q + row * keys, *from_kv = kv + row * heads * both, *shared = turned + row * 2 * half;
    U *to_q = out + row * (2 * keys + heads * value), *to_k = to_q + keys, *to_v = to_k + keys;
    const V a = wide_of(shared[at.one]), b = wide_of(shared[at.other]), one = a * c - b * s, other = b * c + a * s;
    for (long long head = 0; head < heads; ++head) {
        const long long start = head * width, behind = start + plain, pairs = head * both;
        const V x = wide_of(from_q[behind + at.one]), y = wide_of(from_q[behind + at.other]);
        store(x * c - y * s, to_q[behind + at.one]);
        store(y * c + x * s, to_q[behind + at.other]);
        store(one, to_k[behind + at.one]);
        store(other, to_k[behind + at.other]);
        for (long long j = pair; j < plain; j += half) {
            store(wide_of(from_q[start + j]), to_q[start + j]);
            store(wide_of(from_kv[pairs + j]), to_k[start + j]);
        }
        for (long long j = pair; j < value; j += half)
            store(wide_of(from_kv[pairs + plain + j]), to_v[head * value + j]);
    }
}

template <class T, class U> __global__ void latent_heads_backward(const T* grad, U* dq, U* dkv, U* dturned, SIZES) {
    PLACED
    const T *of_q = grad + row * (2 * keys + heads * value), *of_k = of_q + keys, *of_v = of_k + keys;
    U *to_q = dq + row * keys, *to_kv = dkv + row * heads * both, *shared = dturned + row * 2 * half;
    V one = 0, other = 0;
    for (long long head = 0; head < heads; ++head) {
        const long long start = head * width, behind = start + plain, pairs = head * both;
        const V x = wide_of(of_q[behind + at.one]), y = wide_of(of_q[behind + at.other]);
        store(x * c + y * s, to_q[behind + at.one]);
        store(y * c - x * s, to_q[behind + at.other]);
        one += wide_of(of_k[behind + at.one]);
        other += wide_of(of_k[behind + at.other]);
        for (long long j = pair; j < plain; j += half) {
            store(wide_of(of_q[start + j]), to_q[start + j]);
            store(wide_of(of_k[start + j]), to_kv[pairs + j]);
        }
        for (long long j = pair; j < value; j += half)
            store(wide_of(of_v[head * value + j]), to_kv[pairs + plain + j]);
    }
    store(one * c + other * s, shared[at.one]);
    store(other * c - one * s, shared[at.other]);
}
"""
)


def latent_heads(q: Array, kv: Array, turned: Array, heads: int, rope: Rope, out: Array) -> None:
    if not q.size:
        return
    stored = common(q, kv, turned)
    with result_for(out) as result:
        arrays = *(dense(a, stored) for a in (q, kv, turned)), result
        _run("latent_heads", arrays, (stored, out.dtype), q.shape, kv.shape[2], heads, rope, turned.shape[2] // 2)


def latent_heads_backward(grad: Array, heads: int, rope: Rope, dq: Array, dkv: Array, dturned: Array) -> None:
    if not grad.size:
        return
    stored = common(dq, dkv, dturned)
    with result_for(dq, stored) as q, result_for(dkv, stored) as kv, result_for(dturned, stored) as turned:
        arrays, half = (dense(grad), q, kv, turned), dturned.shape[2] // 2
        _run("latent_heads_backward", arrays, (grad.dtype, stored), dq.shape, dkv.shape[2], heads, rope, half)


def _run(
    name: str,
    arrays: tuple[Array, ...],
    types: tuple[np.dtype[Any], ...],
    shape: tuple[int, ...],
    pairs: int,
    heads: int,
    rope: Rope,
    half: int,
) -> None:
    batch, tokens, columns = shape
    plain = columns // heads - 2 * half
    sizes = rope.first, tokens, batch * tokens, heads, plain, half, pairs // heads - plain
    numbers = float(rope.base), float(rope.factor), np.int32(rope.interleaved)
    kernel = raw(with_rates(_HEADS, rope.frequencies), name, types)
    run_threads(kernel, batch * tokens * half, *arrays, *sizes, *numbers)
