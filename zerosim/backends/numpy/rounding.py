"""An optimizer's step on weights that are stored in bf16, and how they are rounded. The rules: `optim/rounding.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerosim.backends.kernels import Array, Rule, Storing
from zerosim.backends.numpy.cast import BFLOAT16, BLOCK, raised, store


def stored_step(rule: Rule, grad: Array, param: Array, states: Sequence[Array], storing: Storing) -> None:
    """Run one step, in fp32, of bf16 arrays; `storing.lost` counts updates that did not change the stored
    weight, or the last state."""
    for start in range(0, param.size, BLOCK):
        here = slice(start, min(start + BLOCK, param.size))
        old, kept = raised(param[here]), [raised(state[here]) for state in states]
        w = old.copy()
        rule.run(np, w, np.multiply(raised(grad[here]), rule.grad_scale, dtype=w.dtype), rule.now, *kept)
        update = w - old
        if storing.compensation is not None:
            update += raised(storing.compensation[here])
            store(old + update, param[here])
            update += old - raised(param[here])
            store(update, storing.compensation[here])
        elif storing.kind == "stochastic":
            drawn = words16(storing.key, storing.first + start, w.size)
            param[here] = stochastic(w, drawn).astype(BFLOAT16)
        else:
            store(w, param[here])
        for state, values in zip(states, kept, strict=True):
            before = raised(state[here]) if state is states[-1] else values
            store(values, state[here])
            storing.lost[1] += np.count_nonzero((values != before) & (raised(state[here]) == before))
        storing.lost[0] += np.count_nonzero((w != old) & (raised(param[here]) == old))


def stochastic(values: Array, drawn: Array) -> Array:
    """Round float32 `values` to those of bf16, still as float32: away from 0 where `drawn`, 16 bits, is less than the
    16 bits that are cut off, towards 0 otherwise."""
    bits = values.view(np.uint32)
    cut = bits & np.uint32(0xFFFF)
    return ((bits - cut) + ((drawn < cut).astype(np.uint32) << np.uint32(16))).view(np.float32)


def words16(key: tuple[int, int], first: int, count: int) -> Array:
    """Return the numbers from `first` on of a stream of 16-bit numbers: Philox-4x64-10, 16 numbers per counter, low
    bits first."""
    words = np.random.Philox(key=np.array(key, np.uint64), counter=first // 16)
    skip = first % 16
    drawn = words.random_raw((skip + count + 3) // 4).astype("<u8", copy=False).view("<u2")
    return drawn[skip : skip + count]
