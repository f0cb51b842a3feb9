"""Freed memory stays with the process, so that the next array gets pages that are already mapped.

A training step frees all its activations and asks for the same sizes again. glibc gives large
blocks back to the kernel at once, and threads get arenas that are trimmed eagerly: then every step
pays a page fault for each 4 KiB of its activations. One arena that is never trimmed avoids that. It
works best before any other thread has allocated. A notebook's kernel
already has threads, so it gains less.
"""

from __future__ import annotations

import ctypes
import sys

# glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGEST_OF_OLD_GLIBC = 32 << 20


def keep_freed_memory() -> None:
    """Ask glibc not to return memory to the kernel. Elsewhere nothing happens. Idempotent."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return
    mallopt(M_ARENA_MAX, 1)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    if not mallopt(M_MMAP_THRESHOLD, 1 << 30):
        mallopt(M_MMAP_THRESHOLD, LARGEST_OF_OLD_GLIBC)
