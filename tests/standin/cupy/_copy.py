"""cudaMemcpy: between devices, and between device and host, where pinned memory is the awkward case.

An asynchronous copy to pinned memory shows its bytes only once the host has waited for it: until then they read as
0xFF, so that a missing wait gives wrong numbers here too. One from pinned memory checks, when it is known to be done,
that the source was left alone.
"""

from __future__ import annotations

import ctypes

import numpy as np

from cupy._clock import StreamClock, finish, launch, stream_of, submit
from cupy._pinned import host_bytes, pinned
from cupy._segments import find, is_device, touch
from cupy._state import LOCK, RaceError, StandinError, count_wait, place

H2H, H2D, D2H, D2D, DEFAULT = range(5)


def guard(clock: StreamClock, count: int, ptr: int, nbytes: int) -> None:
    source = pinned(ptr, nbytes)
    if source is None:
        return
    before, where = source.copy(), place()

    def check() -> None:
        if not np.array_equal(before, source):
            raise RaceError(f"pinned memory was changed before the copy from it ({where}) was waited for")

    clock.pending.append((count, check))


def kind_of(dst: int, src: int, kind: int) -> int:
    actual = (D2D if is_device(src) else H2D) if is_device(dst) else (D2H if is_device(src) else H2H)
    if kind not in (actual, DEFAULT):
        raise StandinError(f"memcpy of kind {kind}, where the pointers say {actual} (H2H 0, H2D 1, D2H 2, D2D 3)")
    return actual


def memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    if size == 0:
        return
    with LOCK:
        kind = kind_of(dst, src, kind)
        clock = stream_of(stream)
        if kind == D2D:
            submit(clock, lambda clock: _copy_on_device(clock, dst, src, size))
            return
        work = launch(clock, ("memcpy H2H", "memcpy H2D", "memcpy D2H", "memcpy D2D")[kind])
        found = _bytes(work, src, size, False) if kind == D2H else None
        if kind == H2D:
            there = _bytes(work, dst, size, True)
            there[...] = host_bytes(src, size)
            guard(clock, work.count, src, size)
        elif kind == H2H or (target := pinned(dst, size)) is None:
            count_wait("a copy to pageable host memory")
            ctypes.memmove(dst, src if found is None else found.ctypes.data, size)
            finish(dict(clock.seen))
        else:
            assert found is not None
            held = found.copy()
            target[...] = 0xFF

            def show() -> None:
                target[...] = held

            clock.pending.append((work.count, show))


def _copy_on_device(clock: StreamClock, dst: int, src: int, size: int) -> None:
    with LOCK:
        work = launch(clock, "memcpy D2D")
        found = _bytes(work, src, size, False)
        _bytes(work, dst, size, True)[...] = found


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    """Synchronous, on the null stream."""
    with LOCK:
        memcpy_async(dst, src, size, kind, 0)
        clock = stream_of(0)
        if kind_of(dst, src, kind) == D2H:
            count_wait("memcpy")
        finish(dict(clock.seen))


def memcpy_peer_async(dst: int, dst_device: int, src: int, src_device: int, size: int, stream: int) -> None:
    if size == 0:
        return
    with LOCK:
        work = launch(stream_of(stream), "memcpyPeer")
        views = []
        for ptr, device, writes in ((src, src_device, False), (dst, dst_device, True)):
            segment, offset = find(ptr, size, work.name)
            if segment.device != device:
                raise StandinError(f"memcpyPeer was told device {device} for memory of device {segment.device}")
            (segment.history.write if writes else segment.history.read)(offset, offset + size, work)
            views.append(segment.bytes[offset : offset + size])
        views[1][...] = views[0]


def _bytes(work: object, ptr: int, size: int, writes: bool) -> np.ndarray:
    found = touch(work, ptr, (size,), (1,), 1, writes)  # type: ignore[arg-type]
    assert found is not None
    return found
