"""An element-wise rule on weights that are stored in bf16, as one CUDA kernel. The rules: `optim/rounding.py`.

As in numpy/rounding.py, to the bit. Blocks of threads count lost updates, of weights and of their last state, and
add each count to one number. Counts are
integers, so the order of additions changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from zerosim.backends.cuda.fused import PHILOX
from zerosim.backends.cuda.types import NULL, raw, run_threads
from zerosim.backends.kernels import Array, Storing

DRAWN = 16
"""Numbers of the stream per counter, which is also the number of elements per thread."""

KERNEL = r"""
__global__ void stored_rule(const G* grad, T* param, T* compensation, double* lost, unsigned long long key0,
                            unsigned long long key1, long long first, long long size, double grad_scale ARGUMENTS) {
    using W = typename wide<T>::type;
    __shared__ double shared[32];
    const long long block = first / 16 + static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    DRAW
    int count = 0, stuck = 0;
    for (int k = 0; k < 16; ++k) {
        const long long i = 16 * block + k - first;
        if (i < 0 || i >= size) continue;
        const W old = wide_of(param[i]);
        W w = old;
        LOAD
        W g = W(wide_of(grad[i])) * W(grad_scale);
        RULE
        STORE
        count += w != old && wide_of(param[i]) == old;
    }
    const double total = row_sum(static_cast<double>(count), shared);
    if (threadIdx.x == 0 && total != 0) atomicAdd(lost, total);
    __syncthreads();
    const double moments = row_sum(static_cast<double>(stuck), shared);
    if (threadIdx.x == 0 && moments != 0) atomicAdd(lost + 1, moments);
}
"""

STORE = {
    "nearest": "store(w, param[i]);",
    "stochastic": r"""
        const unsigned int bits = __float_as_uint(w), cut = bits & 0xFFFFu;
        const unsigned int up = (words.at[k / 2] >> (16 * (k % 2)) & 0xFFFFu) < cut ? 0x10000u : 0u;
        store(__uint_as_float(bits - cut + up), param[i]);""",
    "kahan": r"""
        W update = w - old;
        update += wide_of(compensation[i]);
        store(old + update, param[i]);
        update += old - wide_of(param[i]);
        store(update, compensation[i]);""",
}


@cache
def stored_source(kind: str, lines: str, states: int, numbers: int) -> str:
    """Return the source of the kernel for a rule with that number of states and numbers."""
    last = f"s{states - 1}", f"wide_of(state{states - 1}[i])"
    arguments = [f", double n{i}" for i in range(numbers)] + [f", O* state{i}" for i in range(states)]
    parts = {
        "ARGUMENTS": "".join(arguments),
        "DRAW": "const Words words = philox_words(key0, key1, block);" if kind == "stochastic" else "",
        "LOAD": " ".join(
            [*(f"W s{i} = wide_of(state{i}[i]);" for i in range(states)), f"const W before = {last[0]};" * (states > 0)]
        ),
        "RULE": lines,
        "STORE": " ".join(
            [
                *(STORE[kind], *(f"store(s{i}, state{i}[i]);" for i in range(states))),
                f"stuck += {last[0]} != before && {last[1]} == before;" * (states > 0),
            ]
        ),
    }
    source = KERNEL
    for name, text in parts.items():
        source = source.replace(name, text)
    return f"{PHILOX}template <class G, class T, class O>{source}"


def stored_step(
    lines: str, numbers: Sequence[float], grad: Array, param: Array, states: Sequence[Array], storing: Storing
) -> None:
    """Take one step of a rule with the `lines` and `numbers` of `rules.py`; all arrays are contiguous.

    The first number is the factor of the gradients.
    """
    if not param.size:
        return
    first, size = storing.first, param.size
    threads = -(-(first % DRAWN + size) // DRAWN)
    compensation = NULL if storing.compensation is None else storing.compensation
    source = stored_source(storing.kind, lines, len(states), len(numbers) - 1)
    kernel = raw(source, "stored_rule", (grad.dtype, param.dtype, (*states, param)[0].dtype))
    fixed = grad, param, compensation, storing.lost, *map(np.uint64, storing.key), first, size
    run_threads(kernel, threads, *fixed, *numbers, *states)
