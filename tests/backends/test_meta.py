"""Arrays without values: shapes, strides and refusals are NumPy's, over chains of the calls that a program makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerosim.backends.meta import MetaArray, MetaBackend
from zerosim.dtypes import bf16, fp32

LENGTHS = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)
BOUND = st.one_of(st.none(), st.integers(-5, 5))
PART = st.one_of(
    st.slices(4), st.builds(slice, BOUND, BOUND, st.sampled_from([None, 1, 2])), st.integers(-5, 4), st.just(Ellipsis)
)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("index"), st.lists(PART, min_size=1, max_size=4)),
        st.tuples(st.just("reshape"), st.lists(st.integers(-1, 6), min_size=1, max_size=3)),
        st.tuples(st.just("transpose"), st.randoms(use_true_random=False)),
        st.tuples(st.just("swapaxes"), st.tuples(st.integers(0, 3), st.integers(0, 3))),
        st.tuples(st.just("T"), st.none()),
    ),
    max_size=5,
)


def applied(array: Any, call: str, argument: Any) -> Any:
    if call == "index":
        return array[tuple(argument)]
    if call == "reshape":
        return array.reshape(*argument)
    if call == "transpose":
        return array.transpose(*argument)
    if call == "swapaxes":
        return array.swapaxes(*argument)
    return array.T


@pytest.mark.slow
@settings(max_examples=400)
@given(LENGTHS, CALLS)
def test_a_window_is_numpys(shape: tuple[int, ...], calls: list[tuple[str, Any]]) -> None:
    real: Any = np.zeros(shape, np.float32)
    meta: Any = MetaArray(shape, 4)
    for call, argument in calls:
        if call == "index" and argument.count(Ellipsis) > 1:
            continue
        if call == "transpose":
            axes = list(range(real.ndim))
            argument.shuffle(axes)
            argument = axes
        if call == "swapaxes" and max(argument) >= real.ndim:
            continue
        if call == "reshape" and (argument.count(-1) > 1 or (-1 in argument and 0 in argument)):
            continue
        try:
            expected = applied(real, call, argument)
        except (IndexError, ValueError) as error:
            with pytest.raises(type(error)):
                applied(meta, call, argument)
            continue
        if call == "reshape" and not np.shares_memory(expected, real) and real.size:
            with pytest.raises(ValueError, match="cannot be seen"):  # NumPy copies
                applied(meta, call, argument)
            continue
        if call == "reshape" and not real.flags.c_contiguous:
            continue  # where NumPy finds strides for it, a program may not count on it
        if not isinstance(expected, np.ndarray):
            expected = np.asarray(expected)  # one number, which NumPy takes out of its array
        real, meta = expected, applied(meta, call, argument)
        assert (meta.shape, meta.size, meta.ndim, meta.nbytes) == (real.shape, real.size, real.ndim, real.nbytes)
        assert meta.flags.c_contiguous == real.flags.c_contiguous
        if real.size > 1:
            moving = [i for i, length in enumerate(real.shape) if length > 1]
            assert [meta.strides[i] for i in moving] == [real.strides[i] // 4 for i in moving]
        if real.ndim == 0:
            break


def test_what_a_program_reads_is_zero_and_takes_no_memory() -> None:
    backend = MetaBackend()
    huge = backend.empty((10**6, 10**6), bf16)
    assert (huge.size, huge.nbytes) == (10**12, 2 * 10**12)
    values = backend.to_host(huge)
    assert values.shape == (10**6, 10**6)
    assert values[0, 0] == values[-1, -1] == 0.0
    assert not backend.to_host_later(backend.empty((2, 3), fp32))().any()
